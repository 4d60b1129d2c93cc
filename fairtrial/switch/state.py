"""The files of the state folder: hold and terms, lease, records, and the two locks."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

Json = dict[str, Any]

BLOCK = 512
YOUNG_S = 10.0
LEASE_S = 120.0
LONGEST_LEASE_S = 3600.0
LEASE_LOCK_S = 3.0
FINISHED = ("served", "down", "released")
STATES = ("held", "restoring", "served", "proved", "down", "released")
TERM_FILE = re.compile(r"term-([1-9][0-9]*)\.json\Z")


class Failed(Exception):
    """A verb did not do what it was asked. The message is for a person; ``fields`` goes into the result line."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields


class Lost(Failed):
    """The actor's own file is not there: another actor has the term. Exit 75."""


class Usage(Exception):
    """The call itself is wrong. Exit 2."""


def canonical(value: object) -> bytes:
    """Return sorted, compact UTF-8 JSON; bytes of an environment that are not UTF-8 survive."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def boottime_ns() -> int:
    """Return nanoseconds since boot, suspend included: the clock of leases."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def hostname() -> str:
    """Return the host's own name."""
    return os.uname().nodename


def utc() -> str:
    """Return the time as ISO 8601, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def write_block(fd: int, value: Json) -> None:
    """Overwrite one block in place: JSON, padding, SHA-256. It needs no free space on a disk that holds it already."""
    body = canonical(value)
    room = BLOCK - 65
    if len(body) > room:
        raise Failed(f"a record of {len(body)} bytes does not fit its block of {room}; use a shorter window id")
    body = body.ljust(room) + b"\n"
    os.pwrite(fd, body + hashlib.sha256(body).hexdigest().encode(), 0)
    os.fsync(fd)


def read_block(path: str) -> Json | None:
    """Return what a block says, or None where it is missing, short or torn."""
    try:
        with open(path, "rb") as file:
            block = file.read(BLOCK + 1)
    except OSError:
        return None
    body = block[: BLOCK - 64]
    if len(block) != BLOCK or hashlib.sha256(body).hexdigest().encode() != block[BLOCK - 64 :]:
        return None
    value = json.loads(body)
    return value if isinstance(value, dict) else None


class Lease(NamedTuple):
    """The lease as it lies on the disk; times are of this host's CLOCK_BOOTTIME."""

    term: int
    window: str
    boot: str
    deadline_ns: int
    lease_s: float
    actor: Json | None

    @property
    def left_s(self) -> float:
        """Seconds until it runs out, negative after; of another boot, or absurdly long: long ago."""
        left = (self.deadline_ns - boottime_ns()) / 1e9
        sane = self.boot == boot_id() and self.lease_s <= LONGEST_LEASE_S and left <= self.lease_s + 1
        return left if sane else -1e9

    @property
    def live(self) -> bool:
        """Whether its actor still has the term."""
        return self.left_s > 0


class State:
    """One state folder, seen by one window."""

    def __init__(self, folder: str, window: str) -> None:
        self.folder = os.path.abspath(folder)
        self.window = window

    def path(self, name: str) -> str:
        """Return the path of a file of the folder."""
        return os.path.join(self.folder, name)

    def distrust(self) -> str | None:
        """Return why the folder must not be used, or None where it is ours alone."""
        found = os.lstat(self.folder)
        if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
            return f"{self.folder} is not a folder of its own (a link, or a file); remove it or name another state"
        if found.st_uid != os.geteuid():
            return (
                f"{self.folder} belongs to uid {found.st_uid}, not to uid {os.geteuid()} who asks; "
                "run as its owner or name another state folder"
            )
        if found.st_mode & 0o022:
            return f"{self.folder} can be written by others; run: chmod go-w {self.folder}"
        return None

    def trust(self, *, create: bool = False) -> None:
        """Refuse a folder that is missing or not ours alone; with ``create``, make it first."""
        if create:
            os.makedirs(os.path.dirname(self.folder), exist_ok=True)
            try:
                os.mkdir(self.folder, 0o755)
                os.chmod(self.folder, 0o755)
            except FileExistsError:
                pass
        try:
            why = self.distrust()
        except FileNotFoundError:
            raise Lost(f"{self.folder} does not exist on {hostname()}: no window holds this host", lost=True) from None
        if why is not None:
            raise Failed(f"state folder refused: {why}", untrusted=True)

    def sync(self) -> None:
        """Make renames and removals of the folder durable."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, name: str) -> Json | None:
        """Return a JSON file of the folder, or None where it is missing or damaged."""
        try:
            with open(self.path(name), "rb") as file:
                value = json.loads(file.read())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def write(self, name: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file aside, fsync, rename, fsync the folder; on a full disk overwrite the one that is there."""
        aside = self.path(f".{name}.{os.getpid()}")
        try:
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
            try:
                os.fchmod(fd, mode)
                view = memoryview(content)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(aside, self.path(name))
            self.sync()
        except OSError as error:
            self.remove(os.path.basename(aside))
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._overwrite(name, content, error)

    def _overwrite(self, name: str, content: bytes, full: OSError) -> None:
        try:
            fd = os.open(self.path(name), os.O_WRONLY | os.O_NOFOLLOW)
        except OSError:
            raise full from None
        try:
            if len(content) > 4096 or os.fstat(fd).st_size == 0:
                raise full
            os.pwrite(fd, content.ljust(os.fstat(fd).st_size), 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is removed."""
        try:
            os.unlink(self.path(name))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise

    def terms(self) -> list[tuple[int, str]]:
        """Return (term, file name) of every hold and term file, lowest first."""
        found = []
        for name in os.listdir(self.folder):
            match = TERM_FILE.match(name)
            if match:
                found.append((int(match[1]), name))
            elif name == "hold.json":
                found.append((0, name))
        return sorted(found)

    def newest(self) -> tuple[int, str] | None:
        """Return the newest term and its file. A listing can miss a file that is renamed meanwhile: three looks."""
        for look in range(3):
            if look:
                time.sleep(0.005)
            found = self.terms()
            if found:
                return found[-1]
        return None

    def owns(self, term: int) -> bool:
        """Whether a term's own file is there, and of this window."""
        record = self.read("hold.json" if term == 0 else f"term-{term}.json")
        return record is not None and record.get("window") == self.window

    def fence(self, term: int) -> None:
        """Raise ``Lost`` unless the term's own file is there."""
        if not self.owns(term):
            name = "hold.json" if term == 0 else f"term-{term}.json"
            raise Lost(
                f"{self.path(name)} of window {self.window} is not there on {hostname()}: another actor has the "
                "term, nothing was changed; look, and wait for that actor or take the next term",
                lost=True,
            )

    def lease(self, tries: int = 3) -> Lease | None:
        """Return the lease, or None: missing, or unreadable in each of ``tries`` looks within a second."""
        for look in range(tries):
            if look:
                time.sleep(0.3)
            value = read_block(self.path("lease"))
            if value is not None:
                return Lease(
                    term=value["term"],
                    window=value["window"],
                    boot=value["boot_id"],
                    deadline_ns=value["deadline_ns"],
                    lease_s=value["lease_s"],
                    actor=value.get("actor"),
                )
            if not os.path.exists(self.path("lease")):
                return None
        return None

    @contextmanager
    def leasing(self, guard: Callable[[], None], blocked: Callable[[], None] | None = None) -> Iterator[int]:
        """Hold the flock on the lease file, and yield its descriptor.

        ``guard`` raises where the lease must not be made again; ``blocked`` is called once when another process has
        kept the flock for 3 s, and the wait starts anew. Raises ``Failed`` when that does not help.
        """
        until = time.monotonic() + LEASE_LOCK_S
        while True:
            guard()
            fd = os.open(self.path("lease"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _same_file(fd, self.path("lease")):
                    break
            except BlockingIOError:
                pass
            os.close(fd)
            if time.monotonic() > until:
                if blocked is None:
                    raise Failed(
                        f"{self.path('lease')} has been locked for {LEASE_LOCK_S:.0f} s by another process "
                        "(stopped?); find it in /proc/locks and end it",
                    )
                blocked()
                blocked, until = None, time.monotonic() + LEASE_LOCK_S
            time.sleep(0.005)
        try:
            try:
                guard()
            except Failed:
                if os.fstat(fd).st_size == 0:
                    # made by this very look, after another gave the host back
                    self.remove("lease")
                raise
            yield fd
        finally:
            os.close(fd)

    def write_lease(self, fd: int, term: int, lease_s: float, actor: Json | None) -> int:
        """Write the lease of a term; call it under ``leasing`` alone. Returns the deadline in ns of CLOCK_BOOTTIME."""
        deadline = boottime_ns() + int(lease_s * 1e9)
        value: Json = {
            "term": term,
            "window": self.window,
            "boot_id": boot_id(),
            "deadline_ns": deadline,
            "lease_s": lease_s,
            "actor": actor,
        }
        write_block(fd, value)
        return deadline

    def renew(self, term: int, lease_s: float, actor: Json | None) -> int:
        """Renew the lease of a term that is still ours. Raises ``Lost`` where it is not."""
        with self.leasing(lambda: self.fence(term)) as fd:
            return self.write_lease(fd, term, lease_s, actor)

    def note(
        self, term: int, actor: Json | None, state: str, seal: str | None = None, detail: str | None = None
    ) -> None:
        """Write last.json; call it under ``leasing`` alone. ``since`` stays while the state does."""
        before = self.read("last.json") or {}
        hold = self.read("hold.json" if term == 0 else f"term-{term}.json") or {}
        stays = before.get("window") == self.window and before.get("state") == state
        record = {
            "schema": "fairtrial.last/1",
            "window": self.window,
            "out": hold.get("out"),
            "term": term,
            "actor": actor,
            "state": state,
            "since": before["since"] if stays and before.get("since") else utc(),
            "seal": seal,
            "detail": detail,
        }
        self.write("last.json", canonical(record) + b"\n")

    def begun(self) -> Json:
        """Return start.json: ``started`` [{what, pid, start, at}], ``ending`` [[pid, start]] and ``ending_of``."""
        record = self.read("start.json") or {}
        return {
            "started": record.get("started") or [],
            "ending": record.get("ending") or [],
            "ending_of": record.get("ending_of"),
        }


def _same_file(fd: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)
