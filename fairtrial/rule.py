"""The registered rule of an experiment, applied to cells and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fairtrial.experiment import Experiment
from fairtrial.reading import MATCH_THRESHOLDS, Text, Thresholds, Verdict, match, none

Rows = Sequence[Mapping[str, Any]]


def thresholds(experiment: Experiment) -> Thresholds:
    """The registered limits: those of the rule, with what the experiment sets."""
    cell = next(cell for cell in experiment.protocol.cells if cell.name == experiment.reading.cell)
    own: dict[str, Any] = {**experiment.reading.thresholds, "reps": cell.reps}
    if experiment.checks is not None:
        own["probe_tokens"] = experiment.checks.probe.tokens
        own["greedy_total"] = experiment.checks.greedy.prompts
    return Thresholds.of(MATCH_THRESHOLDS.as_json() | own)


def read(experiment: Experiment, cells: Rows, checks: Mapping[str, Rows | None]) -> dict[str, Any]:
    """Read cells and checks by the experiment's rule. Raises ``EvidenceError`` when they give no verdict."""
    rule = experiment.reading
    if rule.rule == "none":
        cell = next(cell for cell in experiment.protocol.cells if cell.name == rule.cell)
        reps = {arm.name: experiment.reps(arm, cell) for arm in experiment.arms}
        return none(cells, arms=[arm.name for arm in experiment.arms], cell=rule.cell, reps=reps)
    assert rule.off
    assert rule.cause
    assert rule.fix
    return match(
        cells,
        checks,
        off=rule.off,
        cause=rule.cause,
        fix=rule.fix,
        cell=rule.cell,
        thresholds=thresholds(experiment),
        texts={Verdict(name): Text(meaning=text.meaning, next=text.next) for name, text in rule.texts.items()},
    )
