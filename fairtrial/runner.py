"""The only loop: fold the ledger, decide, write down, do, write down."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fairtrial.calls import Calls
from fairtrial.decide import Complete, Do, Finish, Outcome, decide
from fairtrial.errors import FairtrialError, Refused, Superseded
from fairtrial.guards import NS, headroom
from fairtrial.identity import Identity
from fairtrial.ticks import HoldLost, Interrupted, place
from fairtrial.window import Step

Act = Callable[["Runner", Step], dict[str, Any] | None]
"""What a step does; what it observed goes to the ledger."""


@dataclass(slots=True, kw_only=True)
class Production:
    """What is known of production's part on one host."""

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


class Runner(Calls):
    """Runs or restores one window: plays its steps by ``acts``, in the order that ``decide`` gives."""

    def __init__(self, *, acts: Mapping[str, Act], **actor: Any) -> None:
        super().__init__(**actor)
        self.acts = acts
        self.production: dict[str, Production] = {}
        self.documents: dict[str, Mapping[str, Any]] = {}
        self.given_back: set[str] = set()
        self.prompts = Prompts()
        self.reference: list[dict[str, Any]] | None = None
        self.refused: Refused | None = None
        self.seal: str | None = None
        self.accepted: dict[str, Any] | None = None

    def run(self) -> int:
        """Run to the end and return the exit status: 0, 2 (as ``Refused``), 3 or 4."""
        with self.control.heeding(self.signals.append):
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
            outcome, stop = Outcome.UNKNOWN, ("internal error", place(error))
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
        try:
            self.progress.end(step, outcome, seconds, headroom(self.view, self.experiment))
        except Exception as error:
            # What cannot be shown to a person stops nothing, a restore least.
            self.progress.say(f"  ! {step.name}: not shown: {place(error)}")
        if stop:
            self._stop(step, *stop)

    def _completed(self) -> None:
        try:
            self.record("complete")
        except OSError as error:
            self._stop(self.step, "failed", self._unwritten(error))

    def _stop(self, step: Step, cause: str, reason: str) -> None:
        if step.name != "preflight" or cause not in ("refused", "failed"):
            # What preflight finds missing is told once, as the refusal.
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

    def load_reference(self) -> None:
        """Take the greedy reference from the evidence of an earlier runner; a torn one counts as none."""
        name = "snapshot/reference.jsonl"
        if self.reference is None and self.store.exists(name):
            self.reference = [json.loads(line) for line in self.store.read(name).splitlines()]
