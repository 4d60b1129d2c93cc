"""The only loop: fold the ledger, decide, write down, do, write down.

One thread runs the window. Whatever waits (a command, a request, a pause) yields ticks, at which the readers'
queues are drained, the lease is renewed and the guards are evaluated. A trip raises ``Interrupted`` through
whatever waits; in a restore it is only written down.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from fairtrial import telemetry
from fairtrial.backends import Backend, Channel, Pending, Reply
from fairtrial.client import Call, Endpoint, Exchange
from fairtrial.decide import Complete, Do, Finish, Outcome, State, Status, decide, fold
from fairtrial.errors import EvidenceError, FairtrialError, Refused, StepFailed, Superseded
from fairtrial.evidence import Commands
from fairtrial.experiment import Arm, Experiment
from fairtrial.guards import NS, View, evaluate, headroom
from fairtrial.identity import Identity
from fairtrial.ledger import Ledger
from fairtrial.progress import Progress
from fairtrial.secrets import Screen, Secrets
from fairtrial.store import Store
from fairtrial.window import Bounds, Step, bounds, steps

TICK_S = 0.05
COMMAND_LIMIT_S = 30.0
SITE_LIMIT_S = 90.0
FENCE_LOST = 75
BODY_LEARNT_B = 65536
"""How much of an error's body the screen of the kept lines learns."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


@dataclass(slots=True, kw_only=True)
class Production:
    """What is known of production on its host."""

    identity: Identity
    pid: int
    start: int
    tree: list[tuple[int, int]]
    log: str
    held_b: int
    boot_id: str
    kernel: str
    sources: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Prompts:
    """Token ids of every prompt, kept in memory only."""

    cells: dict[str, list[int]] = field(default_factory=dict)
    greedy: list[list[int]] = field(default_factory=list)
    probe: list[int] = field(default_factory=list)


class Runner:
    """Runs or restores one window. ``term`` is this actor's term on the hosts; None: it has none yet."""

    def __init__(
        self,
        *,
        experiment: Experiment,
        window: str,
        out: Path,
        backend: Backend,
        store: Store,
        ledger: Ledger,
        progress: Progress,
        secrets: Secrets,
        acts: Mapping[str, Callable[[Runner, Step], dict[str, Any] | None]],
        base: Path,
        max_downtime_min: float | None = None,
        stop_files: Sequence[Path] = (),
    ) -> None:
        self.experiment = experiment
        self.window = window
        self.out = out
        self.base = base
        self.backend = backend
        self.store = store
        self.ledger = ledger
        self.progress = progress
        self.secrets = secrets
        self.screen = Screen()
        self.commands = Commands(store, secrets=secrets, screen=self.screen)
        self.acts = acts
        self.steps = steps(experiment)
        self.bounds: Bounds = bounds(experiment, self.steps, max_downtime_min)
        self.stop_files = tuple(stop_files)
        self.state = State()
        self.view = View()
        self.step: Step = self.steps[0]
        self.term: int | None = None
        self.actor: dict[str, Any] = {}
        self.production: Production | None = None
        self.document: Mapping[str, Any] | None = None
        self.prompts = Prompts()
        self.reference: list[dict[str, Any]] | None = None
        self.openers: dict[str, Channel] = {}
        self.readers: dict[str, Channel] = {}
        self.installed: dict[str, str] = {}
        self.held_ns: int | None = None
        self.signals: list[str] = []
        self.refused: Refused | None = None
        self.minima: dict[str, dict[str, int]] = {}
        self.seal: str | None = None
        self.accepted: dict[str, Any] | None = None
        self._interrupt: Interrupted | None = None
        self._noted: set[str] = set()
        self._in_command = False
        self._renew_due_ns = 0
        self._sent_ns: dict[str, list[int]] = {}
        self._stop_file_due_ns = 0
        self._demand: tuple[Any, int] | None = None
        self._demand_due_ns = 0
        self._awake_ns = backend.monotonic_ns()
        self._commands = 0
        self._requests = 0
        self.ours_in_flight = 0

    # ---- the loop -------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run to the end and return the exit status: 0, 2 (as ``Refused``), 3 or 4."""
        with self.heeding_signals():
            try:
                while True:
                    match decide(self.steps, self.state):
                        case Do(step=step):
                            self._perform(step)
                        case Complete():
                            self._completed()
                        case Finish() as end:
                            return self._finish(end)
            finally:
                self._close_channels()

    @contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Let a signal be one more cause that the next tick finds, instead of the end of this process."""
        previous = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Fold the records of an earlier runner: this actor goes on from there."""
        self.state = fold(records, self.state)

    def load_reference(self) -> None:
        """Take the greedy reference from the evidence of an earlier runner; a torn one counts as none."""
        name = "snapshot/reference.jsonl"
        if self.reference is None and self.store.exists(name):
            self.reference = [json.loads(line) for line in self.store.read(name).splitlines()]

    @property
    def restoring(self) -> bool:
        return self.state.status in (Status.RESTORING, Status.RELEASED)

    def record(self, kind: str, *, lenient: bool = False, **fields: Any) -> None:
        """Write a record down, durably, and fold it. ``lenient``: one that cannot be written is said, and folded."""
        self._stay_owner()
        self.ledger.lenient = self.commands.lenient = lenient or self.restoring or kind == "stop"
        record = self.ledger.append(kind, **fields)
        self.state = fold([record], self.state)

    def _perform(self, step: Step) -> None:
        self.step = step
        if step.name in ("seal", "release"):
            self.acts[step.name](self, step)
            return
        began_ns = self.backend.monotonic_ns()
        try:
            self.record("begin", step=step.name)
        except OSError as error:
            self._stop(step, "failed", self._unwritten(error))
            return
        self.progress.begin(step, self.elapsed_s())
        outcome, stop, observed = Outcome.OK, None, None
        try:
            act = self.acts.get(step.name) or self.acts[step.verb]
            observed = act(self, step)
            self._raise_interrupt()
        except Refused as error:
            # An undo step that refuses has failed: it is owed still, and is not tried for ever.
            self.refused = None if step.undoes else error
            outcome = Outcome.FAILED if step.undoes else Outcome.REFUSED
            stop = ("refused", str(error))
        except Interrupted as error:
            outcome, stop = Outcome.UNKNOWN, (error.kind, error.reason)
        except HoldLost as error:
            self.view.lost[error.host] = error.reason
            outcome, stop = Outcome.UNKNOWN, ("hold lost", str(error))
        except Superseded:
            raise
        except FairtrialError as error:
            outcome, stop = Outcome.FAILED, ("failed", str(error))
        except OSError as error:
            outcome, stop = Outcome.UNKNOWN, ("failed", self._unwritten(error))
        except Exception as error:
            # A fault of ours must restore like any other; its message may hold a body, its place cannot.
            outcome, stop = Outcome.UNKNOWN, ("internal error", _place(error))
        seconds = (self.backend.monotonic_ns() - began_ns) / NS
        ended: dict[str, Any] = {"step": step.name, "outcome": outcome, "seconds": round(seconds, 3)}
        ended |= {"observed": observed or {}}
        if stop:
            ended["reason"] = stop[1]
        try:
            self.record("end", **ended)
        except OSError as error:
            stop = stop or ("failed", self._unwritten(error))
            self.record("end", lenient=True, **{**ended, "reason": stop[1]})
        self.progress.end(step, outcome, seconds, headroom(self.view, self.experiment))
        if stop:
            self._stop(step, *stop)

    def _completed(self) -> None:
        try:
            self.record("complete")
        except OSError as error:
            self._stop(self.step, "failed", self._unwritten(error))

    def _stop(self, step: Step, cause: str, reason: str) -> None:
        self.progress.say(f"  ! {step.name}: {cause}: {reason}")
        self.record("stop", step=step.name, cause=cause, reason=reason)

    def _unwritten(self, error: OSError) -> str:
        shown = error.strerror or type(error).__name__
        return f"the evidence cannot be written: {shown}: free space below {self.out}, then run it again"

    def _finish(self, end: Finish) -> int:
        if not end.touched:
            if self.refused is not None:
                raise self.refused
            stop = self.state.stop
            if stop is not None and stop.step == "preflight" and stop.kind == "failed":
                raise Refused(stop.reason)
            return 3
        if not end.restored:
            self.acts["not restored"](self, self.step)
            return 4
        return 0 if self.state.complete else 3

    # ---- ticks ----------------------------------------------------------------------------------------------

    def now(self) -> int:
        return self.backend.monotonic_ns()

    def elapsed_s(self) -> float:
        """Seconds on the HOLD clock; 0 before the HOLD."""
        return 0.0 if self.held_ns is None else (self.now() - self.held_ns) / NS

    def tick(self) -> None:
        """Look at everything once. Raises ``Interrupted`` unless a command is under way or a restore runs."""
        self._stay_owner()
        self.view.now_ns = self.now()
        self._drain()
        self._renew()
        self._look_for_stop_file()
        self._poll_demand()
        for kind, reason in self._causes():
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

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(signal.Signals(number).name)

    def _stay_owner(self) -> None:
        """After a stall (a stopped process, a machine asleep) ask first who owns the HOLD, before anything else."""
        now = self.now()
        stalled_s, self._awake_ns = (now - self._awake_ns) / NS, now
        if stalled_s < max(1.0, self.experiment.waits.lease_s / 2) or self.term is None:
            return
        for host, opener in self.openers.items():
            opener.send("renew")
            self._sent_ns.setdefault(host, []).append(now)
            deadline = now + 3 * NS
            while self._sent_ns[host] and self.now() < deadline and host not in self.view.lost:
                self.backend.sleep(TICK_S)
                self._drain_opener(host, opener)
            if host in self.view.lost and self._interrupt is None:
                self._interrupt = Interrupted("hold lost", f"{host}: {self.view.lost[host]}")
        self._awake_ns = self.now()

    def _drain(self) -> None:
        for host, reader in self.readers.items():
            for line in reader.lines():
                sample = _json(line)
                if sample is not None and "memory" in sample:
                    self._sampled(host, sample)
        for host, opener in self.openers.items():
            self._drain_opener(host, opener)

    def _drain_opener(self, host: str, opener: Channel) -> None:
        for line in opener.lines():
            answer = _json(line) or {}
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
        available_b = int(sample["memory"]["available_b"])
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
        if self.term is None or now < self._renew_due_ns:
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
        self.view.stop_file = next((str(path) for path in self.stop_files if path.exists()), None)

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
        from fairtrial.client import counters

        view = self.view
        try:
            found = counters(exchange.body.decode(errors="replace")) if exchange.status == 200 else None
        except EvidenceError:
            found = None
        if found is None or found.running is None:
            return
        view.demand = max(0, found.running + (found.waiting or 0) - ours)
        view.demand_ns = self.now()
        view.demand_since_ns = None if not view.demand else view.demand_since_ns or self.now()

    # ---- waiting --------------------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """Wait, with ticks."""
        until = self.now() + int(seconds * NS)
        while (left := until - self.now()) > 0:
            self.backend.sleep(min(TICK_S, left / NS))
            self.tick()

    def call(
        self, host: str, mode: str, payload: Mapping[str, Any], *, limit_s: float = COMMAND_LIMIT_S, quiet: bool = False
    ) -> list[dict[str, Any]]:
        """Call the host program and return its lines. The plan shows this command, or it is not sent.

        Raises ``HoldLost`` when another actor owns the window there, ``StepFailed`` for any other fault or when the
        end was not seen (indeterminate).
        """
        verbs = [verb["verb"] for verb in payload.get("verbs", [])]
        for template in [f"play {verb}" for verb in verbs] if mode == "play" else [mode]:
            self._planned(host, template)
        if quiet:
            reply = self._send(host, mode, payload, limit_s)
        else:
            self._commands += 1
            number = self._commands
            self.record("command", n=number, host=host, mode=mode, verbs=verbs)
            began = self.backend.utc()
            reply = self._send(host, mode, payload, limit_s)
            rows = _rows(reply)
            for row in rows:
                if "environ" in row and "argv" in row:
                    self.secrets.learn(row["environ"], row["argv"])
            argv = [*self.backend.program(host, self.installed.get(host)), *self.arguments(host, mode)]
            self._keep_command(" ".join([mode, *verbs]), argv, host, began, reply)
            self.record("reply", n=number, exit=reply.exit)
        return self._checked(host, " ".join([mode, *verbs]), reply)

    def _keep_command(self, name: str, argv: Sequence[str], host: str, began_utc_s: float, reply: Reply) -> None:
        self.commands.keep(
            name,
            argv=argv,
            host=host,
            start_utc_s=began_utc_s,
            end_utc_s=self.backend.utc(),
            exit_status=reply.exit,
            stdout=reply.stdout.decode(errors="replace"),
            stderr=reply.stderr.decode(errors="replace"),
        )

    def _checked(self, host: str, what: str, reply: Reply) -> list[dict[str, Any]]:
        rows = _rows(reply)
        if reply.exit is None:
            raise StepFailed(f"{host}: {what}: its end was not seen in time: it may have happened")
        message = next((str(row["message"]) for row in reversed(rows) if row.get("message")), "")
        if reply.exit == FENCE_LOST:
            raise HoldLost(host, message or "another actor owns the window there")
        if reply.exit != 0 or not rows or not rows[-1].get("ok"):
            last = reply.stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
            shown = message or self.secrets.clean(last[0]) or f"exit {reply.exit}"
            raise StepFailed(f"{host}: {what}: {shown}")
        return rows

    def _send(self, host: str, mode: str, payload: Mapping[str, Any], limit_s: float) -> Reply:
        """Run the host program to its end; what interrupts is kept until then, and a changing command is let finish."""
        argv = [*self.backend.program(host, self.installed.get(host)), *self.arguments(host, mode)]
        mark = self.window if mode == "play" else None
        outer, self._in_command = self._in_command, True
        try:
            pending = self.backend.command(host, argv, stdin=json.dumps(payload).encode() + b"\n", mark=mark)
            return self._await(pending, limit_s)
        finally:
            self._in_command = outer

    def _await(self, pending: Pending, limit_s: float) -> Reply:
        deadline = self.now() + int(limit_s * NS)
        while True:
            reply = pending.poll(TICK_S)
            if reply is not None:
                return reply
            self.tick()
            if self.now() > deadline:
                return pending.abandon()

    def arguments(self, host: str, mode: str) -> list[str]:
        """The host program's arguments: mode, state folder, window, and this actor's term."""
        state = self.experiment.hosts[host].state
        words = [mode, "--state", state, "--window", self.window]
        return [*words, "--term", str(self.term or 0)] if mode in ("play", "renew") else words

    def play(
        self, host: str, verbs: Sequence[Mapping[str, Any]], *, limit_s: float, quiet: bool = False
    ) -> list[dict[str, Any]]:
        """Play verbs on a host under this actor's term."""
        return self.call(host, "play", {"verbs": list(verbs)}, limit_s=limit_s, quiet=quiet)

    def site(self, host: str, argv: Sequence[str]) -> Reply:
        """Run one of the site's own commands, as the plan shows it; its end is waited for at most 90 s."""
        self._planned(host, "site.close")
        self._commands += 1
        number, began = self._commands, self.backend.utc()
        self.record("command", n=number, host=host, mode="site.close", argv=self.secrets.argv(list(argv)))
        reply = self._await(self.backend.command(host, argv, stdin=b"", mark=None), SITE_LIMIT_S)
        self._keep_command("site.close", argv, host, began, reply)
        self.record("reply", n=number, exit=reply.exit)
        return reply

    def open_channel(self, host: str, mode: str) -> Channel:
        """Start a long-lived program on a host, as the plan shows it."""
        self._planned(host, mode)
        argv = [*self.backend.program(host, self.installed.get(host)), *self.arguments(host, mode)]
        self._commands += 1
        self.record("command", n=self._commands, host=host, mode=mode, verbs=[])
        channel = self.backend.channel(host, argv)
        self.record("reply", n=self._commands, exit=None)
        return channel

    def fetch(self, host: str, path: str) -> bytes | None:
        """Read a file of a host, as the plan shows; None where there is none."""
        self._planned(host, "get")
        return self.backend.get(host, path)

    def put(self, host: str, path: str, content: bytes) -> None:
        """Write a file on a host, as the plan shows."""
        self._planned(host, "put")
        self.record("command", n=0, host=host, mode="put", path=path)
        self.backend.put(host, path, content)
        self.record("reply", n=0, exit=0)

    def _planned(self, host: str, template: str) -> None:
        if template not in self.step.commands:
            raise StepFailed(f"{self.step.name}: the plan shows no {template!r} on {host}: it is not sent")

    # ---- requests -------------------------------------------------------------------------------------------

    def endpoint(self, arm: Arm | None) -> Endpoint:
        production = self.experiment.production
        return Endpoint(host=production.address, port=arm.port if arm else production.port)

    def ask(self, call: Call, *, purpose: str, **fields: Any) -> Exchange:
        """Send one request that is written down before it is sent. The guards may close it at any time."""
        if not self.restoring and self.held_ns is not None and self.elapsed_s() > self.bounds.submit_s:
            minutes = self.bounds.submit_s / 60
            raise Interrupted("bound", f"no request is submitted after {minutes:.1f} min of HOLD")
        self._requests += 1
        number = self._requests
        self.record("request", n=number, purpose=purpose, port=call.base.port, **fields)
        self.ours_in_flight += 1
        try:
            exchange = self.wait(call)
        except Interrupted as stop:
            self.record("response", lenient=True, n=number, fault=f"cancelled: {stop.kind}")
            raise
        finally:
            self.ours_in_flight -= 1
        measured = exchange.measured
        self.record(
            "response",
            n=number,
            status=exchange.status,
            fault=exchange.fault,
            ttft_ns=exchange.ttft_ns if measured else None,
        )
        self._raise_interrupt()
        return exchange

    def wait(self, call: Call) -> Exchange:
        """Send one request and wait for it with ticks. What interrupts closes its socket, then raises."""
        request = self.backend.request(call)
        while True:
            exchange = request.poll(TICK_S)
            self._own(request.local_port)
            if exchange is not None:
                self._learn(exchange)
                return exchange
            try:
                self.tick()
            except Interrupted:
                closing_ns = self.now()
                request.close()
                request.poll(1.0)
                took_ns = self.now() - closing_ns
                self.record("noted", lenient=True, what="closed", reason="trip to closed connection", ns=took_ns)
                raise

    def _learn(self, exchange: Exchange) -> None:
        """Let the screen know what a completion answered, whole or not, so that no kept line holds it."""
        answer = exchange.measured or exchange.answer
        if answer is not None:
            self.screen.learn_text(answer.text)
            self.screen.learn_ids(answer.token_ids or ())
        if exchange.measured is not None:
            self.screen.learn_text(exchange.measured.unread)
        if exchange.fault is not None:
            self.screen.learn_text(exchange.body[:BODY_LEARNT_B].decode(errors="replace"))

    def get(self, base: Endpoint, path: str, *, limit_s: float = 5.0) -> Exchange:
        """GET a path that changes nothing: readiness, version, counters."""
        return self.wait(Call(base=base, path=path, method="GET", limit_s=limit_s))

    def _own(self, port: int | None) -> None:
        if port is not None:
            self.view.own_ports.add(port)

    # ---- channels -------------------------------------------------------------------------------------------

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
        view = self.view
        ports = {self.experiment.production.port, *(arm.port for arm in self.experiment.arms)}
        processes = {str(view.arm.pid): [view.arm.pid, view.arm.start]} if view.arm else {}
        line = json.dumps(
            {"watch": {"ports": sorted(ports), "processes": processes, "cadence_s": self.experiment.guards.cadence_s}}
        )
        for reader in self.readers.values():
            reader.send(line)

    def _close_channels(self) -> None:
        for channel in [*self.readers.values(), *self.openers.values()]:
            channel.close()
        self.readers.clear()
        self.openers.clear()

    def close_channels(self) -> None:
        """End the readers and openers of this runner: nothing is sampled or renewed after this."""
        self._drain()
        self._close_channels()


def _rows(reply: Reply) -> list[dict[str, Any]]:
    return [row for line in reply.stdout.decode(errors="replace").splitlines() if (row := _json(line)) is not None]


def _json(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _place(error: Exception) -> str:
    """Where an internal error came from: its type and the frames, without its message."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{type(error).__name__} at " + " > ".join(frames[-6:])


__all__ = ["EvidenceError", "HoldLost", "Interrupted", "Production", "Prompts", "Runner"]
