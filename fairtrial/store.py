"""Durable files below one folder: written whole and renamed, or appended and fsynced; never half there."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, Self

from fairtrial.errors import Refused, Superseded

RESERVE = "reserve"
RESERVE_BYTES = 4 << 20
PARTIAL = ".partial"

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Store(Protocol):
    """Files by name: relative, parts joined by ``/``, no part empty, ``.`` or ``..`` (else ``ValueError``).

    ``read``, ``digest``, ``remove`` and ``truncate`` raise ``FileNotFoundError`` for a name that is not there.
    What ``write``, ``append``, ``remove`` and ``truncate`` changed survives a power cut once they returned.
    """

    @property
    def low(self) -> bool:
        """Whether a full disk has cost the reserve."""

    def write(self, name: str, content: bytes) -> None:
        """Replace a whole file: a reader sees the old content or the new. ``OSError`` leaves the old."""

    def append(self, name: str, content: bytes) -> None:
        """Add to the end of a file, made if absent. ``OSError`` leaves it as it was."""

    def read(self, name: str) -> bytes:
        """Return the content of a file."""

    def digest(self, name: str) -> str:
        """Return the SHA-256 of a file, 64 hex digits, without holding the file in memory."""

    def names(self) -> list[str]:
        """Return the names of all regular files, sorted; what a killed ``write`` left ends in ``.partial``."""

    def exists(self, name: str) -> bool:
        """Return whether a regular file of this name is there."""

    def remove(self, name: str) -> None:
        """Remove a file."""

    def truncate(self, name: str, size_bytes: int) -> None:
        """Cut a file to its first bytes."""

    def anchor(self, name: str) -> None:
        """From now on change nothing once this file is replaced by another's: ``Superseded`` is raised instead."""

    def release_reserve(self) -> None:
        """Give the reserved space up, if that has not been done."""

    def close(self) -> None:
        """Close what ``append`` keeps open; the store can be used again."""


class Directory:
    """A ``Store`` in a folder of this machine: files 0600, folders 0700.

    When the disk is full, the 4 MiB reserve is removed and the operation tried once more; ``OSError`` after that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.low = False
        self._descriptors: dict[str, int] = {}
        self._anchor: tuple[Path, os.stat_result] | None = None

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make the folder and its reserve. Raises ``Refused`` if it is there and not an empty folder."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            if any(path.iterdir()):
                raise Refused(f"{path}: not empty; name a folder that does not exist yet, or an empty one")
            path.chmod(0o700)
            _sync_folder(path.parent)
            store = cls(path)
            # Random, because a file system that compresses would keep no space for zeros.
            store.write(RESERVE, os.urandom(RESERVE_BYTES))
        except OSError as error:
            raise Refused(
                f"{path}: cannot keep evidence there ({error.strerror}); "
                "name a new or empty folder that you may write, on a disk with space"
            ) from error
        return store

    @classmethod
    def open(cls, path: Path) -> Self:
        """Take up an existing folder. Raises ``Refused`` if there is none."""
        if not path.is_dir():
            raise Refused(f"{path}: no such folder; name the OUT folder of a window")
        return cls(path)

    def anchor(self, name: str) -> None:
        """From now on change nothing once this file is replaced by another's: ``Superseded`` is raised instead."""
        path = self._file(name)
        self._anchor = (path, path.stat())

    def write(self, name: str, content: bytes) -> None:
        self._stay_owner()
        path = self._writable(name)
        self._close(name)
        self._spending_reserve(lambda: self._replace(path, content))

    def append(self, name: str, content: bytes) -> None:
        self._stay_owner()
        path = self._writable(name)
        self._spending_reserve(lambda: self._extend(name, path, content))

    def read(self, name: str) -> bytes:
        return self._file(name).read_bytes()

    def digest(self, name: str) -> str:
        return file_digest(self._file(name))

    def names(self) -> list[str]:
        return sorted(name for name, regular in files_below(self.path) if regular)

    def exists(self, name: str) -> bool:
        try:
            return stat.S_ISREG(self._file(name).lstat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def remove(self, name: str) -> None:
        self._stay_owner()
        path = self._file(name)
        self._close(name)
        path.unlink()
        _sync_folder(path.parent)

    def truncate(self, name: str, size_bytes: int) -> None:
        self._stay_owner()
        descriptor = os.open(self._file(name), os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.ftruncate(descriptor, size_bytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def release_reserve(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.remove(RESERVE)

    def close(self) -> None:
        for name in list(self._descriptors):
            self._close(name)

    def _stay_owner(self) -> None:
        if self._anchor is not None:
            path, opened = self._anchor
            if not os.path.samestat(opened, path.stat()):
                raise Superseded(f"{path} was replaced by another restorer, which owns this window now")

    def _file(self, name: str) -> Path:
        return self.path / checked(name)

    def _writable(self, name: str) -> Path:
        if name.endswith(PARTIAL):
            raise ValueError(f"{name!r}: {PARTIAL} marks files that are not whole yet; choose another name")
        return self._file(name)

    def _spending_reserve(self, operation: Callable[[], None]) -> None:
        try:
            operation()
        except OSError as error:
            if error.errno not in _FULL or not self.exists(RESERVE):
                raise
            self.low = True
            self.release_reserve()
            operation()

    def _replace(self, path: Path, content: bytes) -> None:
        self._make_folder(path.parent)
        partial = path.with_name(path.name + PARTIAL)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            descriptor = os.open(partial, flags, 0o600)
            try:
                _write_all(descriptor, content)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            partial.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        _sync_folder(path.parent)

    def _extend(self, name: str, path: Path, content: bytes) -> None:
        descriptor = self._descriptor(name, path)
        if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise Superseded(f"{path} was replaced by another restorer, which owns this window now")
        size_before = os.fstat(descriptor).st_size
        try:
            _write_all(descriptor, content)
            os.fsync(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size_before)
            raise

    def _descriptor(self, name: str, path: Path) -> int:
        if name not in self._descriptors:
            self._make_folder(path.parent)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            self._descriptors[name] = os.open(path, flags, 0o600)
            try:
                _sync_folder(path.parent)
            except OSError:
                self._close(name)
                raise
        return self._descriptors[name]

    def _close(self, name: str) -> None:
        if (descriptor := self._descriptors.pop(name, None)) is not None:
            os.close(descriptor)

    def _make_folder(self, folder: Path) -> None:
        if folder == self.path or folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(mode=0o700)
        _sync_folder(folder.parent)


def checked(name: str) -> str:
    """Return the name of a file of a store. Raises ``ValueError`` for one that could lead out of it."""
    if "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise ValueError(f"{name!r} names no file below a store: use relative parts joined by /")
    return name


def files_below(folder: Path, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield (name, is it a regular file) for all that lies below a folder, folders and links not followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from files_below(Path(entry.path), f"{prefix}{entry.name}/")
            else:
                yield prefix + entry.name, entry.is_file(follow_symlinks=False)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hex digits, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def report_unwritten(what: str, error: Exception) -> None:
    """Say on standard error what a restore could not write down; never raises, because a restore goes on."""
    # A name or a string in the error could hold text; its class and number cannot.
    reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"fairtrial: not written ({reason}): {what}", file=sys.stderr, flush=True)


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
