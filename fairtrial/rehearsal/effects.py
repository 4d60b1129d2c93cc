"""What an actor does to the world, one effect after another, and the faults that fit each: the stop points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fairtrial.backends.simulated import Killed

CHANGING = ("end", "start", "install", "arm", "off", "record")
"""The verbs that can lie: exit 0, and nothing done. A probe that lies would be no probe."""

RESTORES = ("then restore", "then the switch")
"""Who comes after a runner that was killed: a person at once, or nobody until the dead-man's switch has acted."""

FAULTS: Mapping[str, tuple[str, ...]] = {
    "command": ("error", "hang", "lost reply", "kill before", "kill during", "kill after"),
    "verb": ("error", "hang", "lost reply", "lie", "kill before", "kill during", "kill after"),
    "channel": ("error", "hang", "kill before", "kill after"),
    "renewal": ("error", "lost", "kill before"),
    "sample": ("hang", "lie"),
    "answer": ("hang",),
    "read": ("error", "lie", "kill before", "kill after"),
    "put": ("error", "lie", "torn write", "kill before", "kill after"),
    "request": ("error", "hang", "lie", "lost reply", "kill before", "kill during"),
    "knock": ("error", "hang", "kill before"),
    "write": ("error", "full disk", "torn write", "kill before", "kill after"),
    "wait": ("stall", "kill before"),
}
"""Kind of effect -> how it can fail."""

REPEATING = ("wait", "sample", "answer", "renewal")
"""Effects that repeat while something is waited for: first and last of each kind, in each step, stand for all."""

REPEATED_FILES = ("telemetry/", "arm-memory.json")


@dataclass(frozen=True, slots=True)
class Effect:
    """The ``nth`` time that a step does ``what``. ``actor``: 0 the window's runner, 1 who restores after it."""

    step: str
    kind: str
    what: str
    nth: int
    actor: int = 0

    def __str__(self) -> str:
        return f"{'then ' * self.actor}{self.step}/{self.kind} {self.what} #{self.nth}"

    @property
    def repeats(self) -> bool:
        return self.kind in REPEATING or (self.kind == "write" and any(name in self.what for name in REPEATED_FILES))


@dataclass(frozen=True, slots=True)
class StopPoint:
    """One effect and one fault: a place at which a window can be made to stop."""

    effect: Effect
    fault: str

    def __str__(self) -> str:
        return f"{self.effect}/{self.fault}"


def stop_points(trace: Sequence[Effect], happenings: Mapping[str, Sequence[str]]) -> tuple[list[StopPoint], int]:
    """Every stop point of a traced run, in order: each effect with each fault that fits it; and how many share one.

    ``happenings`` are what can befall a step as such (a signal, a trip), by step: at its first effect after its begin.
    A kill after an effect is the very same as one before the next, where that is a stop point too: it is run once.
    """
    ends = {(one.actor, one.step, one.kind, one.what): one.nth for one in trace}
    chosen = [not one.repeats or one.nth in (1, ends[one.actor, one.step, one.kind, one.what]) for one in trace]
    found: list[StopPoint] = []
    befallen: set[tuple[int, str]] = set()
    shared = 0
    then: Sequence[str] = RESTORES[:1]
    for number, effect in enumerate(trace):
        if effect.actor or effect.step == "switch":
            # before it is installed nothing is due from a dead-man's switch
            then = RESTORES
        if not chosen[number]:
            continue
        faults = FAULTS[effect.kind]
        if (effect.actor, effect.step) not in befallen and not effect.what.endswith(" begin"):
            befallen.add((effect.actor, effect.step))
            faults = (*happenings.get(effect.step, ()), *faults)
        for fault in faults:
            if fault == "kill after" and number + 1 < len(trace) and chosen[number + 1]:
                shared += len(then)
            elif fault.startswith("kill") or (fault == "torn write" and effect.kind == "write"):
                found += [StopPoint(effect, f"{fault}, {who}") for who in then]
            else:
                found.append(StopPoint(effect, fault))
    return found, shared


class Effects:
    """The effects of one actor. ``fires`` says for each whether a fault is due, and which."""

    def __init__(self, fires: Callable[[Effect], str | None], befall: Callable[[str], None], actor: int = 0) -> None:
        self.trace: list[Effect] = []
        self.fault_at = 0
        """From which effect on a fault has fired, in this actor or in one before it."""
        self.actor = actor
        self.step = "before"
        self.dead = False
        self.die: Callable[[], None] = lambda: None
        self.last_record: Callable[[], str] = lambda: "command"
        self.unwritten: list[str] = []
        self.unwritable = False
        """A record could not be written: in a restore that is said, and stops nothing."""
        self._fires = fires
        self._befall = befall
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def meet(self, kind: str, what: str) -> str | None:
        """An effect is due: count it, and return the fault that fires, if one does. Raises ``Killed``."""
        if self.dead:
            raise Killed
        self._counts[self.step, kind, what] += 1
        effect = Effect(self.step, kind, what, self._counts[self.step, kind, what], self.actor)
        self.trace.append(effect)
        fault = self._fires(effect)
        if fault is None:
            return None
        self.fault_at = len(self.trace)
        fault = fault.partition(", ")[0]
        if fault == "kill before":
            self.kill()
        if fault not in FAULTS[kind]:
            self._befall(fault)
            return None
        return fault

    def write_ahead(self, what: str) -> None:
        """A host is about to be changed: the last record of the ledger must say so already."""
        if not self.unwritable and self.last_record() not in ("command", "release.begin"):
            self.unwritten.append(f"{self.step}: {what} was sent before it was written down")

    def kill(self) -> None:
        """The actor is killed: nothing of it goes on."""
        self.dead = True
        self.die()
        raise Killed
