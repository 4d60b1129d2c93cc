"""The files of a simulated host against the real kernel's: the same scripts of calls, the same results and errnos.

Left out is what the host program never does: to follow a link, to rename a folder, to use a descriptor against the way
in which it was opened, to wait for a lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.backends.simulated import Clock, Host
from fairtrial.backends.simulated.posix import MODULES, builtin_open

R, W, RW = os.O_RDONLY, os.O_WRONLY, os.O_RDWR
CREAT, EXCL, TRUNC, APPEND = os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND
NOFOLLOW, FOLDER = os.O_NOFOLLOW, os.O_DIRECTORY

Step = tuple[Any, ...]
Told = TypeVar("Told")


class Calls:
    """One kernel's calls below one folder. Descriptors have names, for their numbers may differ."""

    def __init__(self, modules: dict[str, Any], opened: Callable[..., Any], base: str, symlink: Callable[..., None]):
        self.os, self.fcntl, self.opened, self.base, self.symlink = (
            modules["os"],
            modules["fcntl"],
            opened,
            base,
            symlink,
        )
        self.fds: dict[str, int] = {}

    def play(self, script: list[Step]) -> list[object]:
        """What each step gave, an errno by its name, and then what the folder holds."""
        found: list[object] = []
        for name, *words in script:
            try:
                found.append((name, *words, getattr(self, name)(*words)))
            except OSError as error:
                found.append((name, *words, errno.errorcode[error.errno or 0], type(error).__name__))
        found.append(self.tree(""))
        for fd in self.fds.values():
            self.os.close(fd)
        return found

    def tree(self, name: str) -> object:
        """Everything below a name: folders as dicts; files as mode, content, and the names that are the same file."""
        seen = self.os.lstat(self.at(name))
        if stat.S_ISDIR(seen.st_mode):
            return {one: self.tree(f"{name}/{one}") for one in sorted(self.os.listdir(self.at(name)))}
        if stat.S_ISLNK(seen.st_mode):
            return "link"
        return stat.S_IMODE(seen.st_mode), self.content(name), self.twins(name)

    def twins(self, name: str) -> list[str]:
        folder = name.rpartition("/")[0]
        names = self.os.listdir(self.at(folder))
        mine = self.os.lstat(self.at(name))
        return sorted(one for one in names if self.os.path.samestat(mine, self.os.lstat(self.at(f"{folder}/{one}"))))

    def at(self, name: str) -> str:
        return f"{self.base}/{name}".rstrip("/")

    def fd(self, handle: str) -> int:
        if handle not in self.fds:
            raise OSError(errno.EBADF, "not opened")
        return self.fds[handle]

    # ---- the steps of a script

    def open(self, handle: str, name: str, flags: int, mode: int = 0o644) -> None:
        fd = self.os.open(self.at(name), flags, mode)
        if handle in self.fds:
            self.os.close(self.fds[handle])
        self.fds[handle] = fd

    def close(self, handle: str) -> None:
        fd = self.fd(handle)
        del self.fds[handle]
        self.os.close(fd)

    def close_twice(self, handle: str) -> None:
        fd = self.fd(handle)
        self.close(handle)
        self.os.close(fd)

    def write(self, handle: str, content: bytes) -> int:
        return int(self.os.write(self.fd(handle), content))

    def pwrite(self, handle: str, content: bytes, at: int) -> int:
        return int(self.os.pwrite(self.fd(handle), content, at))

    def read(self, handle: str, size: int) -> bytes:
        return bytes(self.os.read(self.fd(handle), size))

    def content(self, name: str) -> bytes:
        with self.opened(self.at(name), "rb") as file:
            return bytes(file.read())

    def rename(self, source: str, target: str) -> None:
        self.os.rename(self.at(source), self.at(target))

    def link(self, source: str, target: str) -> None:
        self.os.link(self.at(source), self.at(target))

    def unlink(self, name: str) -> None:
        self.os.unlink(self.at(name))

    def soft(self, name: str) -> None:
        """A symbolic link, which the host program makes none of, but meets."""
        self.symlink("elsewhere", self.at(name))

    def mkdir(self, name: str, mode: int = 0o755) -> None:
        self.os.mkdir(self.at(name), mode)

    def makedirs(self, name: str, exist_ok: bool) -> None:
        self.os.makedirs(self.at(name), exist_ok=exist_ok)

    def chmod(self, name: str, mode: int) -> None:
        self.os.chmod(self.at(name), mode)

    def fchmod(self, handle: str, mode: int) -> None:
        self.os.fchmod(self.fd(handle), mode)

    def stat(self, name: str) -> object:
        return self.seen(self.os.stat(self.at(name), follow_symlinks=False))

    def lstat(self, name: str) -> object:
        return self.seen(self.os.lstat(self.at(name)))

    def fstat(self, handle: str) -> object:
        return self.seen(self.os.fstat(self.fd(handle)))

    def seen(self, found: Any) -> object:
        size = found.st_size if stat.S_ISREG(found.st_mode) else None
        return stat.S_IFMT(found.st_mode), size, found.st_uid == self.os.geteuid()

    def same(self, handle: str, name: str) -> bool:
        """Whether a descriptor's file is the one that has this name."""
        return bool(self.os.path.samestat(self.os.fstat(self.fd(handle)), self.os.stat(self.at(name))))

    def listdir(self, name: str) -> list[str]:
        return sorted(self.os.listdir(self.at(name)))

    def exists(self, name: str) -> tuple[bool, bool, bool]:
        path = self.at(name)
        return self.os.path.exists(path), self.os.path.isfile(path), self.os.access(path, os.W_OK)

    def flock(self, handle: str) -> None:
        self.fcntl.flock(self.fd(handle), self.fcntl.LOCK_EX | self.fcntl.LOCK_NB)


def inside(work: Callable[[Host], Told]) -> Told:
    """Do something as a process of a simulated host."""
    clock = Clock()
    host = Host("one", clock)
    process = host.spawn(("test",), {}, "/")
    found: list[Told] = []

    def all_of_it() -> None:
        host.run(process, lambda: (found.append(work(host)), host.exit(process, 0)))
        clock.wait(process.over, None)

    clock.drive(all_of_it)
    return found[0]


def simulated(script: list[Step]) -> list[object]:
    def work(host: Host) -> list[object]:
        host.make("/var/tmp/base", 0o040755)
        calls = Calls(
            MODULES, builtin_open, "/var/tmp/base", lambda target, path: host.make(path, stat.S_IFLNK | 0o777)
        )
        return calls.play(script)

    return inside(work)


@contextmanager
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(before)


def real(script: list[Step]) -> list[object]:
    with usual_umask(), tempfile.TemporaryDirectory() as base:
        return Calls({"os": os, "fcntl": fcntl}, open, base, os.symlink).play(script)


MADE: list[Step] = [
    ("open", "f", "a", W | CREAT),
    ("write", "f", b"content"),
    ("close", "f"),
    ("mkdir", "d"),
    ("open", "f", "d/b", W | CREAT),
    ("close", "f"),
]
"""A file ``a`` of 7 bytes, a folder ``d`` with an empty file ``b``."""

SCRIPTS: dict[str, list[Step]] = {
    "open what is there, and what is not": [
        *[
            ("open", "x", name, flags)
            for name in ("a", "no", "no/no", "a/no", "a/no/no")
            for flags in (R, RW, RW | CREAT)
        ],
        *[("open", "x", name, RW | CREAT | EXCL) for name in ("a", "new", "no/no", "a/no", "d")],
    ],
    "open a folder": [
        *[("open", "x", "d", flags) for flags in (R, R | FOLDER, W, RW, R | CREAT, W | CREAT, R | TRUNC)],
        *[("open", "x", name, R | FOLDER) for name in ("a", "no", "a/no")],
    ],
    "open a link": [
        ("soft", "s"),
        *[("open", "x", "s", flags) for flags in (R | NOFOLLOW, RW | CREAT | NOFOLLOW, RW | CREAT | EXCL | NOFOLLOW)],
        ("lstat", "s"),
        ("stat", "s"),
        ("unlink", "s"),
        ("lstat", "s"),
    ],
    "an opened file is cut only when that is asked": [
        ("open", "x", "a", RW | CREAT),
        ("fstat", "x"),
        ("open", "y", "a", RW | CREAT | TRUNC),
        ("fstat", "x"),
        ("write", "x", b"!"),
        ("content", "a"),
    ],
    "writes go on where the last ended": [
        ("open", "x", "a", RW),
        ("read", "x", 3),
        ("write", "x", b"XX"),
        ("read", "x", 100),
        ("read", "x", 100),
        ("write", "x", b"end"),
        ("content", "a"),
    ],
    "two descriptors have two places, and one content": [
        ("open", "x", "a", RW),
        ("open", "y", "a", RW),
        ("write", "x", b"12"),
        ("read", "y", 4),
        ("write", "y", b"34"),
        ("read", "x", 100),
    ],
    "appended bytes go to the end, wherever that is by then": [
        ("open", "x", "a", W | APPEND),
        ("open", "y", "a", W | APPEND),
        ("write", "x", b"1"),
        ("write", "y", b"22"),
        ("write", "x", b"3"),
        ("content", "a"),
    ],
    "a write in place moves nothing else": [
        ("open", "x", "a", RW),
        ("pwrite", "x", b"XX", 2),
        ("pwrite", "x", b"YYY", 6),
        ("read", "x", 100),
        ("fstat", "x"),
    ],
    "a write beyond the end fills with zeros": [
        ("open", "x", "a", RW),
        ("pwrite", "x", b"far", 12),
        ("content", "a"),
        ("open", "y", "a", RW | TRUNC),
        ("read", "x", 3),
        ("fstat", "x"),
        ("write", "y", b"0123456789"),
        ("open", "z", "a", RW | TRUNC),
        ("write", "y", b"after"),
        ("content", "a"),
    ],
    "an empty write changes nothing": [
        ("open", "x", "a", RW),
        ("write", "x", b""),
        ("pwrite", "x", b"", 50),
        ("fstat", "x"),
    ],
    "rename replaces at once": [
        ("open", "old", "a", RW),
        ("open", "new", "n", RW | CREAT),
        ("write", "new", b"new"),
        ("rename", "n", "a"),
        ("content", "a"),
        ("same", "new", "a"),
        ("same", "old", "a"),
        ("read", "old", 100),
        ("stat", "n"),
    ],
    "rename what cannot be": [
        ("rename", "no", "a"),
        ("rename", "no", "no"),
        ("rename", "a", "no/no"),
        ("rename", "no", "a/no"),
        ("rename", "no/no", "a/no"),
        ("rename", "a", "d/b/no"),
        ("rename", "a", "d"),
        ("rename", "d/b/no", "x"),
        ("rename", "a", "a"),
        ("rename", "d", "d"),
    ],
    "rename between two names of one file does nothing": [
        ("link", "a", "n"),
        ("rename", "n", "a"),
        ("listdir", ""),
    ],
    "a hard link is one more name, and never replaces": [
        ("link", "a", "n"),
        ("open", "x", "n", W),
        ("write", "x", b"N"),
        ("content", "a"),
        ("link", "d/b", "a"),
        ("unlink", "a"),
        ("content", "n"),
        *[("link", source, target) for source in ("no", "n", "a/x", "d") for target in ("n", "no/no", "d", "m")],
        ("link", "d", "e"),
    ],
    "what is unlinked lives on in its descriptors": [
        ("open", "x", "a", RW),
        ("unlink", "a"),
        ("read", "x", 3),
        ("write", "x", b"more"),
        ("fstat", "x"),
        ("stat", "a"),
        ("open", "y", "a", RW | CREAT),
        ("same", "x", "a"),
        ("same", "y", "a"),
    ],
    "unlink what cannot be": [("unlink", "no"), ("unlink", "no/no"), ("unlink", "a/no"), ("unlink", "d")],
    "folders": [
        *[("mkdir", name) for name in ("a", "d", "new", "no/no", "a/no", "d/deep", "a/no/no")],
        *[
            ("makedirs", name, exist)
            for name in ("a", "d", "m/n/o", "m/n", "a/no", "a/no/no")
            for exist in (True, False)
        ],
        *[("listdir", name) for name in ("", "d", "m", "m/n/o", "a", "no", "a/no")],
    ],
    "look": [
        *[(look, name) for look in ("stat", "lstat", "exists") for name in ("a", "d", "d/b", "no", "no/no", "a/no")],
        *[("content", name) for name in ("a", "d", "d/b", "no", "no/no", "a/no")],
    ],
    "modes": [
        ("open", "x", "private", RW | CREAT, 0o600),
        ("open", "y", "wide", RW | CREAT, 0o644),
        ("open", "y", "wide", RW | CREAT, 0o600),
        ("mkdir", "own", 0o700),
        ("fchmod", "x", 0o640),
        ("chmod", "d", 0o777),
        ("chmod", "no", 0o777),
    ],
    "a closed descriptor is none": [
        ("open", "x", "a", RW),
        ("close", "x"),
        ("read", "x", 1),
        ("open", "x", "a", RW),
        ("close_twice", "x"),
    ],
    "of two descriptors one has the lock, until it is closed": [
        ("open", "x", "a", RW),
        ("open", "y", "a", RW),
        ("flock", "x"),
        ("flock", "x"),
        ("flock", "y"),
        ("close", "y"),
        ("open", "y", "a", RW),
        ("flock", "y"),
        ("close", "x"),
        ("flock", "y"),
    ],
    "a lock is of the file, not of its name": [
        ("open", "x", "a", RW),
        ("flock", "x"),
        ("rename", "a", "b"),
        ("open", "y", "b", RW),
        ("flock", "y"),
        ("unlink", "b"),
        ("open", "z", "b", RW | CREAT),
        ("flock", "z"),
        ("flock", "y"),
    ],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_script_gives_what_the_real_kernel_gives(script: list[Step]) -> None:
    assert simulated(MADE + script) == real(MADE + script)


names = st.sampled_from(["a", "b", "d", "d/a", "d/b", "a/b", "no/a"])
files = st.sampled_from(["a", "b", "d/a", "d/b", "e"])
folders = st.sampled_from(["d", "d/sub", "c/c"])
handles = st.sampled_from(["x", "y", "z"])
content = st.sampled_from([b"", b"1", b"two", b"a longer one"])
modes = st.sampled_from([RW, RW | CREAT, RW | CREAT | TRUNC, RW | CREAT | EXCL, RW | CREAT | NOFOLLOW, RW | TRUNC])
steps = st.one_of(
    st.tuples(st.just("open"), handles, names, modes),
    st.tuples(st.just("write"), handles, content),
    st.tuples(st.just("pwrite"), handles, content, st.integers(0, 20)),
    st.tuples(st.just("read"), handles, st.integers(1, 20)),
    st.tuples(st.sampled_from(["close", "fstat", "flock"]), handles),
    st.tuples(st.just("same"), handles, names),
    st.tuples(st.sampled_from(["content", "unlink", "stat", "lstat", "listdir", "exists"]), names),
    st.tuples(st.just("mkdir"), st.one_of(folders, st.sampled_from(["a/no", "no/no"]))),
    st.tuples(st.just("makedirs"), folders, st.booleans()),
    st.tuples(st.sampled_from(["rename", "link"]), files, files),
)


@settings(deadline=None)
@given(st.lists(steps, max_size=30))
def test_any_sequence_gives_what_the_real_kernel_gives(script: list[Step]) -> None:
    assert simulated(script) == real(script)


# ---- what the real kernel would need a disk or an hour for ------------------------------------------------------


def test_the_time_of_change_is_that_of_the_last_change_of_content_mode_or_name() -> None:
    """A term's age is the time of its file's last rename."""
    simulation = MODULES["os"]

    def work(host: Host) -> list[float]:
        begin = host.clock.utc_s()
        fd = simulation.open("/var/tmp/a", RW | CREAT, 0o644)
        told = [simulation.fstat(fd).st_ctime - begin]
        for change in (
            lambda: simulation.write(fd, b"x"),
            lambda: simulation.fchmod(fd, 0o600),
            lambda: simulation.chmod("/var/tmp/a", 0o644),
            lambda: simulation.rename("/var/tmp/a", "/var/tmp/b"),
            lambda: simulation.link("/var/tmp/b", "/var/tmp/c"),
            lambda: simulation.unlink("/var/tmp/c"),
            lambda: simulation.read(fd, 1),
        ):
            host.clock.sleep(1)
            change()
            told.append(simulation.fstat(fd).st_ctime - begin)
        return told

    assert inside(work) == [0, 1, 2, 3, 4, 5, 6, 6]


def test_the_real_time_of_change_moves_with_the_same_calls(tmp_path: Path) -> None:
    path, other = str(tmp_path / "a"), str(tmp_path / "b")
    fd = os.open(path, RW | CREAT, 0o644)
    for changes in (
        [lambda: os.write(fd, b"x")],
        [lambda: os.fchmod(fd, 0o600)],
        [lambda: os.chmod(path, 0o644)],
        [lambda: os.rename(path, other), lambda: os.rename(other, path)],
        [lambda: os.link(path, other), lambda: os.unlink(other)],
    ):
        before, until = os.fstat(fd).st_ctime_ns, time.monotonic() + 10
        while os.fstat(fd).st_ctime_ns == before:
            # the kernel's clock of files is coarse: the same again until it has moved
            assert time.monotonic() < until
            for change in changes:
                change()
    os.close(fd)


def test_a_full_disk_takes_no_new_block_and_what_is_there_can_be_written_over() -> None:
    simulation = MODULES["os"]

    def work(host: Host) -> list[str]:
        fd = simulation.open("/var/tmp/a", RW | CREAT, 0o644)
        simulation.write(fd, b"x" * 512)
        host.full = True
        told = []
        for call in (
            lambda: simulation.open("/var/tmp/b", RW | CREAT, 0o644),
            lambda: simulation.pwrite(fd, b"y" * 512, 0),
            lambda: simulation.pwrite(fd, b"y" * 5000, 0),
        ):
            try:
                call()
                told.append("done")
            except OSError as error:
                told.append(errno.errorcode[error.errno or 0])
        return told

    assert inside(work) == ["ENOSPC", "done", "ENOSPC"]
