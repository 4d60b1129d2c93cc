"""The rule ``match``: three arms of one HOLD (off, cause, fix), timed alike, and checks of off and fix.

Order: what is not whole raises; then UNSAFE, whatever the timing; then the timing, as ``Speed`` lists it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from fairtrial.reading.cells import Row, no_verdict, read_cells, timing
from fairtrial.reading.checks import (
    Checks,
    Floor,
    floor,
    greedy_compared,
    greedy_faults,
    greedy_same,
    read_checks,
    same_prompt,
)
from fairtrial.reading.quantities import median, rounded, spread
from fairtrial.reading.thresholds import MATCH_THRESHOLDS, Thresholds

OFF_SLOTS, FIX_SLOTS = ("a", "aa"), ("b",)


class Verdict(StrEnum):
    """What a matched window says of the fix."""

    CONFIRMED = "CONFIRMED"
    REFUTED = "REFUTED"
    CAUSE_NOT_REPRODUCED = "CAUSE_NOT_REPRODUCED"
    UNSAFE = "UNSAFE"
    AMBIGUOUS = "AMBIGUOUS"


class Speed(StrEnum):
    """What the timing alone says: the first of these that holds."""

    SPREAD = "spread"
    CAUSE_NOT_REPRODUCED = "cause-not-reproduced"
    FIX_LIKE_OFF = "fix-like-off"
    FIX_LIKE_CAUSE = "fix-like-cause"
    FASTER = "faster"
    BETWEEN = "between"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What a verdict means, and what to do next."""

    meaning: str
    next: str


TEXTS: Mapping[Verdict, Text] = {
    Verdict.CONFIRMED: Text(
        meaning="fix is as fast as cause, both are clearly faster than off, and fix answers as off does",
        next="adopt fix, or repeat the window on another day before adopting it",
    ),
    Verdict.REFUTED: Text(
        meaning="cause is clearly faster than off, fix is not: what fix changes is not what makes cause fast",
        next="try the next difference between cause and off as a fix of its own",
    ),
    Verdict.CAUSE_NOT_REPRODUCED: Text(
        meaning="cause is not clearly faster than off in this HOLD: its earlier gain was state, not code",
        next="alternate starts of off and cause until the gain comes and goes with something known",
    ),
    Verdict.UNSAFE: Text(
        meaning="fix does not answer as off does, whatever its speed: never adopt it",
        next="find out which change of fix alters the answers; promote nothing",
    ),
    Verdict.AMBIGUOUS: Text(
        meaning="no decision",
        next="repeat the window, or redesign it where the reasons say why it could not decide",
    ),
}

_AMBIGUOUS = {
    Speed.SPREAD: "spread",
    Speed.FIX_LIKE_CAUSE: "checks not run",
    Speed.FASTER: "faster than the band",
    Speed.BETWEEN: "between the bands",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One exact ratio held against its inclusive limits."""

    what: str
    value: Fraction
    low: Fraction | None = None
    high: Fraction | None = None

    @property
    def holds(self) -> bool:
        """Whether the value lies within its limits."""
        return not self.below and (self.high is None or self.value <= self.high)

    @property
    def below(self) -> bool:
        """Whether the value lies under its lower limit."""
        return self.low is not None and self.value < self.low

    def __str__(self) -> str:
        limits = [
            f"{word} {rounded(limit)}"
            for word, limit in (("at least", self.low), ("at most", self.high))
            if limit is not None
        ]
        return _sentence(self.holds, f"{self.what}: {rounded(self.value)}, {' and '.join(limits)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Every condition on the timing, and what they say together."""

    spreads: Sequence[Condition]
    cause_fast: Sequence[Condition]
    fix_like_off: Sequence[Condition]
    fix_like_cause: Sequence[Condition]
    fix_fast: Sequence[Condition]

    @property
    def speed(self) -> Speed:
        """The first result of ``Speed`` that holds."""
        if not _all_hold(self.spreads):
            return Speed.SPREAD
        if not _all_hold(self.cause_fast):
            return Speed.CAUSE_NOT_REPRODUCED
        if _all_hold(self.fix_like_off):
            return Speed.FIX_LIKE_OFF
        if _all_hold(self.fix_like_cause) and _all_hold(self.fix_fast):
            return Speed.FIX_LIKE_CAUSE
        return Speed.FASTER if any(rep.below for rep in self.fix_like_cause) else Speed.BETWEEN

    def sentences(self) -> list[str]:
        """Return one sentence a condition, in the order in which the rule asks them."""
        groups = (self.spreads, self.cause_fast, self.fix_like_off, self.fix_like_cause, self.fix_fast)
        return [str(condition) for group in groups for condition in group]


@dataclass(frozen=True, slots=True, kw_only=True)
class Safety:
    """The checks of off and fix compared: greedy answers that are the same, and the logit floor."""

    same: int
    of: int
    floor: Floor

    @property
    def passes(self) -> bool:
        """Whether every greedy answer is the same and the logit floor passes."""
        return self.same == self.of and self.floor.passes

    def as_json(self) -> dict[str, object]:
        return {
            "greedy": {"same": self.same, "of": self.of},
            "logit": self.floor.as_json(),
            "pass": self.passes,
        }

    def sentences(self) -> list[str]:
        """Return one sentence a condition."""
        greedy = _greedy_sentence(self.same, self.of, self.of)
        return [greedy, *(_sentence(holds, said) for holds, said in self.floor.sentences())]


def match(
    cells: Iterable[Row],
    checks: Mapping[str, Iterable[Row] | None],
    *,
    off: str,
    cause: str,
    fix: str,
    cell: str,
    thresholds: Thresholds = MATCH_THRESHOLDS,
    texts: Mapping[Verdict, Text] = TEXTS,
) -> dict[str, object]:
    """Return the reading of one window, as JSON: the same rows, in any order, give the same bytes.

    ``cells``: rows ``{"arm", "cell", "rep", "ttft_ns"}``, exactly ``thresholds.reps`` of ``cell`` for each
    of the three arms; rows of other cells are ignored. ``checks``: rows of ``off`` and of ``fix``; None is
    "not run", which forbids CONFIRMED alone. ``texts`` replace the engine's own.

    Keys returned: ``verdict, speed, safety`` (null: not run), ``ttft_s`` and ``median_s`` (seconds) and
    ``spread`` (ratio) by arm, ``thresholds, meaning, next, reasons``. Numbers are compared exactly and then
    written to 12 digits. Raises ``EvidenceError`` for all that gives no verdict, with every fault at once
    and any safety failure already seen.
    """
    faults: list[str] = []
    ttft_ns = read_cells(cells, cell=cell, reps=dict.fromkeys((off, cause, fix), thresholds.reps), faults=faults)
    off_checks, fix_checks = _read_both(checks, off, fix, thresholds, faults)
    if faults:
        raise no_verdict("match", faults, _failures_seen(off_checks, fix_checks, thresholds))

    conditions = _conditions(ttft_ns, off, cause, fix, thresholds)
    safety = _safety(off_checks, fix_checks, thresholds) if off_checks and fix_checks else None
    speed = conditions.speed
    verdict = _verdict(speed, safety)
    text = texts.get(verdict, TEXTS[verdict])
    reasons = conditions.sentences()
    if safety:
        reasons += safety.sentences()
    else:
        absent = [arm for arm in (off, fix) if checks.get(arm) is None]
        reasons.append(f"checks not run: {', '.join(absent)}")
    if verdict is Verdict.AMBIGUOUS:
        reasons.insert(0, f"AMBIGUOUS: {_AMBIGUOUS[speed]}")
    return {
        "verdict": verdict.value,
        "speed": speed.value,
        "safety": safety.as_json() if safety else None,
        **timing(ttft_ns),
        "thresholds": thresholds.as_json(),
        "meaning": text.meaning,
        "next": text.next,
        "reasons": reasons,
    }


def _verdict(speed: Speed, safety: Safety | None) -> Verdict:
    if safety and not safety.passes:
        return Verdict.UNSAFE
    if speed is Speed.CAUSE_NOT_REPRODUCED:
        return Verdict.CAUSE_NOT_REPRODUCED
    if speed is Speed.FIX_LIKE_OFF:
        return Verdict.REFUTED
    return Verdict.CONFIRMED if speed is Speed.FIX_LIKE_CAUSE and safety else Verdict.AMBIGUOUS


def _conditions(
    ttft_ns: Mapping[str, Sequence[int]], off: str, cause: str, fix: str, thresholds: Thresholds
) -> Conditions:
    spread_max, speedup_max = Fraction(thresholds.spread_max), Fraction(thresholds.speedup_max)
    refute_min, band = Fraction(thresholds.refute_min), Fraction(thresholds.band)

    def each(
        arm: str, against: str, due: str = "", low: Fraction | None = None, high: Fraction | None = None
    ) -> list[Condition]:
        reference = median(ttft_ns[against])
        return [
            Condition(what=f"{due}{arm} rep {rep} / median of {against}", value=ns / reference, low=low, high=high)
            for rep, ns in enumerate(ttft_ns[arm], 1)
        ]

    refuted, confirmed = "for REFUTED, ", "for CONFIRMED, "
    return Conditions(
        spreads=[
            Condition(what=f"spread of {arm}", value=spread(reps), high=spread_max) for arm, reps in ttft_ns.items()
        ],
        cause_fast=each(cause, off, high=speedup_max),
        fix_like_off=each(fix, off, refuted, low=refute_min),
        fix_like_cause=each(fix, cause, confirmed, low=1 - band, high=1 + band),
        fix_fast=each(fix, off, confirmed, high=speedup_max),
    )


def _read_both(
    checks: Mapping[str, Iterable[Row] | None], off: str, fix: str, thresholds: Thresholds, faults: list[str]
) -> tuple[Checks | None, Checks | None]:
    """Return the checks of off and of fix, None where they were not run."""
    if any(rows is not None and arm not in (off, fix) for arm, rows in checks.items()):
        faults.append(f"checks: there are rows of an arm other than {off} and {fix}")
    found: list[Checks | None] = []
    for arm, slots in ((off, OFF_SLOTS), (fix, FIX_SLOTS)):
        rows = checks.get(arm)
        found.append(
            None if rows is None else read_checks(rows, arm=arm, slots=slots, thresholds=thresholds, faults=faults)
        )
    off_checks, fix_checks = found
    if not same_prompt(probe for ran in found if ran for probe in ran.probes.values()):
        faults.append("checks: the logit rows are not all of one prompt")
    if off_checks and fix_checks:
        faults += greedy_faults(off_checks, fix_checks)
    return off_checks, fix_checks


def _safety(off: Checks, fix: Checks, thresholds: Thresholds) -> Safety:
    return Safety(
        same=greedy_same(off, fix),
        of=thresholds.greedy_total,
        floor=floor(off.probes | fix.probes, thresholds),
    )


def _failures_seen(off: Checks | None, fix: Checks | None, thresholds: Thresholds) -> list[str]:
    """Return the safety failures that stand in evidence which gives no verdict."""
    if not off or not fix:
        return []
    failures = []
    same, compared = greedy_same(off, fix), greedy_compared(off, fix)
    if same < compared:
        failures.append(_greedy_sentence(same, compared, thresholds.greedy_total))
    probes = off.probes | fix.probes
    if probes.keys() == {*OFF_SLOTS, *FIX_SLOTS} and same_prompt(probes.values()):
        failures += [_sentence(holds, said) for holds, said in floor(probes, thresholds).sentences() if not holds]
    return failures


def _greedy_sentence(same: int, compared: int, due: int) -> str:
    return _sentence(same == due, f"greedy answers the same: {same} of {compared}, exactly {due}")


def _sentence(holds: bool, said: str) -> str:
    return f"{said}: {'holds' if holds else 'does not hold'}"


def _all_hold(conditions: Iterable[Condition]) -> bool:
    return all(condition.holds for condition in conditions)
