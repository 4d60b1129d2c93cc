from __future__ import annotations

import copy
from typing import Any

import pytest
import tomllib
from conftest import PACKAGE

from fairtrial.experiment import Experiment, parse
from fairtrial.window import ARM_VERBS, NOT_MEASURED, Step, arm_s, bounds, downtime_s, hold_s, steps

LAST = ("restore.start", "restore.prove")
DEMO = tomllib.loads((PACKAGE / "demo.toml").read_text())


def window(**parts: Any) -> tuple[Step, ...]:
    return steps(parse(copy.deepcopy(DEMO) | parts, file="x.toml"))


def test_the_steps_are_in_the_order_of_a_window(experiment: Experiment) -> None:
    names = [step.name for step in steps(experiment)]
    arms = [
        f"{arm}.{verb}" for arm in ("off", "cause", "fix") for verb in ARM_VERBS if (arm, verb) != ("cause", "checks")
    ]
    assert names == [
        *["preflight", "hold", "snapshot", "switch", "idle", "reference", "stage"],
        *arms,
        "reading",
        *["restore.end", "restore.start", "restore.prove", "restore.close", "look", "switch.off", "seal", "release"],
    ]
    assert len(names) == len(set(names))


def test_only_arms_with_checks_have_that_step() -> None:
    without = copy.deepcopy(DEMO["arms"])
    for arm in without:
        arm.pop("checks", None)
    assert not [step.name for step in window(arms=without) if step.verb == "checks"]


def test_an_undo_names_what_it_undoes_and_what_it_needs(experiment: Experiment) -> None:
    found = {step.name: step for step in steps(experiment)}
    starts = ("off.start", "cause.start", "fix.start")
    assert {name: step.undoes for name, step in found.items() if step.undoes} == {
        "restore.end": starts,
        "restore.start": starts,
        "restore.prove": ("hold",),
        "restore.close": ("hold",),
        "look": ("hold",),
        "switch.off": ("switch",),
        "seal": ("hold",),
        "release": ("hold",),
    }
    order = list(found)
    for step in found.values():
        assert all(order.index(name) < order.index(step.name) for name in (*step.undoes, *step.needs))
    assert "restore.prove" in found["restore.close"].needs
    assert "look" in found["switch.off"].needs
    assert {"look", "switch.off"} <= set(found["seal"].needs)
    assert found["release"].needs == ("seal",)


def test_nothing_that_measures_undoes_anything(experiment: Experiment) -> None:
    for step in steps(experiment):
        if step.undoes:
            assert step.arm is None
            assert step.verb not in ARM_VERBS or step.name == "restore.start"


def test_a_step_has_a_noun_and_a_verb(experiment: Experiment) -> None:
    found = {step.name: (step.noun, step.verb, step.arm) for step in steps(experiment)}
    assert found["off.start"] == ("off", "start", "off")
    assert found["restore.start"] == ("restore", "start", None)
    assert found["hold"] == ("hold", "hold", None)


def test_an_estimate_is_the_steps_own_else_its_verbs_else_a_guess_that_says_so() -> None:
    estimates = {"off.start": {"seconds": 7, "basis": "own"}, "start": {"seconds": 3, "basis": "verb"}}
    found = {step.name: step.estimate for step in window(estimates=estimates)}
    assert (found["off.start"].seconds, found["off.start"].basis) == (7, "own")
    assert (found["fix.start"].seconds, found["fix.start"].basis) == (3, "verb")
    assert found["restore.start"].basis == NOT_MEASURED
    assert found["fix.requests"].basis == NOT_MEASURED


def test_planned_times_add_up() -> None:
    one = {step.name: {"seconds": 1, "basis": "b"} for step in window()}
    found = window(estimates=one)
    names = [step.name for step in found]
    assert hold_s(found) == len(names) - 1
    assert downtime_s(found) == names.index("restore.prove") - names.index("off.start") + 1
    assert arm_s(found, "off") == len(ARM_VERBS)
    assert arm_s(found, "cause") == len(ARM_VERBS) - 1


def test_bounds_come_from_the_plan_unless_the_experiment_sets_them(experiment: Experiment) -> None:
    found = steps(experiment)
    limits = bounds(experiment, found)
    assert limits.abort_s == 2 * hold_s(found) + 120
    assert limits.submit_s == 0.8 * limits.abort_s
    assert limits.arm_s == max(arm_s(found, arm.name) for arm in experiment.arms)
    own = parse(DEMO | {"bounds": {"submit_min": 75, "abort_min": 80, "arm_min": 8}}, file="x")
    limits = bounds(own, steps(own))
    assert (limits.submit_s, limits.abort_s, limits.arm_s) == (75 * 60, 80 * 60, 8 * 60)


@pytest.mark.parametrize("minutes", [0.5, 2, 600])
def test_a_longest_downtime_only_shortens_and_leaves_time_to_restore(experiment: Experiment, minutes: float) -> None:
    found = steps(experiment)
    limits = bounds(experiment, found, minutes)
    assert limits.abort_s <= bounds(experiment, found).abort_s
    assert limits.submit_s <= limits.abort_s
    before = sum(step.estimate.seconds for step in found[1 : [step.name for step in found].index("off.start")])
    restore = sum(
        step.estimate.seconds for step in found if step.name in ("restore.end", "restore.start", "restore.prove")
    )
    assert limits.abort_s + restore - before <= minutes * 60 + 1e-9 or limits == bounds(experiment, found)
