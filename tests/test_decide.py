"""The decision, driven: outcomes, stops and takeovers at every place, and what must hold whatever happens.

``drive`` plays the world against ``decide``; ``broken`` is every invariant over such a run. The last tests hand
mutations to ``drive`` and see that ``broken`` names each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import tomllib
from conftest import PACKAGE
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import decide as decision
from fairtrial.decide import TABLE, Action, Complete, Do, Finish, Outcome, State, Status, decide, fold, owed
from fairtrial.errors import EvidenceError
from fairtrial.experiment import parse
from fairtrial.plan import order
from fairtrial.window import Step, steps

EXPERIMENT = parse(tomllib.loads((PACKAGE / "demo.toml").read_text()), file="demo.toml")
WINDOW = steps(EXPERIMENT)
FORWARD = [step.name for step in WINDOW if not step.undoes]
MEASURES = ("cell", "check")
OK, FAILED, UNKNOWN, REFUSED = Outcome.OK, Outcome.FAILED, Outcome.UNKNOWN, Outcome.REFUSED

Record = dict[str, Any]
Decide = Callable[[Sequence[Step], State], Action]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What happens to a run: how its numbered steps end, and where a runner is lost.

    ``outcomes``: the outcome of the n-th step that any actor does; those not named end well. ``lost``: numbers of
    steps in which the actor dies, after ``begin`` and before ``end``, and a restorer takes over.
    """

    outcomes: Mapping[int, Outcome] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()


@dataclass(slots=True, kw_only=True)
class Run:
    """A run as it went: its records, and the end."""

    records: list[Record] = field(default_factory=list)
    end: Finish | None = None
    fault: str = ""


def drive(world: World, choose: Decide = decide, window: Sequence[Step] = WINDOW, limit: int = 400) -> Run:
    """Run a window in a world, as the runner does: fold, decide, write down, do, write down."""
    run = Run()
    state = State()
    done = 0

    def write(kind: str, **fields: Any) -> None:
        nonlocal state
        run.records.append({"kind": kind, **fields})
        state = fold([run.records[-1]], state)

    write("window")
    try:
        while len(run.records) < limit:
            match choose(window, state):
                case Finish() as end:
                    run.end = end
                    return run
                case Complete():
                    write("complete")
                case Do(step=step) if step.name == "seal":
                    # The ledger's last record: seal and release come after it.
                    write("release.begin")
                case Do(step=step):
                    done += 1
                    write("begin", step=step.name)
                    if step.verb == "requests":
                        write("cell")
                    if step.verb == "checks":
                        write("check")
                    if done in world.lost:
                        write("restorer", reason="the runner ended")
                        continue
                    outcome = world.outcomes.get(done, OK)
                    write("end", step=step.name, outcome=outcome)
                    if outcome is not OK:
                        write("stop", step=step.name, cause=str(outcome), reason="it did not end well")
        run.fault = "it never ends"
    except EvidenceError as error:
        run.fault = str(error)
    return run


def broken(run: Run, window: Sequence[Step] = WINDOW) -> list[str]:
    """Every invariant that a run breaks."""
    found: set[str] = {f"the ledger: {run.fault}"} if run.fault else set()
    undoes = {step.name: set(step.undoes) for step in window if step.undoes}
    needs = {step.name: set(step.needs) for step in window}
    place = {step.name: index for index, step in enumerate(window)}
    begun: set[str] = set()
    refused: set[str] = set()
    played: dict[str, str | None] = {}
    stopped = released = False
    last: Mapping[str, str | None] = {}
    for record in run.records:
        kind, name = record["kind"], record.get("step")
        if released and kind != "restorer":
            found.add("something follows the release")
        if stopped and kind in MEASURES:
            found.add("a restore measures")
        if kind == "begin" and name in undoes:
            touched = {one for one in undoes[name] if one in begun}
            if not stopped:
                found.add("an undo before the stop")
            if not touched:
                found.add(f"{name} undoes what never began")
            if name in played:
                found.add(f"{name} is played twice by one actor")
            if any(place[other] > place[name] for other in played):
                found.add("undo steps out of order")
            for other in needs[name]:
                if undoes[other] & begun and played.get(other) != OK:
                    found.add(f"{name} without {other}")
            played[name] = None
        elif kind == "begin":
            if stopped:
                found.add("a forward step after the stop")
            if any(place[other] > place[name] for other in begun):
                found.add("forward steps out of order")
        match kind:
            case "begin" if name not in undoes:
                begun.add(name)
            case "end" if name in undoes:
                played[name] = record["outcome"]
            case "end" if record["outcome"] is REFUSED:
                refused.add(name)
                begun.discard(name)
            case "restorer":
                stopped, played, released = True, {}, False
            case "stop" | "complete":
                stopped = True
            case "release.begin":
                released, last = True, dict(played)
        if kind == "complete" and {one for one in FORWARD if one not in begun}:
            found.add("complete without every step")
    if run.end is None:
        return sorted(found)
    due = {name for name, undone in undoes.items() if undone & begun} - {"seal", "release"}
    if released and (unproved := {name for name in due if last.get(name) != OK}):
        found.add(f"sealed without {', '.join(sorted(unproved))}")
    if run.end.restored and not released and due:
        found.add("said restored without a seal")
    if not run.end.restored and all(outcome == OK for outcome in played.values()):
        found.add("said not restored, and no undo failed")
    if run.end.touched != ("hold" in begun):
        found.add("whether it was touched")
    return sorted(found)


def refusing(outcomes: Mapping[int, Outcome]) -> dict[int, Outcome]:
    """Only preflight (1) and hold (2) can refuse: nothing was touched then."""
    return {number: FAILED if one is REFUSED and number > 2 else one for number, one in outcomes.items()}


LENGTH = 2 * len(WINDOW)
WORLDS = st.builds(
    World,
    outcomes=st.dictionaries(st.integers(1, LENGTH), st.sampled_from([FAILED, UNKNOWN, REFUSED]), max_size=4).map(
        refusing
    ),
    lost=st.frozensets(st.integers(1, LENGTH), max_size=4),
)


def steps_of(run: Run) -> list[str]:
    return [record["step"] for record in run.records if record["kind"] == "begin"]


def test_a_run_in_which_all_goes_well_is_the_plan() -> None:
    run = drive(World())
    assert broken(run) == []
    assert run.end == Finish(restored=True, touched=True)
    assert [*steps_of(run), "seal", "release"] == [step.name for step in order(EXPERIMENT)]
    assert [step.name for step in order(EXPERIMENT)] == [step.name for step in WINDOW]
    assert run.records[-1]["kind"] == "release.begin"


@given(WORLDS)
def test_whatever_happens_every_invariant_holds(world: World) -> None:
    run = drive(world)
    assert broken(run) == []
    assert run.end is not None


@pytest.mark.parametrize("outcome", [FAILED, UNKNOWN])
def test_a_stop_in_every_step_restores_just_what_began(outcome: Outcome) -> None:
    for number in range(1, len(FORWARD) + 1):
        run = drive(World(outcomes={number: outcome}))
        assert broken(run) == []
        begun = FORWARD[:number]
        assert steps_of(run)[:number] == begun
        restore = [step.name for step in WINDOW if set(step.undoes) & set(begun)][:-2]
        assert steps_of(run)[number:] == restore
        assert ("restore.start" in restore) == ("off.start" in begun)
        assert ("switch.off" in restore) == ("switch" in begun)
        assert run.end == Finish(restored=True, touched="hold" in begun)
        assert not any(record["kind"] == "complete" for record in run.records)


def test_a_runner_that_is_lost_in_every_step_is_restored_by_the_next() -> None:
    whole = steps_of(drive(World()))
    for number, name in enumerate(whole, start=1):
        run = drive(World(lost=frozenset({number})))
        assert broken(run) == []
        again = steps_of(run)[number:]
        if name in FORWARD:
            begun = FORWARD[:number]
            assert again == [step.name for step in WINDOW if set(step.undoes) & set(begun)][:-2]
        else:
            # Whoever takes over trusts no end of another's: from the first undo step again.
            assert again == [step for step in whole if step not in FORWARD]
        assert run.end == Finish(restored=True, touched="hold" in steps_of(run))


def test_an_undo_that_does_not_end_well_ends_the_restore_as_not_proved() -> None:
    whole = steps_of(drive(World()))
    for number, name in enumerate(whole, start=1):
        if name in FORWARD:
            continue
        run = drive(World(outcomes={number: FAILED}))
        assert broken(run) == []
        assert run.end == Finish(restored=False, touched=True)
        assert steps_of(run)[-1] == name
        assert run.records[-1]["kind"] == "stop"


def test_the_first_stop_is_the_cause_and_a_failed_restore_does_not_replace_it() -> None:
    number = FORWARD.index("off.requests") + 1
    run = drive(World(outcomes={number: UNKNOWN, number + 1: FAILED}))
    stop = fold(run.records).stop
    assert stop is not None
    assert stop.dump() == {"step": "off.requests", "kind": "unknown", "reason": "it did not end well"}
    lost = fold(drive(World(lost=frozenset({number}))).records).stop
    assert lost is not None
    assert (lost.step, lost.kind) == ("off.requests", "runner lost")


def test_what_completed_stays_complete_when_its_restore_is_interrupted() -> None:
    whole = steps_of(drive(World()))
    state = fold(drive(World(lost=frozenset({whole.index("look") + 1}))).records)
    assert state.complete
    assert state.stop is None
    assert state.restorers == 1
    assert state.status is Status.RELEASED


def test_a_refused_hold_leaves_nothing_owed() -> None:
    for number in (1, 2):
        run = drive(World(outcomes={number: REFUSED}))
        assert broken(run) == []
        assert run.end == Finish(restored=True, touched=False)
        assert steps_of(run) == FORWARD[:number]


@given(WORLDS, st.integers(0, 400))
def test_an_undo_is_owed_from_the_moment_its_step_begins(world: World, cut: int) -> None:
    """At every prefix of every ledger: what began and was not refused makes its undo steps owed."""
    records = drive(world).records[:cut]
    state = fold(records)
    begun = {record["step"] for record in records if record["kind"] == "begin"}
    begun -= {record["step"] for record in records if record["kind"] == "end" and record["outcome"] is REFUSED}
    for step in WINDOW:
        assert owed(step, state) == bool(set(step.undoes) & begun)


@given(WORLDS, st.integers(1, 400))
def test_a_ledger_cut_anywhere_is_restored_by_a_restorer(world: World, cut: int) -> None:
    run = drive(world)
    records = run.records[:cut]
    state = fold([*records, {"kind": "restorer", "reason": "the runner ended"}])
    assert state.status is Status.RESTORING
    assert not state.ended
    asked = decide(WINDOW, state)
    if isinstance(asked, Do):
        due = [step for step in WINDOW if owed(step, state)]
        assert asked.step == due[0]
    else:
        assert asked == Finish(restored=True, touched=False)


KINDS = sorted({kind for _, kind in TABLE} | {"unheard of"})


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("kind", KINDS)
def test_the_table_is_total_what_is_not_in_it_is_an_error(status: Status, kind: str) -> None:
    record = {"kind": kind, "seq": 7, "step": "hold", "outcome": "ok", "cause": "c", "reason": "r"}
    state = replace(State(), status=status)
    if (status, kind) in TABLE:
        assert fold([record], state).status is TABLE[status, kind]
        assert fold([record], state).records == 1
    else:
        with pytest.raises(EvidenceError, match=rf"record 7: '{kind}' cannot follow while {status}"):
            fold([record], state)


def test_no_measurement_can_be_folded_into_a_restore() -> None:
    for kind in MEASURES:
        assert {status for status, known in TABLE if known == kind} == {Status.RUNNING}
    assert {kind for status, kind in TABLE if status is Status.RELEASED} == {"restorer", "torn"}
    assert {kind for status, kind in TABLE if status is Status.NEW} == {"window"}


@given(WORLDS)
def test_every_record_that_a_run_writes_is_in_the_table(world: World) -> None:
    state = State()
    for record in drive(world).records:
        assert (state.status, record["kind"]) in TABLE
        state = fold([record], state)


@pytest.mark.parametrize("record", [{"kind": "begin"}, {"kind": "end", "step": "hold", "outcome": "maybe"}])
def test_a_record_that_lacks_a_field_is_damaged_evidence(record: Record) -> None:
    with pytest.raises(EvidenceError, match=r"ledger\.jsonl: record"):
        fold([{"kind": "window"}, record])


# ---- mutations: each of these, were it the code, would put production at risk ----------------------------------


def every_single_fault() -> list[World]:
    count = len(steps_of(drive(World()))) + 1
    worlds = [World(outcomes={number: outcome}) for number in range(1, count) for outcome in (FAILED, UNKNOWN)]
    return [World(), *worlds, *(World(lost=frozenset({number})) for number in range(1, count))]


def caught(choose: Decide, window: Sequence[Step] = WINDOW) -> set[str]:
    """Which invariants a mutation breaks, over every single fault; they are those of the real window."""
    return {one for world in every_single_fault() for one in broken(drive(world, choose, window))}


def test_the_code_as_it_is_breaks_nothing() -> None:
    assert caught(decide) == set()


def test_owing_an_undo_only_when_its_step_has_ended_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_end(step: Step, state: State) -> bool:
        return any(name in state.ended for name in step.undoes)

    monkeypatch.setattr(decision, "owed", at_end)
    assert any("said restored without a seal" in one or "sealed without" in one for one in caught(decide))


def test_a_restore_that_goes_on_with_the_experiment_is_caught() -> None:
    def resumes(window: Sequence[Step], state: State) -> Action:
        if state.status is Status.RESTORING and not state.complete:
            for step in window:
                if not step.undoes and step.name not in state.begun:
                    return Do(step=step)
        return decide(window, state)

    assert "a forward step after the stop" in caught(resumes)


def test_a_restore_that_measures_cannot_even_be_folded() -> None:
    def measures(window: Sequence[Step], state: State) -> Action:
        again = next(step for step in window if step.verb == "requests")
        if state.status is Status.RESTORING and state.step != again.name and "look" not in state.ended:
            return Do(step=again)
        return decide(window, state)

    assert any("'cell' cannot follow while restoring" in one for one in caught(measures))


UNDO = [step.name for step in WINDOW if step.undoes and step.name not in ("seal", "release")]


@pytest.mark.parametrize("dropped", UNDO)
def test_one_undo_dropped_is_caught(dropped: str) -> None:
    def forgets(window: Sequence[Step], state: State) -> Action:
        return decide([step for step in window if step.name != dropped], state)

    assert caught(forgets)


@pytest.mark.parametrize(("first", "second"), list(pairwise(UNDO)))
def test_two_undo_steps_swapped_are_caught(first: str, second: str) -> None:
    def swapped(window: Sequence[Step], state: State) -> Action:
        changed = list(window)
        left = next(index for index, step in enumerate(changed) if step.name == first)
        right = next(index for index, step in enumerate(changed) if step.name == second)
        changed[left], changed[right] = changed[right], changed[left]
        return decide(changed, state)

    assert "said not restored, and no undo failed" in caught(swapped)

    def hasty(window: Sequence[Step], state: State) -> Action:
        return swapped([replace(step, needs=()) for step in window], state)

    assert "undo steps out of order" in caught(hasty)


def test_an_undo_that_does_not_wait_for_what_it_needs_is_caught() -> None:
    def hasty(window: Sequence[Step], state: State) -> Action:
        return decide([replace(step, needs=()) for step in window], state)

    assert any(" without " in one for one in caught(hasty))


def test_trusting_the_ends_of_the_actor_before_is_caught() -> None:
    """A restorer that takes another's ``ok`` for its own: production may have been stopped again since."""
    before: dict[str, Outcome] = {}

    def trusts(window: Sequence[Step], state: State) -> Action:
        before.update(state.ended)
        return decide(window, replace(state, ended={**before, **state.ended}) if state.restorers else state)

    def fresh(window: Sequence[Step], state: State) -> Action:
        if state.records == 1:
            before.clear()
        return trusts(window, state)

    assert any("sealed without" in one for one in caught(fresh))
