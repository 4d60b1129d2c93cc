"""The rehearsal of the demo's window: every stop point, and that what it enumerates is what a window does."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator

import pytest

from fairtrial import demo
from fairtrial.experiment import Experiment
from fairtrial.rehearsal import Rehearsal, rehearse, replay, text
from fairtrial.rehearsal.effects import FAULTS, stop_points
from fairtrial.rehearsal.forks import forked
from fairtrial.rehearsal.invariants import INVARIANTS, planted, told
from fairtrial.rehearsal.play import Clean, clean
from fairtrial.rehearsal.story import Story
from fairtrial.rehearsal.world import World
from fairtrial.window import steps


@pytest.fixture(scope="module")
def window() -> Experiment:
    return demo.experiment()


@pytest.fixture(scope="module")
def whole(window: Experiment) -> Clean:
    return forked(lambda: clean(window, demo.PACKAGE))


@pytest.fixture(scope="module")
def found(window: Experiment) -> Rehearsal:
    return rehearse(window, demo.PACKAGE)


def test_no_stop_point_breaks_an_invariant(found: Rehearsal) -> None:
    broken = [(run.point, run.exits, run.broken) for run in found.runs if run.broken]
    assert broken == []


def test_every_stop_point_was_run_once(found: Rehearsal, whole: Clean) -> None:
    assert [run.point for run in found.runs] == [str(point) for point in whole.points]
    assert len(set(whole.points)) == len(whole.points)


def test_every_kind_of_effect_and_fault_was_reached(found: Rehearsal, whole: Clean) -> None:
    assert {effect.kind for effect in whole.trace} == set(FAULTS)
    told_faults = {run.fault.partition(", ")[0] for run in found.runs}
    assert told_faults >= {fault for faults in FAULTS.values() for fault in faults}


def test_every_cell_of_the_table_of_statuses_was_reached(found: Rehearsal) -> None:
    # a line torn after the release needs a second fault: a restorer that is killed there (--pairs)
    assert found.unreached == ["released torn"]


def test_the_steps_of_the_trace_are_the_steps_of_the_plan(window: Experiment, whole: Clean) -> None:
    traced = list(dict.fromkeys(effect.step for effect in whole.trace))
    planned = [step.name for step in steps(window)]
    # what comes before the first step is the registration; the seal's record is the last, the release has none
    assert traced[0] == "before"
    assert traced[1:] == [name for name in planned if name not in ("seal", "release")]


def test_every_command_of_the_trace_is_one_that_the_plan_shows(window: Experiment, whole: Clean) -> None:
    shown = {step.name: set(step.commands) for step in steps(window)}
    # the record that would name the step `seal` is the ledger's last, so what follows it counts to the step before
    shown["switch.off"] |= {
        command for step in steps(window) if step.name in ("seal", "release") for command in step.commands
    }
    for effect in whole.trace:
        if effect.kind in ("command", "verb", "channel"):
            mode, *verbs = effect.what.split()
            for command in [f"{mode} {verb}" for verb in verbs] or [mode]:
                assert command in shown[effect.step], effect


def test_a_repeat_stands_for_those_between_the_first_and_the_last(whole: Clean) -> None:
    points, _ = stop_points(whole.trace, {})
    waits = [point.effect for point in points if point.effect.kind == "wait"]
    for step, what in {(one.step, one.what) for one in waits}:
        numbers = {one.nth for one in waits if (one.step, one.what) == (step, what)}
        last = max(one.nth for one in whole.trace if (one.step, one.kind, one.what) == (step, "wait", what))
        assert numbers == {1, last}


def test_the_same_stop_point_does_the_same_again(window: Experiment) -> None:
    at = "off.requests/request POST /v1/completions #2/lost reply"
    stories = [replay(window, demo.PACKAGE, at) for _ in range(2)]
    ledgers = [bytes(story.world.evidence.files["ledger.jsonl"]) for story, _ in stories]
    assert ledgers[0] == ledgers[1]
    assert stories[0][1] == stories[1][1]
    assert stories[0][1].exits == [3]


def test_the_table_names_every_step_and_counts_every_run(found: Rehearsal) -> None:
    shown = text("demo", found)
    for step in {run.step for run in found.runs}:
        assert f"\n{step} " in shown
    assert f"{len(found.runs)} runs, 0 broken invariants" in shown
    json.dumps(found.dump())


def disguised(needle: bytes) -> Iterator[bytes]:
    """The forms in which a text could hide in a file."""
    yield needle
    yield json.dumps(needle.decode()).strip('"').encode()
    yield needle.hex().encode()
    for shift in range(3):
        coded = base64.b64encode(b"x" * shift + needle)
        # what does not depend on the neighbours
        yield coded[4 if shift else 0 : -4]


def opened(content: bytes) -> bytes:
    return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content


@pytest.mark.parametrize(
    "at",
    [
        "off.requests/request POST /v1/completions #2/lost reply",
        "off.requests/request POST /v1/completions #2/kill during, then restore",
        "off.checks/request POST /v1/completions #3/lie",
        "fix.checks/request POST /v1/completions #8/hang",
        "reference/request POST /v1/completions #2/error",
        "restore.prove/request POST /v1/completions #2/lost reply",
    ],
)
def test_no_text_is_kept_in_any_form(window: Experiment, at: str) -> None:
    story, run = replay(window, demo.PACKAGE, at)
    assert run.broken == []
    for place, content in told(story):
        for needle in planted(story):
            for form in disguised(needle):
                assert form not in opened(content), (place, needle)


def test_an_error_inside_a_request_keeps_no_text(window: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of our own, raised with the answer in its message."""
    from fairtrial.client import rows

    def crash(what: str, exchange: object, **counts: object) -> None:
        raise RuntimeError(f"{exchange!r} {getattr(exchange, 'measured', None)!r} {getattr(exchange, 'body', b'')!r}")

    story = Story(World(window, demo.PACKAGE))
    fired: list[object] = []

    def fires(effect: object) -> None:
        if getattr(effect, "step", "") == "off.requests" and not fired:
            fired.append(effect)
            monkeypatch.setattr(rows, "whole", crash)
        if getattr(effect, "step", "") == "restore.end":
            monkeypatch.undo()

    story.play(fires)
    assert story.told.exits == [3]
    assert "internal error" in bytes(story.world.evidence.files["ledger.jsonl"]).decode()
    assert INVARIANTS["no text"](story) is None


def test_the_planted_words_are_really_answered(window: Experiment) -> None:
    """Else the search for them would prove nothing: they lie in production's own log."""
    story = Story(World(window, demo.PACKAGE))
    story.play(lambda effect: None)
    log = bytes(story.world.home.inodes["/var/tmp/production.log"].content)
    assert planted(story)[0] in log
