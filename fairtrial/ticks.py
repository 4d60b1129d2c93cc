"""What happens while anything waits: readers are drained, the lease is renewed, the guards are evaluated.

Whatever waits (a command, a request, a pause) yields ticks. A trip raises ``Interrupted`` through it; in a restore it
is only written down.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairtrial import telemetry
from fairtrial.backends import Backend, Channel
from fairtrial.client import Call, Endpoint, Exchange, counters
from fairtrial.control import Control
from fairtrial.decide import State, Status, fold
from fairtrial.errors import EvidenceError, FairtrialError, StepFailed
from fairtrial.evidence import Commands
from fairtrial.experiment import Arm, Experiment
from fairtrial.guards import NS, View, evaluate
from fairtrial.ledger import Ledger
from fairtrial.progress import Progress
from fairtrial.secrets import Screen, Secrets
from fairtrial.store import Store
from fairtrial.window import Bounds, Step, bounds, steps


class Interrupted(Exception):
    """Something stops the window: what kind of thing, and why."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = reason


class HoldLost(Exception):
    """The host says that another actor owns the window there now."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"{host}: {reason}")
        self.host = host
        self.reason = reason


class Ticks:
    """An actor of a window, and what it does while anything waits.

    ``terms`` are its terms by host; on a host that is not there it holds nothing. ``view`` is what the guards look at,
    ``openers`` renew the lease, ``readers`` sample the hosts. A stop that is found while a command is under way is kept
    until its end.
    """

    def __init__(
        self,
        *,
        experiment: Experiment,
        window: str,
        out: Path,
        control: Control,
        backend: Backend,
        store: Store,
        ledger: Ledger,
        progress: Progress,
        secrets: Secrets,
        base: Path,
        max_downtime_min: float | None = None,
        stop_files: Sequence[Path] = (),
    ) -> None:
        self.experiment = experiment
        self.window = window
        self.out = out
        self.base = base
        self.control = control
        self.backend = backend
        self.store = store
        self.ledger = ledger
        self.progress = progress
        self.secrets = secrets
        self.screen = Screen()
        self.commands = Commands(store, secrets=secrets, screen=self.screen)
        self.steps = steps(experiment)
        self.bounds: Bounds = bounds(experiment, self.steps, max_downtime_min)
        self.stop_files = tuple(stop_files)
        self.state = State()
        self.view = View()
        self.step: Step = self.steps[0]
        self.terms: dict[str, int] = {}
        self.actor: dict[str, Any] = {}
        self.openers: dict[str, Channel] = {}
        self.readers: dict[str, Channel] = {}
        self.installed: dict[str, str] = {}
        self.held_ns: int | None = None
        self.signals: list[str] = []
        self.minima: dict[str, dict[str, int]] = {}
        self._interrupt: Interrupted | None = None
        self._noted: set[str] = set()
        self._in_command = False
        self._renew_due_ns = 0
        self._sent_ns: dict[str, list[int]] = {}
        self._stop_file_due_ns = 0
        self._demand: tuple[Any, int] | None = None
        self._demand_due_ns = 0
        self._awake_ns = backend.monotonic_ns()
        self.ours_in_flight = 0

    def record(self, kind: str, *, lenient: bool = False, **fields: Any) -> None:
        """Write a record down, durably, and fold it. ``lenient``: one that cannot be written is said, and folded."""
        self._stay_owner()
        self.ledger.lenient = self.commands.lenient = lenient or self.restoring or kind == "stop"
        record = self.ledger.append(kind, **fields)
        self.state = fold([record], self.state)

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Fold the records of an earlier runner: this actor goes on from there."""
        self.state = fold(records, self.state)

    @property
    def restoring(self) -> bool:
        return self.state.status in (Status.RESTORING, Status.RELEASED)

    def now(self) -> int:
        return self.backend.monotonic_ns()

    def elapsed_s(self) -> float:
        """Seconds on the HOLD clock; 0 before the HOLD."""
        return 0.0 if self.held_ns is None else (self.now() - self.held_ns) / NS

    def tick(self) -> None:
        """Look at everything once. Raises ``Interrupted`` unless a command is under way or a restore runs."""
        self._stay_owner()
        self.view.now_ns = self.now()
        try:
            self._drain()
            self._renew()
            self._look_for_stop_file()
            self._poll_demand()
            causes = self._causes()
        except (FairtrialError, OSError):
            raise
        except Exception as error:
            # Raised here it would leave a command alone that is under way, and changes a host.
            causes = [("internal error", place(error))]
        for kind, reason in causes:
            if self.state.status is Status.RELEASED:
                # the evidence is closed, or about to be
                self.progress.say(f"  ! {kind}: {reason}: the release goes on")
                continue
            if self.restoring:
                # A guard that stays tripped is one note; every signal is its own.
                if kind == "signal" or kind not in self._noted:
                    self._noted.add(kind)
                    self.record("noted", what=kind, reason=reason)
                continue
            if self._interrupt is None:
                self._interrupt = Interrupted(kind, reason)
        if not self._in_command:
            self._raise_interrupt()

    def last_look(self) -> None:
        """Look once more before the evidence is closed: what came too late to matter is written down all the same."""
        self._stop_file_due_ns = 0
        self.tick()

    def _raise_interrupt(self) -> None:
        if self._interrupt is not None and not self.restoring:
            found, self._interrupt = self._interrupt, None
            raise found

    def _causes(self) -> list[tuple[str, str]]:
        causes = [("signal", f"{name} was received") for name in self.signals]
        self.signals.clear()
        causes += [(f"guard {trip.guard}", trip.reason) for trip in evaluate(self.view, self.experiment)]
        if self.store.low:
            # What is left of the reserve is for the records of the restore, the summary and the seal.
            reason = f"the disk of the evidence is full, its reserve was given up: free space below {self.out}"
            causes.append(("disk", reason))
        if self.held_ns is not None and self.elapsed_s() > self.bounds.abort_s:
            causes.append(
                (
                    "bound",
                    f"the HOLD is {self.elapsed_s() / 60:.1f} min old: all is cancelled at "
                    f"{self.bounds.abort_s / 60:.1f} min",
                )
            )
        return causes

    def pause(self, seconds: float) -> None:
        """Wait, with ticks."""
        until = self.now() + int(seconds * NS)
        while (left := until - self.now()) > 0:
            self.backend.sleep(min(self.backend.tick_s, left / NS))
            self.tick()

    def _stay_owner(self) -> None:
        """After a stall (a stopped process, a machine asleep) ask first who owns the HOLD, before anything else."""
        now = self.now()
        stalled_s, self._awake_ns = (now - self._awake_ns) / NS, now
        if stalled_s < max(1.0, self.experiment.waits.lease_s / 2) or not self.terms:
            return
        for host, opener in self.openers.items():
            opener.send("renew")
            self._sent_ns.setdefault(host, []).append(now)
            deadline = now + 3 * NS
            while self._sent_ns[host] and self.now() < deadline and host not in self.view.lost:
                self.backend.sleep(self.backend.tick_s)
                self._drain_opener(host, opener)
            if host in self.view.lost and self._interrupt is None:
                self._interrupt = Interrupted("hold lost", f"{host}: {self.view.lost[host]}")
        self._awake_ns = self.now()

    def _drain(self) -> None:
        for host, reader in self.readers.items():
            for line in reader.lines():
                sample = json_line(line)
                if sample is not None and "memory" in sample:
                    self._sampled(host, sample)
        for host, opener in self.openers.items():
            self._drain_opener(host, opener)

    def _drain_opener(self, host: str, opener: Channel) -> None:
        for line in opener.lines():
            answer = json_line(line) or {}
            if "renewed" in answer and self._sent_ns.get(host):
                sent_ns = self._sent_ns[host].pop(0)
                if answer["renewed"]:
                    self.view.renewed_ns[host] = sent_ns
                else:
                    self.progress.say(f"  ! {host}: {answer.get('message', 'a renewal was not written')}")
            elif answer.get("lost"):
                self.view.lost[host] = str(answer.get("message") or "another actor took the next term")
            elif answer.get("ok") is False:
                self.progress.say(f"  ! {host}: a renewal was not written: {answer.get('message', 'no reason given')}")

    def _sampled(self, host: str, sample: Mapping[str, Any]) -> None:
        self.view.samples[host] = sample
        self.view.sampled_ns[host] = self.now()
        available_b = (sample["memory"] or {}).get("available_b")
        if not isinstance(available_b, int):
            # the guards say so, at this very tick
            return
        try:
            self._keep_sample(host, sample, available_b)
        except StepFailed as error:
            # Raised here it would leave a command or a request alone that is under way.
            self._interrupt = self._interrupt or Interrupted("failed", str(error))

    def _keep_sample(self, host: str, sample: Mapping[str, Any], available_b: int) -> None:
        name = f"telemetry/{host}.csv"
        if not self.store.exists(name):
            self.keep("append", name, telemetry.HEADER)
        self.keep("append", name, telemetry.row(self.backend.utc(), sample, self.view))
        arm = self.step.arm or ("production" if "stopped" not in self.view.phases else None)
        if arm is not None:
            minima = self.minima.setdefault(arm, {})
            if available_b < minima.get(host, available_b + 1):
                minima[host] = available_b
                self.keep("write", "arm-memory.json", json.dumps(self.minima, sort_keys=True, indent=1).encode())

    def keep(self, how: str, name: str, content: bytes) -> None:
        """Write evidence. In a restore what cannot be written is said, and stops nothing."""
        try:
            self.store.append(name, content) if how == "append" else self.store.write(name, content)
        except OSError as error:
            if not self.restoring:
                raise StepFailed(
                    f"evidence: {name} cannot be written: {error.strerror}: free space below {self.out}, "
                    "then run it again"
                ) from None
            print(f"fairtrial: {name} cannot be written: {error.strerror}", file=sys.stderr)

    def _renew(self) -> None:
        now = self.now()
        if not self.terms or now < self._renew_due_ns:
            return
        self._renew_due_ns = now + int(self.experiment.waits.lease_s / 4 * NS)
        for host, opener in self.openers.items():
            self._sent_ns.setdefault(host, []).append(now)
            if not opener.send("renew") and host not in self.view.lost:
                self.view.lost[host] = "the opener on the host is gone"

    def _look_for_stop_file(self) -> None:
        now = self.now()
        if now < self._stop_file_due_ns:
            return
        self._stop_file_due_ns = now + int(0.5 * NS)
        self.view.stop_file = next((str(path) for path in self.stop_files if self.control.exists(path)), None)

    def _poll_demand(self) -> None:
        """Ask production's own counters, once a second, whether it serves anybody but us."""
        if "idle" not in self.view.phases or self.experiment.server.metrics is None:
            self._demand = None
            return
        now = self.now()
        if self._demand is not None:
            request, ours = self._demand
            self._own(request.local_port)
            exchange = request.poll(0)
            if exchange is None:
                return
            self._demand = None
            self.note_demand(exchange, max(ours, self.ours_in_flight))
        elif now >= self._demand_due_ns:
            self._demand_due_ns = now + NS
            call = Call(base=self.endpoint(None), path=self.experiment.server.metrics, method="GET", limit_s=3)
            self._demand = (self.backend.request(call), self.ours_in_flight)

    def note_demand(self, exchange: Exchange, ours: int) -> None:
        """Keep what production's counters said of requests beyond ours."""
        view = self.view
        try:
            found = counters(exchange.body.decode(errors="replace")) if exchange.fault is None else None
        except EvidenceError:
            found = None
        if found is None or found.running is None:
            return
        view.demand = max(0, found.running + (found.waiting or 0) - ours)
        view.demand_ns = self.now()
        view.demand_since_ns = None if not view.demand else view.demand_since_ns or self.now()

    def _own(self, port: int | None) -> None:
        if port is not None:
            self.view.own_ports.add(port)

    def endpoint(self, arm: Arm | None, host: str | None = None) -> Endpoint:
        """Where production (None) or an arm is spoken to; ``host``: that host's rank of it."""
        production = self.experiment.production
        host = host or production.host
        address = production.address if self.experiment.serves(host) else self.experiment.hosts[host].address
        return Endpoint(host=address, port=self.experiment.port(host, arm))

    def arguments(self, host: str, mode: str) -> list[str]:
        """The host program's arguments: mode, state folder, window, and this actor's term."""
        state = self.experiment.hosts[host].state
        words = [mode, "--state", state, "--window", self.window]
        return [*words, "--term", str(self.terms.get(host, 0))] if mode in ("play", "renew") else words

    def keep_lease(self, host: str) -> None:
        """Renew the lease of a term that was taken, by a program of its own on the host."""
        old = self.openers.pop(host, None)
        if old is not None:
            old.close()
        opener = self.backend.channel(host, [*self.backend.program(host), *self.arguments(host, "renew")])
        opener.send(json.dumps({"lease_s": self.experiment.waits.lease_s}))
        self.openers[host] = opener
        self._sent_ns[host] = []
        self._renew_due_ns = 0

    def enter(self, phase: str) -> None:
        """Begin a phase of the window, and have it sampled at once."""
        self.view.enter(phase)
        self.watch()

    def watch(self) -> None:
        """Tell every reader what to watch now."""
        for host, reader in self.readers.items():
            arm = self.view.arm.get(host)
            watch = {
                "ports": self.experiment.ports(host),
                "processes": {str(arm.pid): [arm.pid, arm.start]} if arm else {},
                "cadence_s": self.experiment.guards.cadence_s,
            }
            reader.send(json.dumps({"watch": watch}))

    def _close_channels(self) -> None:
        for channel in [*self.readers.values(), *self.openers.values()]:
            channel.close()
        self.readers.clear()
        self.openers.clear()


def place(error: Exception) -> str:
    """Where an internal error came from: its type and the frames, without its message."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{type(error).__name__} at " + " > ".join(frames[-6:])


def json_line(line: str) -> dict[str, Any] | None:
    """A line as a JSON object, or None for anything else."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
