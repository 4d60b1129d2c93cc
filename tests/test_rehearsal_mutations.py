"""Faults of our own that a rehearsal must catch, each by the invariant that is there for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from fairtrial import calls, conduct, decide, demo, forward, ticks, undo
from fairtrial.backends.simulated.program import modules
from fairtrial.decide import Status
from fairtrial.errors import Refused
from fairtrial.rehearsal import rehearse
from fairtrial.rehearsal.effects import StopPoint
from fairtrial.window import Step, steps

Patch = pytest.MonkeyPatch


def at(step: str, *faults: str) -> Callable[[StopPoint], bool]:
    """The stop points of one step with these faults, by the beginnings of their names."""
    return lambda point: point.effect.step == step and point.fault.startswith(faults)


def caught(chosen: Callable[[StopPoint], bool]) -> set[str]:
    """The invariants that break: in the clean run, or at the stop points chosen."""
    try:
        found = rehearse(demo.experiment(quick=True), demo.PACKAGE, chosen=chosen)
    except Refused as error:
        return set(re.findall(r"'([a-z ]+)': ", str(error).splitlines()[0]))
    assert found.runs
    return {name for run in found.runs for name, _ in run.broken}


def test_without_a_mutation_nothing_is_caught() -> None:
    assert caught(lambda point: point.effect.step in ("off.start", "restore.start")) == set()


def test_an_undo_owed_only_when_its_step_ends(monkeypatch: Patch) -> None:
    monkeypatch.setattr(decide, "owed", lambda step, state: any(name in state.ended for name in step.undoes))
    assert {"nothing left", "verified"} <= caught(at("off.start", "error", "kill"))


def test_a_restore_that_resumes_the_experiment(monkeypatch: Patch) -> None:
    table: Any = decide.TABLE
    monkeypatch.setitem(table, (Status.RUNNING, "restorer"), Status.RUNNING)
    assert "only restore after stop" in caught(at("off.requests", "kill before, then restore"))


def mutated_steps(monkeypatch: Patch, change: Callable[[list[Step]], list[Step]]) -> None:
    def changed(experiment: Any) -> tuple[Step, ...]:
        return tuple(change(list(steps(experiment))))

    monkeypatch.setattr(ticks, "steps", changed)
    monkeypatch.setattr(conduct, "steps", changed)


@pytest.mark.parametrize("dropped", ["restore.end", "restore.start", "switch.off"])
def test_one_undo_dropped(monkeypatch: Patch, dropped: str) -> None:
    mutated_steps(monkeypatch, lambda window: [step for step in window if step.name != dropped])
    assert caught(at("off.requests", "error")) & {"proved back", "nothing left", "verified"}


def test_two_undos_swapped(monkeypatch: Patch) -> None:
    def swapped(window: list[Step]) -> list[Step]:
        names = [step.name for step in window]
        end, start = names.index("restore.end"), names.index("restore.start")
        window[end], window[start] = replace(window[start], needs=()), window[end]
        return window

    mutated_steps(monkeypatch, swapped)
    # the host's own rule stops it before two servers run: the window cannot complete
    assert "complete" in caught(at("off.requests", "error"))


def test_a_restore_that_trusts_an_exit_status(monkeypatch: Patch) -> None:
    trusting: dict[str, Any] = {**undo.ACTS, "restore.prove": lambda runner, step: {}}
    monkeypatch.setattr(undo, "ACTS", trusting)
    assert "proved back" in caught(at("restore.start", "lie"))


def test_a_second_signal_that_cuts_a_restore_short(monkeypatch: Patch) -> None:
    whole = ticks.Ticks.tick

    def cut(self: ticks.Ticks) -> None:
        if self.restoring and self.signals:
            raise ticks.Interrupted("signal", self.signals.pop())
        whole(self)

    monkeypatch.setattr(ticks.Ticks, "tick", cut)
    assert "not cut short" in caught(at("restore.start", "two signals", "signal"))


def test_a_guard_whose_unreadable_value_passes(monkeypatch: Patch) -> None:
    whole = ticks.evaluate
    monkeypatch.setattr(
        ticks,
        "evaluate",
        lambda view, experiment: [trip for trip in whole(view, experiment) if "lacks" not in trip.reason],
    )
    assert "unknown stops" in caught(at("off.requests", "lie"))


def test_a_ledger_written_after_the_effect(monkeypatch: Patch) -> None:
    whole = calls.Calls.record
    late: list[dict[str, Any]] = []

    def record(self: calls.Calls, kind: str, **fields: Any) -> None:
        if kind == "command":
            late.append(fields)
            return
        if kind == "reply":
            whole(self, "command", **late.pop())
        whole(self, kind, **fields)

    monkeypatch.setattr(calls.Calls, "record", record)
    assert "written before" in caught(at("off.start", "error"))


def test_cells_written_after_the_reading(monkeypatch: Patch) -> None:
    whole, kept = calls.Calls.keep, list[tuple[str, str, bytes]]()

    def keep(self: calls.Calls, how: str, name: str, content: bytes) -> None:
        if name.endswith("cells.jsonl"):
            kept.append((how, name, content))
        else:
            whole(self, how, name, content)

    def reading(runner: Any, step: Step) -> dict[str, Any]:
        for row in kept:
            whole(runner, *row)
        return forward.reading(runner, step)

    monkeypatch.setattr(calls.Calls, "keep", keep)
    monkeypatch.setattr(undo, "ACTS", {**undo.ACTS, "reading": reading})
    assert "cells kept" in caught(at("cause.requests", "error", "kill"))


def test_a_hold_released_after_a_failed_restore(monkeypatch: Patch) -> None:
    def released(runner: Any, step: Step) -> dict[str, Any]:
        for host in runner.experiment.hosts:
            for what in ("switch", "hold"):
                runner._send(host, "play", {"verbs": [{"verb": "off", "what": what}]}, 30)
        return {}

    monkeypatch.setattr(undo, "ACTS", {**undo.ACTS, "not restored": released})
    assert "kept while down" in caught(at("restore.start", "lie"))


@pytest.fixture
def unfenced() -> Iterator[None]:
    """The host program without its fence: any actor of any term may act."""
    state = modules()["state"].State
    whole = state.fence
    state.fence = lambda self, term: None
    yield
    state.fence = whole


def test_two_restorers_on_one_host(unfenced: None) -> None:
    assert caught(lambda point: point.fault == "another restorer") & {"one at a time", "proved back", "nothing left"}
