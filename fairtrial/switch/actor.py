"""Who acts: one term of one window on this host, the lock it works under, and what it does while it waits."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import procs
from .state import LEASE_S, Failed, Json, State, hostname

LOCK_S = 90.0
TICK_S = 0.02
WHO = ("kind", "pid", "start", "host", "boot_id")
"""What lease and records keep of an actor: a lease is one block, and more may not fit."""


class Actor:
    """The holder of a term. A restorer (term over 0) renews its own lease at every tick that is due."""

    def __init__(
        self,
        state: State,
        term: int,
        lock_limit_s: float = LOCK_S,
        ticked: Callable[[], None] | None = None,
    ) -> None:
        self.state = state
        self.lock_limit_s = lock_limit_s
        self.ticked = ticked
        self.became(term)

    def became(self, term: int) -> None:
        """Act for a term from now on; who it is and how long its lease is are read from the state folder."""
        self.term = term
        lease = self.state.lease(tries=1)
        mine = lease is not None and lease.term == term and lease.window == self.state.window
        last = self.state.read("last.json") or {}
        noted = last.get("term") == term and last.get("window") == self.state.window
        hold = (self.state.read("hold.json") or {}) if term == 0 else {}
        self.lease_s = lease.lease_s if mine and lease else LEASE_S
        self.identity: Json | None = (lease.actor if mine and lease else None) or (
            last.get("actor") if noted else runner(hold)
        )
        self._due = 0.0

    def tick(self) -> None:
        """Do what is due while something is waited for. Raises ``Lost`` where a restorer's term was taken."""
        if self.ticked is not None:
            self.ticked()
        if self.term > 0 and time.monotonic() >= self._due:
            self.state.renew(self.term, self.lease_s, self.identity)
            self._due = time.monotonic() + self.lease_s / 4

    def pause(self, pause_s: float = TICK_S) -> None:
        """Wait a little, with a tick before."""
        self.tick()
        time.sleep(pause_s)

    def fence(self) -> None:
        """Raise ``Lost`` unless the own file is there."""
        self.state.fence(self.term)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, with the own file there. Its descriptor is not inheritable: what is started has no part in it.

        Raises ``Lost`` without the own file. After ``lock_limit_s`` a restorer ends the host programs that keep the
        lock, and those that still play for an earlier term; anyone else gets ``Failed``, which names who has it.
        """
        self.fence()
        fd = os.open(self.state.path("lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            until, ended = time.monotonic() + self.lock_limit_s, False
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    pass
                if time.monotonic() > until:
                    if self.term == 0 or ended:
                        raise Failed(
                            f"{self.state.path('lock')} on {hostname()} was not free within "
                            f"{self.lock_limit_s:.0f} s; held by pid {procs.lockers(self.state.path('lock'))}",
                            locked_by=procs.lockers(self.state.path("lock")),
                        )
                    end_steps(self.state, self.term, "lock")
                    until, ended = time.monotonic() + 5, True
                self.fence()
                self.pause()
            self.fence()
            yield
        finally:
            os.close(fd)


def told(who: Json) -> Json:
    """Return of an actor what lease and records keep."""
    return {name: who.get(name) for name in WHO}


def runner(hold: Json) -> Json | None:
    """Return the actor that a hold names: the runner of term 0."""
    if "pid" not in hold:
        return None
    return {
        "kind": "runner",
        "pid": hold["pid"],
        "start": hold.get("start"),
        "host": hold.get("control_host"),
        "boot_id": hold.get("boot_id"),
    }


def end_steps(state: State, term: int, held: str) -> None:
    """Kill the host programs that hold a file's lock, and the plays of terms before ``term``; never an ancestor."""
    holders = set(procs.lockers(state.path(held)))
    above = procs.ancestors()
    for one in procs.steps(state.folder):
        late = one["mode"] == "play" and one["term"] < term
        if one["pid"] not in above and (one["pid"] in holders or late):
            procs.send(one["pid"], one["start"], signal.SIGKILL)
