"""What a window does next: ``fold`` the ledger's records into a state, ``decide`` the next action from it.

Plan, run and restore are this one decision under different backends. Everything is a value; there is no clock, no
disk and no host here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from fairtrial.errors import EvidenceError
from fairtrial.window import Step


class Status(StrEnum):
    """Where a window stands. Members read as results."""

    NEW = "new"
    RUNNING = "running"
    RESTORING = "restoring"
    RELEASED = "released"


class Outcome(StrEnum):
    """How a step ended. ``UNKNOWN``: it may have happened. ``REFUSED``: it is known to have done nothing."""

    OK = "ok"
    REFUSED = "refused"
    FAILED = "failed"
    UNKNOWN = "unknown"


_N, _R, _S, _E = Status.NEW, Status.RUNNING, Status.RESTORING, Status.RELEASED

TABLE: Mapping[tuple[Status, str], Status] = {
    (_N, "window"): _R,
    (_R, "begin"): _R,
    (_R, "end"): _R,
    (_R, "command"): _R,
    (_R, "reply"): _R,
    (_R, "request"): _R,
    (_R, "response"): _R,
    (_R, "cell"): _R,
    (_R, "check"): _R,
    (_R, "noted"): _R,
    (_R, "torn"): _R,
    (_R, "stop"): _S,
    (_R, "complete"): _S,
    (_R, "restorer"): _S,
    (_S, "begin"): _S,
    (_S, "end"): _S,
    (_S, "command"): _S,
    (_S, "reply"): _S,
    (_S, "request"): _S,
    (_S, "response"): _S,
    (_S, "noted"): _S,
    (_S, "torn"): _S,
    (_S, "stop"): _S,
    (_S, "restorer"): _S,
    (_S, "release.begin"): _E,
    (_E, "restorer"): _S,
    (_E, "torn"): _E,
}
"""Status x record kind -> status. A pair that is not here is an error: a restore that measures (``cell`` or
``check`` while restoring), or anything after the release, cannot be folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why a window stopped: in which step, what kind of cause, and the reason for a person."""

    step: str
    kind: str
    reason: str

    def dump(self) -> dict[str, str]:
        return {"step": self.step, "kind": self.kind, "reason": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the ledger says, folded. ``ended`` holds the outcomes of this actor; ``begun`` those of every actor."""

    status: Status = Status.NEW
    begun: frozenset[str] = frozenset()
    ended: Mapping[str, Outcome] = field(default_factory=dict)
    stop: Stop | None = None
    complete: bool = False
    restorers: int = 0
    step: str = ""
    records: int = 0


def fold(records: Iterable[Mapping[str, Any]], state: State | None = None) -> State:
    """Fold records into a state. Raises ``EvidenceError`` for a record that cannot follow."""
    state = state or State()
    for record in records:
        try:
            state = _step(state, record)
        except (KeyError, ValueError) as error:
            where = f"ledger.jsonl: record {record.get('seq', state.records)}"
            raise EvidenceError(f"{where}: {record.get('kind')!r} lacks or does not know {error}") from None
    return state


def _step(state: State, record: Mapping[str, Any]) -> State:
    kind = record["kind"]
    status = TABLE.get((state.status, kind))
    if status is None:
        raise EvidenceError(
            f"ledger.jsonl: record {record.get('seq', state.records)}: {kind!r} cannot follow while {state.status}"
        )
    state = replace(state, status=status, records=state.records + 1)
    match kind:
        case "begin":
            return replace(state, begun=state.begun | {record["step"]}, step=record["step"])
        case "end" if record["outcome"] == Outcome.REFUSED:
            return replace(state, begun=state.begun - {record["step"]})
        case "end":
            return replace(state, ended={**state.ended, record["step"]: Outcome(record["outcome"])})
        case "stop" if state.stop is None and not state.complete:
            first = Stop(step=record["step"], kind=record["cause"], reason=record["reason"])
            return replace(state, stop=first)
        case "complete":
            return replace(state, complete=True)
        case "restorer":
            # Whoever takes over trusts no end of another's undo step: every owed undo is played again.
            stop = state.stop
            if stop is None and not state.complete:
                stop = Stop(step=state.step, kind="runner lost", reason=record["reason"])
            return replace(state, stop=stop, restorers=state.restorers + 1, ended={})
        case _:
            return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Do:
    """Begin this step."""

    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Every step up to the restore has ended well: write so down, then restore."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Nothing is left to do. ``restored``: proved; ``touched``: the HOLD had begun."""

    restored: bool
    touched: bool


Action = Do | Complete | Finish


def owed(step: Step, state: State) -> bool:
    """Whether an undo step is owed: something it undoes began, however that ended."""
    return any(name in state.begun for name in step.undoes)


def decide(window: Sequence[Step], state: State) -> Action:
    """Return the next action. All branching of a run is here.

    Forward steps run in order while nothing stopped the window. Then the owed undo steps run, each once for this
    actor, each only after those it needs have ended well; one that cannot run ends the restore as not proved. The
    steps ``seal`` and ``release`` have one record between them, ``release.begin``: it is the ledger's last.
    """
    if state.status in (Status.NEW, Status.RUNNING):
        for step in window:
            if not step.undoes and step.name not in state.begun:
                return Do(step=step)
        return Complete()
    if state.status is Status.RELEASED:
        return Finish(restored=True, touched=True)
    for step in window:
        if not step.undoes or step.name in state.ended or not owed(step, state):
            continue
        needed = [other for other in window if other.name in step.needs and owed(other, state)]
        if any(state.ended.get(other.name) is not Outcome.OK for other in needed):
            return Finish(restored=False, touched=True)
        return Do(step=step)
    undone = [step for step in window if owed(step, state)]
    restored = all(state.ended.get(step.name) is Outcome.OK for step in undone)
    return Finish(restored=restored, touched="hold" in state.begun)
