"""Verbs about who may act: take a term, renew its lease, write its record, give the host back."""

from __future__ import annotations

import os
import time

from . import procs
from .actor import Actor, end_steps, runner, told
from .state import FINISHED, STATES, YOUNG_S, Failed, Json, State, Usage, boot_id, hostname

KINDS = ("runner", "switch", "restore")


class Standing:
    """How the newest term stands: who has it, until when, and why another may take it (``open`` is null: it lives)."""

    def __init__(self, state: State, term: int, name: str, record: Json) -> None:
        lease = state.lease()
        mine = lease if lease and lease.term == term and lease.window == state.window else None
        last = state.read("last.json") or {}
        noted = last if last.get("term") == term and last.get("window") == state.window else None
        self.term = term
        self.actor = (mine.actor if mine else None) or (noted or {}).get("actor")
        if term == 0:
            self.actor = self.actor or runner(record)
        self.recorded = noted["state"] if noted else None
        self.left_s = mine.left_s if mine else None
        age = time.time() - os.stat(state.path(name), follow_symlinks=False).st_ctime
        self.young = abs(age) < YOUNG_S and mine is None and noted is None
        self.open = self._why(mine is not None and mine.live)

    def _why(self, live: bool) -> str | None:
        if known_dead(self.actor):
            return "its actor's process is gone"
        if self.recorded in FINISHED:
            return f"its record says {self.recorded}"
        if self.young or live:
            return None
        return "its lease has run out" if self.left_s is not None else "it has no readable lease"

    def shown(self) -> Json:
        """Return it as results show it."""
        expires = self.left_s if self.left_s is not None else (YOUNG_S if self.young else 0.0)
        return {
            "term": self.term,
            "actor": self.actor,
            "expires_s": round(expires, 3),
            "state": self.recorded,
            "open": self.open,
        }


def known_dead(who: Json | None) -> bool:
    """Whether an actor's process ran on this boot of this host and does not any more."""
    if not who or who.get("boot_id") != boot_id() or who.get("host") != hostname():
        return False
    return not procs.alive(int(who["pid"]), int(who["start"]))


def take(actor: Actor, args: Json) -> Json:
    """Rename the newest file to the next term's, and write that term's lease and record.

    ``args``: ``from`` (the term that is taken; null: the newest), ``actor`` {kind, pid, start, host, boot_id},
    ``now`` (a person insists), ``lease_s``. Raises ``Failed`` with ``live`` where the term still lives, with ``lost``
    where another was faster.
    """
    state, who = actor.state, told(args["actor"])
    if who["kind"] not in KINDS:
        raise Usage(f"take: actor.kind must be one of {', '.join(KINDS)}")

    def held() -> None:
        if state.newest() is None:
            raise Failed(f"no hold in {state.folder} on {hostname()}: there is nothing to take", lost=True)

    def stuck() -> None:
        newest = state.newest()
        lease = state.lease()
        if newest is not None and not (lease and lease.term == newest[0] and lease.live):
            end_steps(state, newest[0], "lease")

    with state.leasing(held, stuck) as fd:
        newest = state.newest()
        term, name = newest or (0, "hold.json")
        hold = state.read(name)
        if hold is None or hold.get("window") != state.window:
            raise Failed(f"{state.path(name)} on {hostname()} is not of window {state.window}", lost=True, owner=hold)
        standing = Standing(state, term, name, hold)
        mine = standing.actor is not None and _same(standing.actor, who)
        if mine and term > 0 and args.get("from") in (None, term - 1):
            # its reply was lost: the same actor asks again for what it has
            actor.became(term)
            return {
                "term": term,
                "already": True,
                "deadline_ns": state.write_lease(fd, term, actor.lease_s, who),
            }
        if args.get("from") is not None and args["from"] != term:
            raise Failed(f"term {args['from']} on {hostname()} was taken already: {name}", lost=True, newest=term)
        why = standing.open or ("it is the actor's own" if mine else None)
        if why is None and args.get("now") and not standing.young:
            why = "a person said now"
        if why is None:
            raise Failed(
                f"term {term} on {hostname()} lives for {standing.shown()['expires_s']:.0f} s more; "
                "wait for it, or take it with --now",
                live=standing.shown() | {"owner": hold},
            )
        lease = state.lease(tries=1)
        lease_s = float(args.get("lease_s") or (lease.lease_s if lease else actor.lease_s))
        try:
            os.rename(state.path(name), state.path(f"term-{term + 1}.json"))
        except FileNotFoundError:
            raise Failed(f"term {term} on {hostname()} was taken by another", lost=True) from None
        result: Json = {"term": term + 1, "from": term, "why": why, "before": standing.shown()}
        problems = []
        for write in (
            state.sync,
            lambda: result.update(deadline_ns=state.write_lease(fd, term + 1, lease_s, who)),
            lambda: state.note(term + 1, who, "restoring"),
        ):
            try:
                write()
            except (OSError, Failed) as error:
                problems.append(str(error))
    actor.became(term + 1)
    actor.identity, actor.lease_s = who, lease_s
    return result | ({"unwritten": problems} if problems else {})


def _same(one: Json, other: Json) -> bool:
    return all(one.get(key) == other.get(key) for key in ("pid", "start", "host", "boot_id"))


def lease(actor: Actor, args: Json) -> Json:
    """Renew the own lease. ``args``: ``lease_s`` (else as long as before)."""
    lease_s = float(args.get("lease_s") or actor.lease_s)
    return {"deadline_ns": actor.state.renew(actor.term, lease_s, actor.identity)}


def record(actor: Actor, args: Json) -> Json:
    """Write last.json. ``args``: ``state``, and where there is one ``seal`` (hex) and ``detail`` (for a person)."""
    if args.get("state") not in STATES:
        raise Usage(f"record: state must be one of {', '.join(STATES)}")
    return note(actor, args["state"], args.get("seal"), args.get("detail"))


def note(actor: Actor, state: str, seal: str | None = None, detail: str | None = None) -> Json:
    """Write last.json while the own file is there; a disk that refuses is reported and stops nothing."""
    with actor.state.leasing(actor.fence):
        try:
            actor.state.note(actor.term, actor.identity, state, seal, detail)
        except OSError as error:
            return {"state": state, "unwritten": [str(error)]}
    return {"state": state}


def off_hold(actor: Actor, args: Json) -> Json:
    """Give the host back: remove what the window left, write ``released``, remove the own file, then the lease.

    ``args``: ``seal``. A kill at any point leaves a state that the next call finishes.
    """
    state = actor.state
    if state.newest() is None:
        last = state.read("last.json") or {}
        if last.get("window") == state.window and last.get("state") == "released":
            return {"already": True}
    with actor.locked():
        alive = [one for one in procs.steps(state.folder) if one["mode"] == "switch"]
        if alive or state.read("switch.json"):
            raise Failed(
                f"the dead-man's switch of {state.folder} on {hostname()} is still there"
                f" ({', '.join(procs.named(one) for one in alive) or 'armed'}); play off what=switch first",
                switch=alive,
            )
        problems = []
        with state.leasing(actor.fence):
            own = "hold.json" if actor.term == 0 else f"term-{actor.term}.json"
            for name in sorted(os.listdir(state.folder)):
                leftover = name.startswith(".") and os.path.isfile(state.path(name))
                if leftover or name in (
                    "restore.json",
                    "start.json",
                    "ask.json",
                    "beat",
                    "host.pyz",
                    "switch.log",
                ):
                    state.remove(name)
            try:
                state.note(actor.term, actor.identity, "released", args.get("seal"))
            except OSError as error:
                problems.append(str(error))
            os.unlink(state.path(own))
            state.sync()
            # last, for it is what is locked: a renewal that waits for it finds that its term is gone, and makes none
            state.remove("lease")
            state.sync()
    return {"released": True} | ({"unwritten": problems} if problems else {})
