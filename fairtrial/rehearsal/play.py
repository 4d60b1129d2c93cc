"""Every stop point in turn. One process runs the clean run; where a fault is due, a child is forked off and has it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from fairtrial.canonical import sha256
from fairtrial.decide import TABLE, Status
from fairtrial.errors import Refused
from fairtrial.experiment import Experiment
from fairtrial.rehearsal import invariants
from fairtrial.rehearsal.effects import FAULTS, Effect, StopPoint, stop_points
from fairtrial.rehearsal.forks import Row, Tell, child, forked, read_all, spread, unlimited
from fairtrial.rehearsal.story import Story, ledger, state_of
from fairtrial.rehearsal.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: its fault (or two), the exit statuses in order, and what it broke."""

    point: str
    step: str
    fault: str
    exits: list[Any]
    broken: list[tuple[str, str]]
    reached: list[str]
    """The cells of the table of statuses that its ledger went through."""
    state: str
    """A hash of how hosts and ledger stood when the restore began: runs of one state share their second faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What a rehearsal found."""

    effects: int
    repeats: int
    """Effects that repeat, and were left to the first and the last of their kind."""
    shared: int
    """Stop points that are the very same as one that was run: a kill after one effect, and before the next."""
    runs: Sequence[Run]
    seconds: float
    second: Sequence[Run] = field(default=())
    states: int = 0
    stands_for: int = 0

    @property
    def unreached(self) -> list[str]:
        """The cells of the table of statuses that no run went through: dead, or not rehearsed."""
        reached = {cell for run in self.all_runs for cell in run.reached}
        return sorted({f"{status} {kind}" for status, kind in TABLE} - reached)

    @property
    def all_runs(self) -> Sequence[Run]:
        return [*self.runs, *self.second]

    def dump(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        broken = [
            {"step": run.step, "fault": run.fault, "invariant": name, "why": why, "at": run.point, "seed": 0}
            for run in self.all_runs
            for name, why in run.broken
        ]
        return {
            "runs": len(self.all_runs),
            "effects": self.effects,
            "repeats": self.repeats,
            "shared": self.shared,
            "states": self.states,
            "stands_for": self.stands_for,
            "broken": broken,
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True, slots=True)
class Clean:
    """The clean run: its effects, and what it kept."""

    trace: list[Effect]
    kept: dict[str, str]
    points: list[StopPoint]
    shared: int


def kept(story: Story) -> dict[str, str]:
    """The hash of every file of evidence, and what was said: two runs that did the same kept the same."""
    found = {name: sha256(bytes(content)) for name, content in story.world.evidence.files.items()}
    return found | {
        "the terminal": story.told.output,
        "last.json": str([state_of(story.world, name) for name in story.world.hosts]),
    }


def clean(experiment: Experiment, base: Path) -> Clean:
    """Run the window without a fault. Raises ``Refused`` where that alone breaks an invariant."""
    world = World(experiment, base)
    story = Story(world)
    story.play(lambda effect: None)
    assert story.effects is not None
    found = invariants.broken(story)
    if story.told.exits[0] != 0:
        found.append(("complete", f"it ended with exit {story.told.exits[0]}"))
    if found:
        broken = "; ".join(f"{name!r}: {why}" for name, why in found)
        raise Refused(f"the rehearsal without a fault breaks {broken}\n{story.told.output}")
    trace = story.effects.trace
    points, shared = stop_points(trace, world.happenings(list(dict.fromkeys(effect.step for effect in trace))))
    return Clean(trace, kept(story), points, shared)


def rehearse(
    experiment: Experiment,
    base: Path,
    *,
    pairs: bool = False,
    jobs: int | None = None,
    chosen: Callable[[StopPoint], bool] = lambda point: True,
    told: Callable[[str], None] = lambda text: None,
) -> Rehearsal:
    """Run every stop point of an experiment's window; with ``pairs``, a second fault in each restore too.

    ``chosen``: of all stop points, those to run; ``told`` hears how far it is. Raises ``Refused`` where the clean run
    alone breaks an invariant.
    """
    began = time.monotonic()
    jobs = jobs or len(os.sched_getaffinity(0))
    whole = forked(lambda: clean(experiment, base))
    due = [point for point in whole.points if chosen(point)]
    told(f"{len(whole.trace)} effects of the clean run, {len(due)} stop points, {jobs} at a time")
    found: list[Run] = []
    for row in spread(jobs, lambda number, tell: _singles(experiment, base, whole, due[number::jobs], tell)):
        found.append(Run(**row))
        if len(found) * 10 // len(due) > (len(found) - 1) * 10 // len(due):
            told(f"{len(found)} of {len(due)} stop points")
    second: list[Run] = []
    states: dict[str, list[str]] = {}
    if pairs:
        for run in found:
            if run.state:
                states.setdefault(run.state, []).append(run.point)
        firsts = [min(points) for _, points in sorted(states.items())]
        first = [point for point in due if str(point) in set(firsts)]
        told(f"a second fault in the restores of {len(first)} states: many minutes")
        second = [
            Run(**run)
            for run in spread(jobs, lambda number, tell: _doubles(experiment, base, whole, first[number::jobs], tell))
        ]
    order = {str(point): number for number, point in enumerate(whole.points)}
    return Rehearsal(
        effects=len(whole.trace),
        repeats=len(whole.trace) - len({point.effect for point in whole.points}),
        shared=whole.shared,
        runs=sorted(found, key=lambda run: order[run.point]),
        second=second,
        states=len(states),
        stands_for=sum(len(points) for points in states.values()),
        seconds=time.monotonic() - began,
    )


def _names(point: StopPoint) -> tuple[str, ...]:
    """The short names of a stop point, each of which may be that of others too."""
    step, fault = point.effect.step, point.fault
    return f"{step}/{fault}", f"{step}/{fault.partition(', ')[0]}", str(point.effect)


def replay(
    experiment: Experiment, base: Path, at: str, told: Callable[[str], None] = lambda text: None
) -> tuple[Story, Run]:
    """Run one stop point again: the one of that name, or the first that ``STEP/FAULT`` names. Raises ``Refused``."""
    whole = forked(lambda: clean(experiment, base))
    found = [point for point in whole.points if str(point) == at] or [
        point for point in whole.points if at in _names(point)
    ]
    if not found:
        step = at.partition("/")[0]
        faults = ", ".join(dict.fromkeys(point.fault for point in whole.points if point.effect.step == step))
        steps = ", ".join(dict.fromkeys(point.effect.step for point in whole.points))
        known = f"faults of {step}: {faults}" if faults else f"steps: {steps}"
        raise Refused(f"--at {at}: no stop point of that name; {known}")
    point = found[0]
    if len(found) > 1:
        told(f"{at} names {len(found)} stop points; this is the first: --at '{point}'; the last: --at '{found[-1]}'")
    story = Story(World(experiment, base))
    fired: list[Effect] = []

    def fires(effect: Effect) -> str | None:
        if effect != point.effect or fired:
            return None
        fired.append(effect)
        return story.has(point)

    story.play(fires)
    return story, _judged(story, str(point), point, whole, fired=bool(fired))


def absorbed(point: StopPoint) -> bool:
    """Whether a fault may leave no trace: what is asked again anyway, and what comes when nobody looks any more."""
    effect = point.effect
    unheeded = effect.step in ("restore.close", "look", "switch.off") and point.fault not in FAULTS[effect.kind]
    late = effect.step == "switch.off" and (effect.kind == "renewal" or point.fault in ("full disk", "stall"))
    return effect.kind in ("answer", "knock") or unheeded or late


def _judged(story: Story, name: str, point: StopPoint, whole: Clean, *, fired: bool) -> Run:
    found = invariants.broken(story)
    if not fired:
        found.append(("fired", "the fault did not fire"))
    elif story.told.exits[0] != 2 and not absorbed(point) and kept(story) == whole.kept:
        found.append(("fired", "the fault fired, and ledger and evidence are those of the clean run"))
    return Run(
        point=name,
        step=point.effect.step,
        fault=point.fault,
        exits=story.told.exits,
        broken=found,
        reached=sorted(_reached(story)),
        state=story.state,
    )


def _reached(story: Story) -> set[str]:
    found, status = set(), Status.NEW
    for row in ledger(story.world):
        found.add(f"{status} {row['kind']}")
        status = TABLE.get((status, row["kind"]), status)
    return found


def _row(run: Run) -> Row:
    row = asdict(run)
    row["broken"] = [(name, why[:200]) for name, why in row["broken"]][:6]
    row["exits"] = [code if isinstance(code, int) else str(code)[:100] for code in row["exits"]]
    return row


def _singles(experiment: Experiment, base: Path, whole: Clean, points: Sequence[StopPoint], tell: Tell) -> None:
    """Play the clean run once, and fork at each of these points."""
    due = _by_effect(points)
    story = Story(World(experiment, base))
    mine: list[StopPoint] = []

    def fires(effect: Effect) -> str | None:
        for point in () if mine else due.get(effect, ()):
            ended = child()
            if ended is None:
                mine.append(point)
                return story.has(point)
            if ended:
                tell(_row(_lost(str(point), point, ended)))
        return None

    story.play(fires)
    if mine:
        tell(_row(_judged(story, str(mine[0]), mine[0], whole, fired=True)))


def _doubles(experiment: Experiment, base: Path, whole: Clean, points: Sequence[StopPoint], tell: Tell) -> None:
    """As ``_singles``, and each child forks again at every stop point of the restore that follows its fault."""
    due = _by_effect(points)
    world = World(experiment, base)
    story = Story(world)
    mine: list[StopPoint] = []
    second: list[StopPoint] = []
    later: dict[Effect, list[StopPoint]] = {}
    scout: list[int] = []

    def fires(effect: Effect) -> str | None:
        if second or scout:
            return None
        if mine:
            for point in later.get(effect, ()):
                ended = child()
                if ended is None:
                    second.append(point)
                    return story.has(point)
                if ended:
                    tell(_row(_lost(f"{mine[0]} + {point}", point, ended)))
            return None
        for point in due.get(effect, ()):
            ended = child()
            if ended:
                tell(_row(_lost(str(point), point, ended)))
            if ended is None:
                mine.append(point)
                story.has(point)
                unlimited()
                # one more process goes to the end of this restore, and tells what there is to fork at
                reader, writer = os.pipe()
                pid = os.fork()
                if pid == 0:
                    scout.append(writer)
                    return point.fault
                os.close(writer)
                content = read_all(reader)
                os.waitpid(pid, 0)
                trace = [Effect(*row) for row in json.loads(content or "[]")]
                steps = list(dict.fromkeys(one.step for one in trace))
                happenings = dict.fromkeys(steps, IN_RESTORE)
                later.update(_by_effect(stop_points(trace, happenings)[0]))
                return point.fault
        return None

    story.play(fires)
    if scout:
        rows = [astuple(one) for effects in story.actors for one in effects.trace[effects.fault_at :]]
        os.write(scout[0], json.dumps(rows).encode())
    elif second:
        tell(_row(_judged(story, f"{mine[0]} + {second[0]}", second[0], whole, fired=True)))


IN_RESTORE = ("signal SIGTERM", "two signals", "memory low", "another restorer")


def _by_effect(points: Sequence[StopPoint]) -> dict[Effect, list[StopPoint]]:
    found: dict[Effect, list[StopPoint]] = {}
    for point in points:
        found.setdefault(point.effect, []).append(point)
    return found


def _lost(name: str, point: StopPoint, why: str) -> Run:
    return Run(
        point=name,
        step=point.effect.step,
        fault=point.fault,
        exits=[],
        broken=[("the run itself", why)],
        reached=[],
        state="",
    )
