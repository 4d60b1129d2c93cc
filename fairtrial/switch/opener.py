"""The opener: it makes a hold, and writes one renewal for each that it is told to write, none by itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from .actor import Actor, runner
from .arming import copy_program
from .state import LONGEST_LEASE_S, Failed, Json, Lost, State, Usage, canonical, hostname

Emit = Callable[[Json], None]
NAMED = (
    "schema",
    "window",
    "purpose",
    "owner",
    "control_host",
    "pid",
    "start",
    "since",
    "boot_id",
    "out",
    "hosts",
)


def hold(state: State, args: Json, emit: Emit, lines: Callable[[], str | None]) -> Json:
    """Take the HOLD of term 0 and renew it, one line of input a renewal, until the input closes.

    ``args``: ``hold`` (the record that all can read) and ``lease_s``. Raises ``Failed`` with ``refused``, the record
    of whoever has the host.
    """
    record, lease_s = args["hold"], float(args["lease_s"])
    missing = [name for name in NAMED if name not in record]
    if missing or record["window"] != state.window or not 0 < lease_s <= LONGEST_LEASE_S:
        raise Usage(
            f"hold: the record needs {', '.join(NAMED)} and the window of the command line; "
            f"lease_s is over 0 and at most {LONGEST_LEASE_S:.0f}"
        )
    state.trust(create=True)
    os.close(os.open(state.path("lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644))
    who = runner(record)
    with state.leasing(lambda: _refuse_held(state)) as fd:
        _link(state, canonical(record) + b"\n")
        try:
            state.write_lease(fd, 0, lease_s, who)
            copy_program(state)
            state.write("start.json", canonical({"schema": "fairtrial.start/1", "started": [], "ending": []}))
            state.note(0, who, "held")
            deadline = state.write_lease(fd, 0, lease_s, who)
        except (OSError, Failed):
            for name in ("lease", "start.json", "host.pyz", "hold.json"):
                state.remove(name)
            raise
    emit({"ok": True, "held": True, "deadline_ns": deadline})
    return renewals(state, 0, lease_s, who, emit, lines)


def renew(state: State, term: int, args: Json, emit: Emit, lines: Callable[[], str | None]) -> Json:
    """Renew the lease of a term that was taken, one line of input a renewal, until the input closes."""
    state.trust()
    actor = Actor(state, term)
    return renewals(state, term, float(args.get("lease_s") or actor.lease_s), actor.identity, emit, lines)


def renewals(
    state: State, term: int, lease_s: float, who: Json | None, emit: Emit, lines: Callable[[], str | None]
) -> Json:
    """Write one renewal a line, and say for each whether it was written."""
    # a Ctrl-C reaches the whole group of the terminal: only the end of the input ends this
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    count = 0
    while (line := lines()) is not None:
        if line != "renew":
            raise Usage("hold: a line after the first is the word renew")
        try:
            emit({"renewed": state.renew(term, lease_s, who)})
            count += 1
        except Lost:
            raise
        except (OSError, Failed) as error:
            emit({"renewed": None, "message": f"the lease on {hostname()} was not written: {error}"})
    return {"ok": True, "renewals": count}


def _refuse_held(state: State) -> None:
    newest = state.newest()
    if newest is not None:
        owner = state.read(newest[1])
        raise Failed(
            f"{state.folder} on {hostname()} is held by window {(owner or {}).get('window')} ({newest[1]}); "
            "wait for it, or run fairtrial restore on its folder",
            refused=owner or {"file": newest[1]},
        )


def _link(state: State, content: bytes) -> None:
    aside = f".hold.json.{os.getpid()}"
    try:
        fd = os.open(state.path(aside), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        try:
            os.fchmod(fd, 0o644)
            if os.write(fd, content) != len(content):
                raise Failed(f"the disk under {state.folder} on {hostname()} is full; make room, then try again")
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            os.link(state.path(aside), state.path("hold.json"))
        except FileExistsError:
            _refuse_held(state)
            raise
        state.sync()
    finally:
        state.remove(aside)
