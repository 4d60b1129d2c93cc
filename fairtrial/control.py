"""The control host: where the evidence lies, who acts, and what only the machine that runs a window can be asked."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from fairtrial.backends import Backend, Local
from fairtrial.ledger import utc_text
from fairtrial.store import Directory, Store
from fairtrial.switch import bundle

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Control(Protocol):
    """What a runner asks of the machine that it runs on."""

    def create(self, out: Path) -> Store:
        """Make the folder of a new window. Raises ``Refused`` if it is there and not empty."""
        ...

    def open(self, out: Path) -> Store:
        """Take up the folder of an earlier one. Raises ``Refused`` if there is none."""
        ...

    def forget(self, store: Store, out: Path, *, existed: bool) -> None:
        """Nothing was touched and nothing was measured: leave the folder as it was found."""
        ...

    def exists(self, path: Path) -> bool:
        """Whether a file is there."""
        ...

    def read(self, path: Path) -> bytes:
        """The content of a file that the experiment names. Raises ``OSError``."""
        ...

    def free_b(self, out: Path) -> int:
        """Bytes that are free for the evidence."""
        ...

    def random(self, count: int) -> bytes:
        """Bytes that nobody can guess."""
        ...

    def actor(self, kind: str) -> dict[str, Any]:
        """Who acts: this process, as a host on the same machine can tell whether it lives."""
        ...

    def alive(self, owner: Mapping[str, Any]) -> bool:
        """Whether a process that was recorded lives, as far as this machine can say."""
        ...

    def backend(self, program: Path) -> Backend:
        """The hosts, reached with the host program that lies in this file."""
        ...

    def program(self) -> AbstractContextManager[Path]:
        """A file of its own with the host program."""
        ...

    def heeding(self, heard: Callable[[str], None]) -> AbstractContextManager[None]:
        """Tell of every signal, by its name, instead of ending this process."""
        ...


class Here:
    """This machine."""

    def create(self, out: Path) -> Directory:
        return Directory.create(out)

    def open(self, out: Path) -> Directory:
        return Directory.open(out)

    def forget(self, store: Store, out: Path, *, existed: bool) -> None:
        store.close()
        shutil.rmtree(out, ignore_errors=True)
        if existed:
            out.mkdir(mode=0o700, exist_ok=True)

    def exists(self, path: Path) -> bool:
        return path.exists()

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def free_b(self, out: Path) -> int:
        return shutil.disk_usage(out).free

    def random(self, count: int) -> bytes:
        return os.urandom(count)

    def actor(self, kind: str) -> dict[str, Any]:
        stat = Path("/proc/self/stat").read_text()
        host = socket.gethostname()
        return {
            "kind": kind,
            "owner": _user(),
            "control_host": host,
            "host": host,
            "pid": os.getpid(),
            "start": int(stat.rpartition(")")[2].split()[19]),
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "since": utc_text(time.time()),
        }

    def alive(self, owner: Mapping[str, Any]) -> bool:
        mine = self.actor("restore")
        if owner.get("boot_id") != mine["boot_id"] or owner.get("control_host") != mine["control_host"]:
            return False
        try:
            stat = Path(f"/proc/{owner.get('pid')}/stat").read_text()
        except OSError:
            return False
        fields = stat.rpartition(")")[2].split()
        return int(fields[19]) == owner.get("start") and fields[0] not in "ZX"

    def backend(self, program: Path) -> Local:
        return Local(program)

    @contextmanager
    def program(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="fairtrial-") as scratch:
            program = Path(scratch) / "host.pyz"
            program.write_bytes(bundle())
            yield program

    @contextmanager
    def heeding(self, heard: Callable[[str], None]) -> Iterator[None]:
        def signalled(number: int, frame: FrameType | None) -> None:
            heard(signal.Signals(number).name)

        previous = {number: signal.signal(number, signalled) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
