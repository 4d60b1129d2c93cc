from __future__ import annotations

import ast
import copy
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fairtrial.reading
from fairtrial.canonical import canonical
from fairtrial.errors import EvidenceError
from fairtrial.reading import MATCH_THRESHOLDS, TEXTS, Speed, Text, Thresholds, Verdict, match, numerical

Rows = list[dict[str, Any]]
OFF, CAUSE, FIX = "off-524", "cause-524", "fix-524"
SECOND = 1_000_000_000
PROMPT = hashlib.sha256(b"the probe").hexdigest()

# A distribution over 22 tokens whose likeliest 20 hold all but 0.002 of the mass.
BASE = {token: p * 0.998 / 1.68 for token, p in enumerate([0.5, 0.3, 0.2, 0.1, 0.1, *[0.032] * 15])}


def cells(off: Sequence[int], cause: Sequence[int], fix: Sequence[int]) -> Rows:
    return [
        {"arm": arm, "cell": "150k", "rep": rep, "ttft_ns": ns}
        for arm, reps in ((OFF, off), (CAUSE, cause), (FIX, fix))
        for rep, ns in enumerate(reps, 1)
    ]


def seconds(*values: float) -> list[int]:
    return [round(value * 1000) * 1_000_000 for value in values]


def top(probabilities: Mapping[int, float]) -> list[list[object]]:
    return [[token, math.log(p)] for token, p in probabilities.items()]


def moved(by: float) -> dict[int, float]:
    """Return BASE with probability moved from token 0 to token 1."""
    return BASE | {0: BASE[0] - by, 1: BASE[1] + by}


def logit(slot: str, entries: list[list[object]]) -> dict[str, Any]:
    return {
        "kind": "logit",
        "slot": slot,
        "prompt_sha256": PROMPT,
        "prompt_tokens": 8192,
        "cached_tokens": 0,
        "top": entries,
    }


def greedy(number: int, answer: str | None = None, tokens: int = 300) -> dict[str, Any]:
    text = f"answer {number}" if answer is None else answer
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"kind": "greedy", "prompt": f"w5-{number}", "sha256": digest, "completion_tokens": tokens}


def arm_checks(*probes: dict[str, Any]) -> Rows:
    return [{"kind": "identity", "model": "m"}, *(greedy(number) for number in range(6)), *probes]


def good_checks(aa: float = 1e-4, b: float = 2e-4) -> dict[str, Rows | None]:
    return {
        OFF: arm_checks(logit("a", top(BASE)), logit("aa", top(moved(aa)))),
        FIX: arm_checks(logit("b", top(moved(b)))),
    }


NUMBERS = ("verdict", "speed", "safety", "ttft_s", "median_s", "spread")
NOT_RUN: dict[str, Rows | None] = {OFF: None, FIX: None}
CONFIRMING = cells(seconds(91, 91.2), seconds(69.2, 69.4), seconds(69.5, 69.7))
REFUTING = cells(seconds(91, 91.2), seconds(69.2, 69.4), seconds(90.9, 91.1))


def read(
    timed: Rows,
    checks: Mapping[str, Iterable[Mapping[str, object]] | None],
    thresholds: Thresholds = MATCH_THRESHOLDS,
    texts: Mapping[Verdict, Text] = TEXTS,
) -> dict[str, Any]:
    return match(timed, checks, off=OFF, cause=CAUSE, fix=FIX, cell="150k", thresholds=thresholds, texts=texts)


def verdict(timed: Rows, checks: Mapping[str, Rows | None] | None = None) -> tuple[str, str]:
    reading = read(timed, good_checks() if checks is None else checks)
    return reading["verdict"], reading["speed"]


def raised(timed: Rows, checks: Mapping[str, Rows | None]) -> str:
    with pytest.raises(EvidenceError) as fault:
        read(timed, checks)
    return str(fault.value)


def limits(**changed: object) -> Thresholds:
    return Thresholds.of(MATCH_THRESHOLDS.as_json() | changed)


# Every verdict.


def test_a_fix_as_fast_as_cause_with_the_same_answers_is_confirmed() -> None:
    assert verdict(CONFIRMING) == ("CONFIRMED", "fix-like-cause")


def test_a_fix_as_slow_as_off_is_refuted() -> None:
    assert verdict(REFUTING) == ("REFUTED", "fix-like-off")


def test_a_slow_cause_is_not_reproduced() -> None:
    timed = cells(seconds(91, 91.2), seconds(72, 73), seconds(69.5, 69.7))
    assert verdict(timed) == ("CAUSE_NOT_REPRODUCED", "cause-not-reproduced")


def test_one_slow_cause_rep_is_enough() -> None:
    timed = cells(seconds(100, 100), seconds(79, 80.001), seconds(79, 79))
    assert verdict(timed) == ("CAUSE_NOT_REPRODUCED", "cause-not-reproduced")


def test_a_fix_between_the_bands_is_ambiguous() -> None:
    timed = cells(seconds(91, 91.2), seconds(69.2, 69.4), seconds(80, 80.2))
    reading = read(timed, good_checks())
    assert (reading["verdict"], reading["speed"]) == ("AMBIGUOUS", "between")
    assert reading["reasons"][0] == "AMBIGUOUS: between the bands"


def test_one_rep_like_off_and_one_not_is_between() -> None:
    timed = cells(seconds(100, 100), seconds(70, 70), seconds(94.9, 95.1))
    assert verdict(timed) == ("AMBIGUOUS", "between")


def test_a_fix_within_the_band_of_cause_but_over_the_speed_up_is_between() -> None:
    timed = cells(seconds(100, 100), seconds(79, 79), seconds(79.5, 80.5))
    assert verdict(timed) == ("AMBIGUOUS", "between")


def test_a_fix_faster_than_the_band_is_ambiguous_and_says_so() -> None:
    timed = cells(seconds(100, 100), seconds(70, 70), seconds(66, 66.4))
    reading = read(timed, good_checks())
    assert (reading["verdict"], reading["speed"]) == ("AMBIGUOUS", "faster")
    assert reading["reasons"][0] == "AMBIGUOUS: faster than the band"


def test_one_rep_faster_than_the_band_is_faster() -> None:
    assert verdict(cells(seconds(100, 100), seconds(70, 70), seconds(66.4, 66.6))) == ("AMBIGUOUS", "faster")


@pytest.mark.parametrize("wide", [0, 1, 2])
def test_a_wide_spread_of_any_arm_is_ambiguous(wide: int) -> None:
    reps = [seconds(100, 100), seconds(70, 70), seconds(70, 70)]
    reps[wide][1] += reps[wide][0] // 20
    reading = read(cells(*reps), good_checks())
    assert (reading["verdict"], reading["speed"]) == ("AMBIGUOUS", "spread")
    assert reading["reasons"][0] == "AMBIGUOUS: spread"


def test_a_wide_spread_hides_a_slow_cause_and_a_refuted_fix() -> None:
    assert verdict(cells(seconds(100, 104), seconds(90, 90), seconds(70, 70)))[1] == "spread"
    assert verdict(cells(seconds(100, 104), seconds(70, 70), seconds(99, 99)))[1] == "spread"


def test_a_slow_cause_comes_before_a_slow_fix() -> None:
    assert verdict(cells(seconds(91, 91), seconds(91, 91), seconds(91, 91)))[0] == "CAUSE_NOT_REPRODUCED"


def test_a_greedy_answer_that_differs_is_unsafe() -> None:
    checks = good_checks()
    rows_of(checks, FIX)[3] = greedy(2, "another answer")
    reading = read(CONFIRMING, checks)
    assert (reading["verdict"], reading["speed"]) == ("UNSAFE", "fix-like-cause")
    assert reading["safety"]["greedy"] == {"same": 5, "of": 6}
    assert reading["safety"]["logit"]["pass"] is True
    assert reading["safety"]["pass"] is False


def test_the_same_text_in_other_tokens_is_unsafe() -> None:
    checks = good_checks()
    rows_of(checks, FIX)[3]["completion_tokens"] = 299
    assert verdict(CONFIRMING, checks)[0] == "UNSAFE"


def test_a_logit_floor_that_fails_is_unsafe() -> None:
    reading = read(CONFIRMING, good_checks(b=0.06))
    assert reading["verdict"] == "UNSAFE"
    assert reading["safety"]["greedy"] == {"same": 6, "of": 6}
    assert reading["safety"]["logit"]["pass"] is False


@pytest.mark.parametrize(
    ("timed", "speed"),
    [
        (REFUTING, "fix-like-off"),
        (cells(seconds(100, 110), seconds(70, 70), seconds(70, 70)), "spread"),
        (cells(seconds(100, 100), seconds(90, 90), seconds(70, 70)), "cause-not-reproduced"),
        (cells(seconds(100, 100), seconds(70, 70), seconds(60, 60)), "faster"),
    ],
)
def test_unsafe_comes_before_any_timing_and_speed_stays_timing_alone(timed: Rows, speed: str) -> None:
    assert verdict(timed, good_checks(b=0.06)) == ("UNSAFE", speed)


# Checks that were not run.


@pytest.mark.parametrize("missing", [(OFF,), (FIX,), (OFF, FIX)])
def test_checks_not_run_forbid_confirmed_alone(missing: tuple[str, ...]) -> None:
    checks = good_checks() | dict.fromkeys(missing)
    reading = read(CONFIRMING, checks)
    assert (reading["verdict"], reading["speed"], reading["safety"]) == ("AMBIGUOUS", "fix-like-cause", None)
    assert reading["reasons"][0] == "AMBIGUOUS: checks not run"
    assert reading["reasons"][-1] == f"checks not run: {', '.join(missing)}"
    assert verdict(REFUTING, checks)[0] == "REFUTED"
    slow_cause = cells(seconds(91, 91), seconds(80, 80), seconds(91, 91))
    assert verdict(slow_cause, checks)[0] == "CAUSE_NOT_REPRODUCED"


def test_an_arm_that_has_no_entry_was_not_run() -> None:
    assert read(CONFIRMING, {}) == read(CONFIRMING, NOT_RUN)


def test_rows_of_an_arm_that_has_no_checks_raise() -> None:
    checks = good_checks() | {CAUSE: arm_checks()}
    assert "rows of an arm other than" in raised(CONFIRMING, checks)
    assert verdict(CONFIRMING, good_checks() | {CAUSE: None})[0] == "CONFIRMED"


# Cells.


@pytest.mark.parametrize("drop", range(6))
def test_a_missing_rep_raises(drop: int) -> None:
    timed = [row for number, row in enumerate(CONFIRMING) if number != drop]
    assert f"cells of {CONFIRMING[drop]['arm']}: 1 whole reps" in raised(timed, good_checks())


def test_an_absent_arm_raises() -> None:
    assert "cells of cause-524: 0 whole reps" in raised([*CONFIRMING[:2], *CONFIRMING[4:]], good_checks())


@pytest.mark.parametrize("rep", [0, 3, True, "1", 1.0, None])
def test_a_rep_that_is_not_due_raises(rep: object) -> None:
    extra = CONFIRMING[0] | {"rep": rep}
    assert "its rep of off-524 is no whole number from 1 to 2" in raised([*CONFIRMING, extra], good_checks())


def test_a_rep_twice_raises() -> None:
    assert "rep 1 of off-524 stands in an earlier row too" in raised([*CONFIRMING, CONFIRMING[0]], good_checks())


def test_a_cell_of_another_arm_raises() -> None:
    extra = CONFIRMING[0] | {"arm": "off-327"}
    assert "row 7: its arm is none of off-524, cause-524, fix-524" in raised([*CONFIRMING, extra], good_checks())


def test_rows_of_other_cells_are_ignored_whatever_they_hold() -> None:
    other: Rows = [{"cell": "32k"}, {"cell": "32k", "arm": "x", "rep": 9, "ttft_ns": -1}]
    assert read([*other, *CONFIRMING], good_checks()) == read(CONFIRMING, good_checks())


@pytest.mark.parametrize("row", [{}, {"cell": None}, {"cell": 150}, [], None])
def test_a_row_that_names_no_cell_raises(row: Any) -> None:
    assert "row 7: it names no cell" in raised([*CONFIRMING, row], good_checks())


@pytest.mark.parametrize("ttft", [math.nan, math.inf, 0, -1, True, "91000000000", None, 91e9, Decimal(91)])
def test_a_ttft_that_is_no_time_raises(ttft: object) -> None:
    timed = [CONFIRMING[0] | {"ttft_ns": ttft}, *CONFIRMING[1:]]
    assert "row 1: its ttft_ns is no whole number of nanoseconds above 0" in raised(timed, good_checks())


# Limits are inclusive and exact: here float64 answers wrongly.


def classify(off: Sequence[int], cause: Sequence[int], fix: Sequence[int]) -> str:
    return verdict(cells(off, cause, fix), NOT_RUN)[1]


def test_eight_tenths_of_off_is_fast_enough_and_one_nanosecond_more_is_not() -> None:
    off, cause = 90_195_000_000, 72_156_000_000
    assert not cause / 1e9 <= 0.8 * (off / 1e9)
    assert classify([off] * 2, [cause] * 2, [cause] * 2) == "fix-like-cause"
    assert classify([off] * 2, [cause, cause + 1], [cause] * 2) == "cause-not-reproduced"
    assert classify([off] * 2, [cause] * 2, [cause, cause + 1]) == "between"


def test_ninety_five_hundredths_of_off_is_as_slow_and_one_nanosecond_less_is_not() -> None:
    off, fix = 90_290_000_000, 85_775_500_000
    assert not fix / 1e9 >= 0.95 * (off / 1e9)
    cause = off * 7 // 10
    assert classify([off] * 2, [cause] * 2, [fix] * 2) == "fix-like-off"
    assert classify([off] * 2, [cause] * 2, [fix, fix - 1]) == "between"


def test_five_percent_over_cause_is_within_the_band_and_one_nanosecond_more_is_not() -> None:
    cause, fix = 69_005_000_000, 72_455_250_000
    assert not fix / 1e9 <= 1.05 * (cause / 1e9)
    assert classify([91 * SECOND] * 2, [cause] * 2, [fix] * 2) == "fix-like-cause"
    assert classify([91 * SECOND] * 2, [cause] * 2, [fix, fix + 1]) == "between"


def test_five_percent_under_cause_is_within_the_band_and_one_nanosecond_less_is_faster() -> None:
    cause, fix = 69_040_000_000, 65_588_000_000
    assert not fix / 1e9 >= (1 - 0.05) * (cause / 1e9)
    assert classify([91 * SECOND] * 2, [cause] * 2, [fix] * 2) == "fix-like-cause"
    assert classify([91 * SECOND] * 2, [cause] * 2, [fix, fix - 1]) == "faster"


def test_three_percent_is_within_the_spread_and_one_nanosecond_more_is_not() -> None:
    low, high = 88_669_455_720, 91_370_048_280
    assert not (high / 1e9 - low / 1e9) / ((high / 1e9 + low / 1e9) / 2) <= 0.03
    fast = [60 * SECOND] * 2
    assert classify([low, high], fast, fast) == "fix-like-cause"
    assert classify([low, high + 1], fast, fast) == "spread"


def test_the_limit_is_against_the_median_of_the_other_arm_not_its_fastest_rep() -> None:
    cause = [79_500_000_000, 80_500_000_000]
    assert classify([100 * SECOND, 102 * SECOND], cause, cause) == "fix-like-cause"
    assert classify([100 * SECOND, 101 * SECOND], cause, cause) == "cause-not-reproduced"


def test_a_spread_is_judged_before_it_is_rounded_for_writing() -> None:
    low, high = 1_969_999_999_999_999_999, 2_030_000_000_000_000_000
    assert (high - low) / ((high + low) / 2) <= 0.03
    fast = [10**18] * 2
    reading = read(cells([low, high], fast, fast), NOT_RUN)
    assert reading["spread"][OFF] == 0.03
    assert reading["speed"] == "spread"
    assert f"spread of {OFF}: 0.03, at most 0.03: does not hold" in reading["reasons"]


# Checks that are not exactly one artifact.


def rows_of(checks: Mapping[str, Rows | None], arm: str) -> Rows:
    rows = checks[arm]
    assert rows is not None
    return rows


def changed(arm: str, number: int, **values: object) -> dict[str, Rows | None]:
    checks = good_checks()
    rows_of(checks, arm)[number] |= values
    return checks


@pytest.mark.parametrize("arm", [OFF, FIX])
def test_checks_that_lack_any_row_or_hold_one_twice_raise(arm: str) -> None:
    for number in range(len(rows_of(good_checks(), arm))):
        short, double = good_checks(), good_checks()
        del rows_of(short, arm)[number]
        rows_of(double, arm).append(copy.deepcopy(rows_of(double, arm)[number]))
        assert f"checks of {arm}" in raised(CONFIRMING, short)
        assert f"checks of {arm}" in raised(CONFIRMING, double)


@pytest.mark.parametrize("arm", [OFF, FIX])
def test_an_artifact_without_rows_exists_and_is_incomplete(arm: str) -> None:
    assert f"checks of {arm}: 0 identity rows" in raised(CONFIRMING, good_checks() | {arm: []})


@pytest.mark.parametrize("arm", [OFF, FIX])
def test_one_broken_artifact_raises_though_the_other_was_not_run(arm: str) -> None:
    checks = dict(NOT_RUN) | {arm: rows_of(good_checks(), arm)[:-1]}
    assert f"checks of {arm}: no whole logit row" in raised(REFUTING, checks)


def test_a_seventh_prompt_raises() -> None:
    checks = good_checks()
    for arm in (OFF, FIX):
        rows_of(checks, arm).append(greedy(6))
    assert "7 whole greedy rows, exactly 6 are due" in raised(CONFIRMING, checks)


@pytest.mark.parametrize("row", [{"kind": "other"}, {}, {"kind": ["greedy"]}, None])
def test_an_unknown_kind_raises(row: Any) -> None:
    checks = good_checks()
    rows_of(checks, FIX).append(row)
    assert "row 9: its kind is none of identity, greedy, logit" in raised(CONFIRMING, checks)


@pytest.mark.parametrize(("arm", "number", "slot"), [(FIX, 7, "a"), (OFF, 8, "b"), (OFF, 8, "c"), (OFF, 8, None)])
def test_a_slot_of_the_other_arm_raises(arm: str, number: int, slot: object) -> None:
    assert "its slot is none of this arm's" in raised(CONFIRMING, changed(arm, number, slot=slot))


def test_prompt_ids_that_are_not_the_same_set_raise() -> None:
    assert "same set of prompt ids" in raised(CONFIRMING, changed(FIX, 1, prompt="w5-9"))
    assert "same set of prompt ids" in raised(CONFIRMING, changed(FIX, 1, prompt=0))


@pytest.mark.parametrize("prompt", [None, "", True, 1.5, ["w5-0"]])
def test_a_prompt_id_that_is_none_raises(prompt: object) -> None:
    assert "its prompt is no prompt id" in raised(CONFIRMING, changed(FIX, 1, prompt=prompt))


@pytest.mark.parametrize("digest", [None, "", "ab", "A" * 64, "g" * 64, 7, "0" * 64 + "\n"])
def test_an_answer_without_a_sha256_raises(digest: object) -> None:
    assert "its sha256 is not 64" in raised(CONFIRMING, changed(FIX, 1, sha256=digest))
    assert "its prompt_sha256 is not 64" in raised(CONFIRMING, changed(FIX, 7, prompt_sha256=digest))


@pytest.mark.parametrize("tokens", [None, -1, True, 3.0, "3"])
def test_completion_tokens_that_are_no_count_raise(tokens: object) -> None:
    assert "its completion_tokens is no whole number" in raised(CONFIRMING, changed(FIX, 1, completion_tokens=tokens))


@pytest.mark.parametrize("nothing", [greedy(0, "", 0), greedy(0, "", 1), greedy(0, tokens=0)])
def test_two_empty_answers_prove_nothing_and_one_is_not_the_same(nothing: dict[str, Any]) -> None:
    both = good_checks()
    for arm in (OFF, FIX):
        rows_of(both, arm)[1] = dict(nothing)
    assert "1 greedy answers are empty in both arms" in raised(CONFIRMING, both)
    for arm in (OFF, FIX):
        one = good_checks()
        rows_of(one, arm)[1] = dict(nothing)
        assert verdict(CONFIRMING, one)[0] == "UNSAFE"


@pytest.mark.parametrize("cached", [1, 8191, None, False, 0.0, "0"])
def test_a_probe_that_is_not_proved_cold_raises(cached: object) -> None:
    for arm, number in ((OFF, 7), (OFF, 8), (FIX, 7)):
        assert "not proved cold" in raised(CONFIRMING, changed(arm, number, cached_tokens=cached))


@pytest.mark.parametrize("tokens", [8191, 8193, None, 8192.0, "8192"])
def test_a_probe_of_another_length_raises(tokens: object) -> None:
    assert "its prompt_tokens is not 8192" in raised(CONFIRMING, changed(FIX, 7, prompt_tokens=tokens))


@pytest.mark.parametrize(("arm", "number"), [(OFF, 7), (OFF, 8), (FIX, 7)])
def test_a_probe_of_another_prompt_than_its_fellows_raises(arm: str, number: int) -> None:
    checks = changed(arm, number, prompt_sha256="0" * 64)
    assert "not all of one prompt" in raised(CONFIRMING, checks)
    if arm == OFF:
        assert "not all of one prompt" in raised(CONFIRMING, checks | {FIX: None})


@pytest.mark.parametrize("entries", [None, top(BASE)[:19], [*top(BASE), [0, -9.0]], [*top(BASE)[:19], [99, None]]])
def test_a_malformed_top_raises(entries: object) -> None:
    for arm, number in ((OFF, 7), (OFF, 8), (FIX, 7)):
        row = f"checks of {arm}, row {number + 1}:"
        assert row in raised(CONFIRMING, changed(arm, number, top=entries))


# What raises hides nothing.


def test_every_fault_is_named_at_once_with_the_way_out() -> None:
    checks = changed(FIX, 7, cached_tokens=5)
    del rows_of(checks, OFF)[0]
    message = raised(CONFIRMING[1:], checks)
    assert "cells of off-524: 1 whole reps of 150k, the rule needs 2" in message
    assert "checks of off-524: 0 identity rows, exactly 1 is due" in message
    assert "checks of fix-524, row 8: its cached_tokens is not 0" in message
    assert "next: `fairtrial verify`" in message
    assert "safety failure" not in message


def test_a_raise_carries_the_safety_failures_already_seen() -> None:
    checks = good_checks(b=0.06)
    rows_of(checks, FIX)[3] = greedy(2, "another answer")
    message = raised(CONFIRMING[1:], checks)
    assert "a safety failure was seen all the same:" in message
    assert "greedy answers the same: 5 of 6, exactly 6: does not hold" in message
    assert "logit KL(off || fix): 0.0153" in message
    assert "captured mass" not in message


def test_a_mismatch_among_too_few_greedy_rows_is_carried_too() -> None:
    checks = good_checks()
    rows_of(checks, FIX)[3] = greedy(2, "another answer")
    del rows_of(checks, FIX)[1]
    assert "greedy answers the same: 4 of 5, exactly 6: does not hold" in raised(CONFIRMING, checks)


def test_a_probe_of_another_prompt_is_no_safety_failure() -> None:
    checks = good_checks(b=0.06)
    rows_of(checks, FIX)[7]["prompt_sha256"] = "0" * 64
    assert "safety failure" not in raised(CONFIRMING, checks)


def test_no_message_repeats_what_a_row_says() -> None:
    said = "the text of an answer"
    checks = good_checks()
    rows_of(checks, FIX)[1] |= {"sha256": said, "prompt": said}
    rows_of(checks, FIX)[2] |= {"completion_tokens": said}
    rows_of(checks, FIX)[7]["top"] = [[said, -0.5]] * 20
    rows_of(checks, OFF)[7]["top"] = [[1, said]] * 20
    rows_of(checks, OFF)[8]["slot"] = said
    rows_of(checks, OFF).append({"kind": said})
    assert said not in raised([*CONFIRMING, CONFIRMING[0] | {"arm": said, "rep": said}], checks)


# The logit floor.


def floor(a: object, aa: object, b: object, **changes: object) -> dict[str, Any]:
    row: dict[str, object] = {"prompt_sha256": PROMPT, "prompt_tokens": 8192, "cached_tokens": 0}
    return numerical(row | {"top": a}, row | {"top": aa}, row | {"top": b}, limits(**changes))


def test_off_a_is_the_reference_of_both_divergences_and_aa_stands_beside() -> None:
    measured = floor(top(BASE), top(moved(0.01)), top(moved(0.02)))

    def kl(p: Mapping[int, float], q: Mapping[int, float]) -> float:
        return sum(p[token] * math.log(p[token] / q[token]) for token in p)

    assert measured["kl_fix"] == pytest.approx(kl(BASE, moved(0.02)), abs=1e-12)
    assert measured["kl_floor"] == pytest.approx(kl(BASE, moved(0.01)), abs=1e-12)
    assert measured["kl_aa_fix"] == pytest.approx(kl(moved(0.01), moved(0.02)), abs=1e-12)
    assert measured["common_mass"] == pytest.approx(0.998, abs=1e-12)


def test_the_limit_is_the_floor_or_twice_the_control_whichever_is_more() -> None:
    assert floor(top(BASE), top(moved(0.001)), top(BASE))["limit"] == 0.005
    wide = floor(top(BASE), top(moved(0.06)), top(moved(0.06)))
    assert wide["limit"] == pytest.approx(2 * wide["kl_floor"], rel=1e-11)
    assert wide["kl_fix"] > 0.005
    assert wide["pass"] is True


def test_a_divergence_of_exactly_the_limit_passes_and_the_least_more_does_not() -> None:
    drifted = top(moved(0.06))
    at = floor(top(BASE), drifted, drifted, kl_floor_multiple=1)
    assert at["kl_fix"] == at["limit"]
    assert at["pass"] is True
    more = [[0, Decimal(repr(drifted[0][1])) - Decimal("1e-25")], *drifted[1:]]
    over = floor(top(BASE), drifted, more, kl_floor_multiple=1)
    assert over["kl_fix"] == over["limit"]
    assert over["pass"] is False


def test_a_mass_of_exactly_the_minimum_passes_and_the_least_less_does_not() -> None:
    whole = [[0, Decimal(0)], *[[token, Decimal(-9999)] for token in range(1, 20)]]
    assert floor(whole, whole, whole, mass_min=1)["pass"] is True
    less = [[0, Decimal("-1e-30")], *whole[1:]]
    measured = floor(whole, whole, less, mass_min=1)
    assert measured["common_mass"] == 1.0
    assert measured["pass"] is False


def poor(mass: float, first: int = 0) -> list[list[object]]:
    return [[token, math.log(mass / 20)] for token in range(first, first + 20)]


def test_a_common_mass_under_the_minimum_is_unsafe() -> None:
    checks = changed(FIX, 7, top=[*top(BASE)[:19], [77, math.log(BASE[19])]])
    reading = read(CONFIRMING, checks)
    assert reading["verdict"] == "UNSAFE"
    assert reading["safety"]["logit"]["common_mass"] == pytest.approx(0.998 - BASE[19], abs=1e-12)
    assert not any("cannot judge" in reason for reason in reading["reasons"])


def test_where_the_control_captures_too_little_the_reason_says_the_probe_cannot_judge() -> None:
    checks = good_checks()
    for arm, number in ((OFF, 7), (OFF, 8), (FIX, 7)):
        rows_of(checks, arm)[number]["top"] = poor(0.43)
    reading = read(CONFIRMING, checks)
    assert reading["verdict"] == "UNSAFE"
    assert any("the probe cannot judge (A-A mass 0.43)" in reason for reason in reading["reasons"])


def test_a_control_that_lost_mass_may_not_widen_the_limit() -> None:
    lost = [*top(moved(0.06))[:19], [77, math.log(BASE[19])]]
    measured = floor(top(BASE), lost, top(moved(0.06)))
    assert measured["kl_floor"] > 0.005
    assert measured["floor_mass"] < 0.99
    assert measured["limit"] == 0.005
    assert measured["common_mass"] >= 0.99
    assert measured["pass"] is False


def test_disjoint_tops_fail_by_mass_though_their_divergence_is_nothing() -> None:
    measured = floor(poor(0.998), poor(0.998), poor(0.998, first=50))
    assert (measured["kl_fix"], measured["common_mass"], measured["pass"]) == (0.0, 0.0, False)


def test_numerical_names_every_probe_it_cannot_use() -> None:
    row: dict[str, object] = {"prompt_sha256": PROMPT, "prompt_tokens": 8192, "cached_tokens": 0, "top": top(BASE)}
    with pytest.raises(EvidenceError, match=r"probe aa: .*cold.*; probe b: .*8192"):
        numerical(row, row | {"cached_tokens": 9}, row | {"prompt_tokens": 9}, MATCH_THRESHOLDS)
    with pytest.raises(EvidenceError, match="not all of one prompt"):
        numerical(row, row | {"prompt_sha256": "0" * 64}, row, MATCH_THRESHOLDS)


# What is returned.


def test_the_reading_of_fixed_evidence_has_these_bytes_on_every_machine() -> None:
    checks = good_checks()
    for arm, number in ((OFF, 7), (OFF, 8), (FIX, 7)):
        row = rows_of(checks, arm)[number]
        row["top"] = [[token, round(logprob, 4)] for token, logprob in row["top"]]
    reading = read(CONFIRMING, checks)
    assert list(reading) == [*NUMBERS, "thresholds", "meaning", "next", "reasons"]
    numbers = {key: reading[key] for key in NUMBERS}
    assert canonical(numbers) == (
        b'{"median_s":{"cause-524":69.3,"fix-524":69.6,"off-524":91.1},"safety":{"greedy":{"of":6,"same":6},'
        b'"logit":{"common_mass":0.998013230314,"floor_mass":0.998001396742,"kl_aa_fix":1.26642295779e-07,'
        b'"kl_fix":2.10582311067e-07,"kl_floor":9.0945910136e-08,"limit":0.005,"pass":true},"pass":true},'
        b'"speed":"fix-like-cause","spread":{"cause-524":0.002886002886,"fix-524":0.00287356321839,'
        b'"off-524":0.00219538968167},"ttft_s":{"cause-524":[69.2,69.4],"fix-524":[69.5,69.7],'
        b'"off-524":[91.0,91.2]},"verdict":"CONFIRMED"}'
    )


def test_each_condition_is_named_with_its_value_and_its_limit() -> None:
    reasons = read(CONFIRMING, good_checks())["reasons"]
    assert "spread of off-524: 0.00219538968167, at most 0.03: holds" in reasons
    assert "cause-524 rep 1 / median of off-524: 0.759604829857, at most 0.8: holds" in reasons
    assert "for REFUTED, fix-524 rep 2 / median of off-524: 0.765093304061, at least 0.95: does not hold" in reasons
    assert (
        "for CONFIRMED, fix-524 rep 2 / median of cause-524: 1.00577200577, at least 0.95 and at most 1.05: holds"
        in reasons
    )
    assert "greedy answers the same: 6 of 6, exactly 6: holds" in reasons
    assert len(reasons) == 3 + 2 + 2 + 2 + 2 + 3
    assert not any(reason.startswith("AMBIGUOUS") for reason in reasons)


def test_meaning_and_next_come_from_the_experiment_or_else_from_the_engine() -> None:
    own = {Verdict.CONFIRMED: Text(meaning="it works", next="promote")}
    confirmed = read(CONFIRMING, good_checks(), texts=own)
    assert (confirmed["meaning"], confirmed["next"]) == ("it works", "promote")
    refuted = read(REFUTING, good_checks(), texts=own)
    assert (refuted["meaning"], refuted["next"]) == (TEXTS[Verdict.REFUTED].meaning, TEXTS[Verdict.REFUTED].next)


def test_the_engine_has_a_text_for_every_verdict() -> None:
    assert set(TEXTS) == set(Verdict)
    assert set(Speed) == {"spread", "cause-not-reproduced", "fix-like-off", "fix-like-cause", "faster", "between"}


def test_other_thresholds_are_used_and_written() -> None:
    timed = cells(seconds(4, 4.4), seconds(1.8, 1.9), seconds(1.9, 1.9))
    own = limits(spread_max=0.15, band="0.15", speedup_max=0.7, refute_min=0.9)
    assert read(timed, good_checks())["speed"] == "spread"
    reading = read(timed, good_checks(), own)
    assert reading["verdict"] == "CONFIRMED"
    assert reading["thresholds"]["band"] == 0.15


def test_three_reps_are_read_where_three_are_registered() -> None:
    timed = cells(seconds(91, 91.1, 91.2), seconds(69, 69.1, 69.2), seconds(69, 69.1, 69.2))
    assert read(timed, good_checks(), limits(reps=3))["verdict"] == "CONFIRMED"
    assert "row 3: its rep of off-524 is no whole number from 1 to 2" in raised(timed, good_checks())


def test_evidence_is_not_changed_by_reading_it() -> None:
    timed, checks = copy.deepcopy(CONFIRMING), good_checks()
    read(timed, checks)
    assert timed == CONFIRMING
    assert checks == good_checks()


def test_the_reading_survives_json() -> None:
    reading = read(CONFIRMING, json.loads(json.dumps(good_checks())))
    assert json.loads(canonical(reading)) == reading == read(CONFIRMING, good_checks())


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=30)
def test_the_order_of_rows_and_entries_changes_no_byte(chance: Any) -> None:
    timed, checks = copy.deepcopy(CONFIRMING), good_checks()
    chance.shuffle(timed)
    for rows in checks.values():
        assert rows is not None
        for row in rows:
            if "top" in row:
                chance.shuffle(row["top"])
        chance.shuffle(rows)
    assert canonical(read(timed, checks)) == canonical(read(CONFIRMING, good_checks()))


# A second implementation of the rule: integers alone, each condition multiplied out.


def second_reading(off: Sequence[int], cause: Sequence[int], fix: Sequence[int], safe: bool | None) -> str:
    twice_off, twice_cause = sum(off), sum(cause)
    for low, high in (sorted(off), sorted(cause), sorted(fix)):
        if 200 * (high - low) > 3 * (low + high):
            return "UNSAFE" if safe is False else "AMBIGUOUS"
    cause_fast = 10 * max(cause) <= 4 * twice_off
    fix_slow = 40 * min(fix) >= 19 * twice_off
    fix_fast = 10 * max(fix) <= 4 * twice_off
    fix_near = 40 * min(fix) >= 19 * twice_cause and 40 * max(fix) <= 21 * twice_cause
    table = {
        (False, None): "CAUSE_NOT_REPRODUCED",
        (True, "slow"): "REFUTED",
        (True, "near"): "CONFIRMED" if safe else "AMBIGUOUS",
        (True, "else"): "AMBIGUOUS",
    }
    place = "slow" if fix_slow else "near" if fix_near and fix_fast else "else"
    return "UNSAFE" if safe is False else table[(cause_fast, place if cause_fast else None)]


@st.composite
def times(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Reps on, or a nanosecond beside, every limit of the rule; or anywhere near it."""
    off = draw(st.integers(1, 2_000_000)) * 80_000

    def pair(middle: int) -> list[int]:
        half = draw(st.sampled_from([0, 0, middle * 15 // 1000, draw(st.integers(0, middle // 50))]))
        nudge = st.sampled_from([-1, 0, 0, 0, 1])
        return [max(1, middle - half + draw(nudge)), max(1, middle + half + draw(nudge))]

    cause = off * draw(st.sampled_from([70, 80, 78, 81, draw(st.integers(50, 100))])) // 100
    against = draw(st.sampled_from([(off, 80), (off, 95), (off, 100), (cause, 100), (cause, 105), (cause, 95)]))
    return pair(off), pair(cause), pair(against[0] * against[1] // 100)


@given(times(), st.sampled_from([True, False, None]))
@settings(deadline=None, max_examples=400)
def test_a_second_implementation_gives_the_same_verdict(
    reps: tuple[list[int], list[int], list[int]], safe: bool | None
) -> None:
    checks = NOT_RUN if safe is None else good_checks() if safe else good_checks(b=0.06)
    assert verdict(cells(*reps), checks)[0] == second_reading(*reps, safe)


def test_the_reading_imports_nothing_that_has_a_clock_a_disk_or_a_host() -> None:
    forbidden = {"os", "pathlib", "subprocess", "socket", "time", "random", "asyncio"}
    for source in sorted(Path(fairtrial.reading.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                assert forbidden.isdisjoint(alias.name.partition(".")[0] for alias in node.names), source.name
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in forbidden, source.name
