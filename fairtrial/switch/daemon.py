"""The dead-man's switch: it beats, and restores production when the actor's lease has run out."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time

# all that it will ever need is loaded now: its zip may be gone when it acts
from . import arming, asking, play, procs, proving, servers, spawn, terms
from .actor import LOCK_S, Actor
from .state import (
    LEASE_S,
    Failed,
    Json,
    Lost,
    State,
    boot_id,
    boottime_ns,
    canonical,
    hostname,
    utc,
    write_block,
)

LOADED = (arming, asking, proving, servers, spawn)
STEPS = ("restore.end", "restore.start", "restore.prove")
BACK = ("served", "proved", "released")
POLL_S = 0.1


class Switch:
    """One switch of one host: what it will play it holds in memory from its start."""

    def __init__(self, state: State) -> None:
        with open(state.path("restore.json"), "rb") as file:
            self.content = file.read()
        self.state = state
        self.restore: Json = json.loads(self.content)
        self.restore_sha256 = hashlib.sha256(self.content).hexdigest()
        self.beat_s = float(self.restore.get("beat_s", 5))
        self.retry_s = float(self.restore.get("retry_s", 300))
        self.poll_s = min(POLL_S, self.beat_s)
        me = procs.stat(os.getpid())
        self.start = me.start if me else 0
        self.actor: Actor | None = None
        self.again_at = 0.0
        self.down: dict[int, float] = {}
        self.asked_to_end = False
        self.absent = 0
        # what was last seen of the folder's files, in case that somebody removes them
        self.was_armed = False
        self.remake_at = 0.0
        self.term = 0
        self.files: dict[str, Json] = {}
        self._beaten: tuple[bool, object] | None = None
        self._beat_due = 0.0

    @property
    def identity(self) -> Json:
        """Who it is, as an actor."""
        return {
            "kind": "switch",
            "pid": os.getpid(),
            "start": self.start,
            "host": hostname(),
            "boot_id": boot_id(),
        }

    def say(self, event: str, **fields: object) -> None:
        """Write one line of what it does; a disk that is full stops nothing."""
        try:
            line = json.dumps({"at": utc(), "boottime_ns": boottime_ns(), "event": event, **fields})
            os.write(2, line.encode() + b"\n")
        except OSError:
            pass

    def armed(self) -> bool:
        """Whether it has been armed for its window."""
        armed = self.state.read("switch.json") or {}
        return armed.get("armed") is True and armed.get("window") == self.state.window

    def pulse(self) -> None:
        """Beat when due, or when what the beat says has changed; end where that was asked and it is disarmed."""
        disarmed = not os.path.exists(self.state.path("switch.json"))
        if self.asked_to_end and disarmed and self._newest() is not None:
            raise SystemExit(0)
        armed = self.armed()
        nonce = (self.state.read("ask.json") or {}).get("nonce")
        if self._beaten == (armed, nonce) and time.monotonic() < self._beat_due:
            return
        try:
            fd = os.open(self.state.path("beat"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                write_block(fd, self._beat(armed, nonce))
            finally:
                os.close(fd)
        except (OSError, Failed):
            return
        self._beaten, self._beat_due = (armed, nonce), time.monotonic() + self.beat_s

    def _beat(self, armed: bool, nonce: object) -> Json:
        return {
            "pid": os.getpid(),
            "start": self.start,
            "window": self.state.window,
            "at_ns": boottime_ns(),
            "armed": armed,
            "nonce": nonce,
            "restore_sha256": self.restore_sha256,
        }

    def turn(self) -> None:
        """Look once, and act if that is due. Ends the switch when its window's hold was given back."""
        self.pulse()
        newest = self._newest()
        record = self.state.read(newest[1]) if newest else None
        if newest is None or (record is not None and record.get("window") != self.state.window):
            self.absent += 1
            if self.absent >= 3:
                self.gone(newest)
            return
        self.absent = 0
        armed = self.armed()
        self._remember(newest[0], record, armed)
        if armed and self.due(newest[0]):
            self.act()

    def _newest(self) -> tuple[int, str] | None:
        try:
            return self.state.newest()
        except FileNotFoundError:
            return None

    def _remember(self, term: int, record: Json | None, armed: bool) -> None:
        self.was_armed, self.term = self.was_armed or armed, term
        for name, value in (
            ("hold", record),
            ("start", self.state.read("start.json")),
            ("last", self.state.read("last.json")),
        ):
            if value is not None:
                self.files[name] = value

    def gone(self, newest: tuple[int, str] | None) -> None:
        """The window's hold is gone. End, unless it was removed while production may be down: nobody else would act."""
        last = self.state.read("last.json") or self.files.get("last") or {}
        back = last.get("window") == self.state.window and last.get("state") in BACK
        if newest is not None or not self.was_armed or back:
            self.say("hold gone")
            raise SystemExit(0)
        if time.monotonic() < self.remake_at:
            return
        try:
            self.actor = self._remade()
        except (OSError, Failed) as error:
            self.remake_at = time.monotonic() + self.retry_s
            self.say("not remade", message=str(error))
            return
        self.act()

    def _remade(self) -> Actor:
        """Make the state folder anew, with a term of its own, and return the actor of that term."""
        state, term = self.state, self.term + 1

        def vacant() -> None:
            if state.newest() is not None:
                raise Failed(f"another actor has {state.folder} on {hostname()} now", lost=True)

        state.trust(create=True)
        with state.leasing(vacant) as fd:
            self._reopen_log()
            state.write("restore.json", self.content, 0o600)
            state.write("start.json", canonical(self.files.get("start") or {}) + b"\n")
            state.write("switch.json", canonical({"armed": True, "window": state.window}))
            state.write(f"term-{term}.json", canonical(self.files.get("hold") or {"window": state.window}) + b"\n")
            state.write_lease(fd, term, float(self.restore.get("lease_s") or LEASE_S), self.identity)
            state.note(term, self.identity, "restoring", detail="its folder was removed while production was down")
        self.term, self.again_at = term, 0.0
        self.say("remade", term=term)
        return Actor(state, term, float(self.restore.get("lock_limit_s", LOCK_S)), self.pulse)

    def _reopen_log(self) -> None:
        fd = os.open(self.state.path("switch.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        os.dup2(fd, 2)
        os.close(fd)

    def due(self, term: int) -> bool:
        """Whether to restore now: nobody else has a live term, and the record does not say it is back."""
        last = self.state.read("last.json") or {}
        noted = last.get("state") if last.get("term") == term and last.get("window") == self.state.window else None
        if self.actor is not None and self.actor.term == term:
            return noted != "served" and time.monotonic() >= self.again_at
        lease = self.state.lease()
        if lease is not None and lease.term == term and lease.window == self.state.window and lease.live:
            return False
        if noted in ("served", "released"):
            return False
        if noted == "down":
            return time.monotonic() >= self.down.setdefault(term, time.monotonic()) + self.retry_s
        return True

    def act(self) -> None:
        """Take the term if another has it, then restore; what fails is tried again after ``retry_s``."""
        actor = self.actor
        try:
            if actor is None or not self.state.owns(actor.term):
                actor = self._taken()
                if actor is None:
                    return
            self.actor = actor
            actor.state.renew(actor.term, actor.lease_s, actor.identity)
            for step in STEPS:
                for one in self.restore["steps"].get(step, []):
                    self.say("verb", step=step, **play.perform(actor, one))
            self.say("served", **terms.note(actor, "served"))
            self.again_at = float("inf")
        except Lost as error:
            self.actor = None
            self.say("lost", message=str(error))
        except Exception as error:
            # whatever went wrong: production is down and this is what brings it back, so it goes on
            told = str(error) if isinstance(error, Failed) else type(error).__name__
            self.again_at = time.monotonic() + self.retry_s
            self.say("down", message=told)
            if actor is not None and self.state.owns(actor.term):
                terms.note(actor, "down", detail=told)

    def _taken(self) -> Actor | None:
        actor = Actor(self.state, 0, float(self.restore.get("lock_limit_s", LOCK_S)), self.pulse)
        try:
            result = terms.take(actor, {"from": None, "actor": self.identity, "lease_s": self.restore.get("lease_s")})
        except Lost:
            raise
        except Failed as error:
            if not error.fields.get("live"):
                self.say("not taken", message=str(error))
            return None
        self.term = actor.term
        self.say("taken", **result)
        return actor


def serve(state: State) -> int:
    """Run the switch until it is disarmed and asked to end, or the hold was given back."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    state.trust()
    switch = Switch(state)

    def asked(number: int, frame: object) -> None:
        switch.asked_to_end = True

    signal.signal(signal.SIGTERM, asked)
    switch.say("up", pid=os.getpid(), restore_sha256=switch.restore_sha256, python=sys.version.split()[0])
    while True:
        try:
            switch.turn()
        except Exception as error:
            switch.say("error", kind=type(error).__name__)
        _reap()
        time.sleep(switch.poll_s)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
