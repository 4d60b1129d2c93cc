"""The control host of a simulated world: evidence in memory, and who acts."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fairtrial.backends.base import Backend
from fairtrial.backends.simulated.backend import PROGRAM
from fairtrial.backends.simulated.kernel import GIB, Host
from fairtrial.errors import Refused, Superseded
from fairtrial.ledger import utc_text
from fairtrial.store import PARTIAL, RESERVE, Store, checked

Kept = bytearray


class Memory:
    """A ``Store`` in memory: what ``write`` and ``append`` took is there, whole, whoever is killed next.

    Its reserve is a name without bytes; ``full`` makes the disk full until that is given up.
    """

    def __init__(self) -> None:
        self.files: dict[str, Kept] = {}
        self.low = False
        self.full = False
        self._anchor: tuple[str, Kept] | None = None

    def view(self) -> Memory:
        """The same files, as another process opens them."""
        other = Memory()
        other.files = self.files
        return other

    def anchor(self, name: str) -> None:
        """From now on change nothing once this file is replaced by another's: ``Superseded`` is raised instead."""
        self._anchor = name, self.files[name]

    def _stay_owner(self) -> None:
        if self._anchor is not None and self.files.get(self._anchor[0]) is not self._anchor[1]:
            raise Superseded(f"{self._anchor[0]} was replaced by another restorer, which owns this window now")

    def _room(self, name: str) -> None:
        self._stay_owner()
        checked(name)
        if name.endswith(PARTIAL):
            raise ValueError(f"{name!r}: {PARTIAL} marks files that are not whole yet; choose another name")
        if self.full:
            if RESERVE not in self.files:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.low = True
            del self.files[RESERVE]
            self.full = False

    def write(self, name: str, content: bytes) -> None:
        self._room(name)
        self.files[name] = bytearray(content)

    def append(self, name: str, content: bytes) -> None:
        self._room(name)
        self.files.setdefault(name, bytearray()).extend(content)

    def read(self, name: str) -> bytes:
        if checked(name) not in self.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return bytes(self.files[name])

    def digest(self, name: str) -> str:
        return hashlib.sha256(self.read(name)).hexdigest()

    def names(self) -> list[str]:
        return sorted(self.files)

    def exists(self, name: str) -> bool:
        return checked(name) in self.files

    def remove(self, name: str) -> None:
        self._stay_owner()
        self.read(name)
        del self.files[name]

    def truncate(self, name: str, size_bytes: int) -> None:
        self._stay_owner()
        self.read(name)
        del self.files[name][size_bytes:]

    def release_reserve(self) -> None:
        self.files.pop(RESERVE, None)

    def close(self) -> None:
        """Nothing is kept open."""


class SimulatedControl:
    """The machine that a simulated window runs on: one of the hosts, as with backend ``local``.

    ``process`` is the runner or restorer that acts; ``stores`` are the evidence folders by path, ``paths`` the other
    files that are there.
    """

    def __init__(
        self,
        machine: Host,
        backend: Backend,
        stores: dict[Path, Memory],
        paths: set[Path],
        watch: Callable[[Memory], Store],
        words: str,
    ) -> None:
        self.machine, self._backend, self.stores, self.paths = machine, backend, stores, paths
        self._watch = watch
        self._words = words
        self._drawn = 0
        self.heard: Callable[[str], None] | None = None
        self.process = machine.spawn(("fairtrial", *words.split()), {}, "/")

    def create(self, out: Path) -> Store:
        if out in self.stores:
            raise Refused(f"{out}: not empty; name a folder that does not exist yet, or an empty one")
        self.stores[out] = Memory()
        self.stores[out].write(RESERVE, b"")
        return self._watch(self.stores[out])

    def open(self, out: Path) -> Store:
        if out not in self.stores:
            raise Refused(f"{out}: no such folder; name the OUT folder of a window")
        return self._watch(self.stores[out].view())

    def forget(self, store: Store, out: Path, *, existed: bool) -> None:
        self.stores.pop(out, None)

    def exists(self, path: Path) -> bool:
        return path in self.paths

    def read(self, path: Path) -> bytes:
        return _content(path)

    def free_b(self, out: Path) -> int:
        return 64 * GIB

    def random(self, count: int) -> bytes:
        self._drawn += 1
        return hashlib.sha256(f"{self._words} {self.process.pid} {self._drawn}".encode()).digest()[:count]

    def actor(self, kind: str) -> dict[str, Any]:
        return {
            "kind": kind,
            "owner": "rehearsal",
            "control_host": self.machine.name,
            "host": self.machine.name,
            "pid": self.process.pid,
            "start": self.process.start,
            "boot_id": self.machine.boot_id,
            "since": utc_text(self.machine.clock.utc_s()),
        }

    def alive(self, owner: Mapping[str, Any]) -> bool:
        found = self.machine.processes.get(int(owner.get("pid", 0)))
        return found is not None and found.start == owner.get("start")

    def backend(self, program: Path) -> Backend:
        return self._backend

    @contextmanager
    def program(self) -> Iterator[Path]:
        yield Path(PROGRAM)

    @contextmanager
    def heeding(self, heard: Callable[[str], None]) -> Iterator[None]:
        self.heard = heard
        yield


@cache
def _content(path: Path) -> bytes:
    return path.read_bytes()
