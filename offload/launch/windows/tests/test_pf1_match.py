"""PF1's match: its pure reading, held against a second one written from the registered page; its check driver."""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import math
import os
import signal
import socket
import stat
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction as F
from pathlib import Path
from typing import Any

import pytest
from faulty import faulty
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_reference_server import serving

from fairtrial.canonical import canonical
from fairtrial.errors import EvidenceError
from fairtrial.ledger import read as read_ledger
from offload.launch.windows.pf1_window import MATCH_THRESHOLDS, match_reading
from offload.prefill_cause2.match_requests import main
from offload.up2_checks import numerical

Rows = list[dict[str, Any]]
Checks = dict[str, Rows | None]
OFF, CAUSE, FIX = "off-524", "cause-524", "fix-524"
SECOND = 1_000_000_000
ROOT = Path(__file__).parents[4]

# ---- the pure reading


def cells(off: Sequence[int], cause: Sequence[int], fix: Sequence[int]) -> Rows:
    arms = ((OFF, off), (CAUSE, cause), (FIX, fix))
    return [
        {"arm": arm, "cell": "150k", "rep": rep, "ttft_ns": ns} for arm, reps in arms for rep, ns in enumerate(reps, 1)
    ]


def seconds(off: Sequence[float], cause: Sequence[float], fix: Sequence[float]) -> Rows:
    return cells(*([round(value * 1000) * 1_000_000 for value in arm] for arm in (off, cause, fix)))


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def logit(slot: str, shift: float = 0.0) -> dict[str, Any]:
    """Six throws of a die and fourteen tokens that share 0.002; ``shift`` moves mass from one throw to another."""
    masses = [0.998 / 6 - shift, 0.998 / 6 + shift, *[0.998 / 6] * 4, *[0.002 / 14] * 14]
    top = [[100 + token, round(math.log(mass), 6)] for token, mass in enumerate(masses)]
    row = {"kind": "logit", "slot": slot, "prompt_sha256": sha("probe"), "prompt_tokens": 8192, "cached_tokens": 0}
    return row | {"top": top}


def arm_checks(*probes: dict[str, Any]) -> Rows:
    greedy: Rows = [
        {"kind": "greedy", "prompt": f"{number}", "sha256": sha(f"answer {number}"), "completion_tokens": 300}
        for number in range(1, 7)
    ]
    return [{"kind": "identity", "model": "m", "fingerprint": None}, *greedy, *probes]


def checks(shift: float = 0.001, answer: str | None = None) -> Checks:
    found = {OFF: arm_checks(logit("a"), logit("aa", 0.0005)), FIX: arm_checks(logit("b", shift))}
    if answer is not None:
        found[FIX][2]["sha256"] = sha(answer)
    return dict(found)


CONFIRMING = seconds((91, 91.2), (69.2, 69.4), (69.5, 69.7))
REFUTING = seconds((91, 91.2), (69.2, 69.4), (90.9, 91.1))
SEED_TABLE = {
    "CONFIRMED": (
        "the event records in the MoE half are the effective difference (item 1 D1); "
        "the switch removes the 524,288 gap",
        "K1-PROMOTE memory/promotion rows at 524,288 with the switch; 300K points; then narrow the 25 sites",
    ),
    "REFUTED": (
        "the records alone do not do it; the trace runtime's host work (D2-D5) does",
        "fix candidate 2: the host-side part (bookkeeping pace / allocator read) as its own switch",
    ),
    "CAUSE_NOT_REPRODUCED": (
        "CW's fast 524,288 was state, not code",
        "the alternating off/cause arm series (state dependence)",
    ),
    "UNSAFE": ("the switch changed outputs: never adopt", "diagnose; no promotion"),
    "AMBIGUOUS": ("no decision", "repeat or redesign"),
}


@pytest.mark.parametrize(
    ("timed", "checked", "verdict", "speed"),
    [
        (CONFIRMING, checks(), "CONFIRMED", "fix-like-cause"),
        (REFUTING, checks(), "REFUTED", "fix-like-off"),
        (REFUTING, {OFF: None, FIX: None}, "REFUTED", "fix-like-off"),
        (seconds((91, 91), (72, 73), (69, 69)), checks(), "CAUSE_NOT_REPRODUCED", "cause-not-reproduced"),
        (seconds((91, 91), (91, 91), (91, 91)), {}, "CAUSE_NOT_REPRODUCED", "cause-not-reproduced"),
        (CONFIRMING, checks(answer="another"), "UNSAFE", "fix-like-cause"),
        (CONFIRMING, checks(shift=0.1), "UNSAFE", "fix-like-cause"),
        (REFUTING, checks(shift=0.1), "UNSAFE", "fix-like-off"),
        (seconds((91, 94), (69, 69), (69, 69)), checks(), "AMBIGUOUS", "spread"),
        (seconds((91, 91), (69, 69), (80, 80)), checks(), "AMBIGUOUS", "between"),
        (seconds((91, 91), (69, 69), (65, 65)), checks(), "AMBIGUOUS", "faster"),
        (CONFIRMING, {OFF: checks()[OFF], FIX: None}, "AMBIGUOUS", "fix-like-cause"),
    ],
)
def test_every_verdict_is_read_with_the_seeds_own_words(timed: Rows, checked: Checks, verdict: str, speed: str) -> None:
    reading = match_reading(timed, checked)
    assert (reading["verdict"], reading["speed"]) == (verdict, speed)
    assert (reading["meaning"], reading["next"]) == SEED_TABLE[verdict]


def test_the_reading_has_the_registered_keys_and_survives_json() -> None:
    timed, checked = copy.deepcopy(CONFIRMING), checks()
    reading: dict[str, Any] = match_reading(timed, checked)
    assert (timed, checked) == (CONFIRMING, checks())
    assert list(reading) == [
        *("verdict", "speed", "safety", "ttft_s", "median_s", "spread", "thresholds", "meaning", "next", "reasons"),
    ]
    assert set(reading["ttft_s"]) == set(reading["median_s"]) == set(reading["spread"]) == {OFF, CAUSE, FIX}
    assert reading["ttft_s"][OFF] == [91.0, 91.2]
    assert reading["safety"]["greedy"] == {"same": 6, "of": 6}
    assert {"kl_fix", "kl_floor", "limit", "common_mass", "pass"} <= set(reading["safety"]["logit"])
    assert json.loads(canonical(reading)) == reading


def test_the_limits_are_the_registered_ones_and_cannot_be_changed_in_place() -> None:
    assert MATCH_THRESHOLDS == {
        "spread_max": 0.03,
        "speedup_max": 0.8,
        "band": 0.05,
        "refute_min": 0.95,
        "greedy_total": 6,
        "kl_min": 0.005,
        "kl_floor_multiple": 2,
        "mass_min": 0.99,
        "top_n": 20,
        "probe_tokens": 8192,
        "reps": 2,
    }
    with pytest.raises(TypeError):
        MATCH_THRESHOLDS["band"] = 1
    assert match_reading(CONFIRMING, checks())["thresholds"] == MATCH_THRESHOLDS
    slow_fix = seconds((91, 91), (69, 69), (72.6, 72.6))
    assert match_reading(slow_fix, checks(), MATCH_THRESHOLDS)["verdict"] == "AMBIGUOUS"
    assert match_reading(slow_fix, checks(), {**MATCH_THRESHOLDS, "band": 0.06})["verdict"] == "CONFIRMED"
    with pytest.raises(ValueError, match="missing: reps"):
        match_reading(CONFIRMING, checks(), {key: value for key, value in MATCH_THRESHOLDS.items() if key != "reps"})


def test_numerical_is_the_logit_part_of_the_reading() -> None:
    for shift in (0.0, 0.001, 0.03, 0.1):
        checked = checks(shift)
        off, fix = checked[OFF], checked[FIX]
        assert off is not None
        assert fix is not None
        reading: dict[str, Any] = match_reading(CONFIRMING, checked)
        assert numerical(off[7], off[8], fix[7]) == reading["safety"]["logit"]
    with pytest.raises(EvidenceError, match="probe b: its cached_tokens is not 0"):
        numerical(logit("a"), logit("aa"), logit("b") | {"cached_tokens": 64})


Damage = Callable[[Rows, Checks], object]


def rows_of(checked: Checks, arm: str) -> Rows:
    rows = checked[arm]
    assert rows is not None
    return rows


def damage(arm: str, number: int, **values: object) -> Damage:
    return lambda _, checked: rows_of(checked, arm)[number].update(values)


DAMAGES: dict[str, Damage] = {
    "a rep of off dropped": lambda timed, _: timed.pop(0),
    "a rep of fix dropped": lambda timed, _: timed.pop(),
    "an arm absent": lambda timed, _: timed.__delitem__(slice(2, 4)),
    "a rep too many": lambda timed, _: timed.append(timed[0] | {"rep": 3}),
    "a rep twice": lambda timed, _: timed.append(dict(timed[0])),
    "a rep that is no number": lambda timed, _: timed[0].update(rep=True),
    "another arm": lambda timed, _: timed.append(timed[0] | {"arm": "off-327"}),
    **{
        f"a TTFT of {value!r}": lambda timed, _, value=value: timed[0].update(ttft_ns=value)
        for value in (math.nan, math.inf, 0, -1, True, "91", 91e9, None)
    },
    "no identity row": lambda _, checked: rows_of(checked, OFF).pop(0),
    "two identity rows": lambda _, checked: rows_of(checked, FIX).append({"kind": "identity"}),
    "five greedy rows": lambda _, checked: rows_of(checked, FIX).pop(1),
    "seven greedy rows": lambda _, checked: rows_of(checked, OFF).append(rows_of(checked, OFF)[1] | {"prompt": "7"}),
    "a prompt id twice": damage(OFF, 1, prompt="2"),
    "other prompt ids": damage(FIX, 1, prompt="9"),
    "two empty answers": lambda _, checked: [rows_of(checked, arm)[1].update(sha256=sha("")) for arm in (OFF, FIX)],
    "no slot aa": lambda _, checked: rows_of(checked, OFF).pop(),
    "slot a twice": damage(OFF, 8, slot="a"),
    "slot b on off": damage(OFF, 8, slot="b"),
    "slot a on fix": damage(FIX, 7, slot="a"),
    "an unknown kind": damage(FIX, 0, kind="note"),
    "a probe not cold": damage(FIX, 7, cached_tokens=1),
    "a probe not said to be cold": damage(OFF, 7, cached_tokens=None),
    "a probe of another length": damage(OFF, 8, prompt_tokens=8191),
    "a probe of another prompt": damage(FIX, 7, prompt_sha256=sha("another probe")),
    "nineteen entries": damage(OFF, 7, top=logit("a")["top"][:19]),
    "a token id twice": damage(OFF, 7, top=[*logit("a")["top"][:19], [100, -9.0]]),
    **{
        f"a logprob of {value!r}": damage(FIX, 7, top=[*logit("b")["top"][:19], [119, value]])
        for value in (None, math.nan, 0.5)
    },
    "a top of more than all": damage(FIX, 7, top=[[token, math.log(0.0501)] for token in range(20)]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_unpaired_or_incomplete_evidence_gives_no_verdict(name: str) -> None:
    timed, checked = copy.deepcopy(CONFIRMING), checks()
    DAMAGES[name](timed, checked)
    with pytest.raises(EvidenceError, match="no verdict by rule match"):
        match_reading(timed, checked)


def test_what_gives_no_verdict_still_tells_a_safety_failure() -> None:
    with pytest.raises(EvidenceError, match=r"(?s)1 whole reps.*safety failure.*greedy answers the same: 5 of 6"):
        match_reading(CONFIRMING[1:], checks(answer="another"))


# ---- a second reading, written from the registered page alone: rationals for times, floats for the floor


class NoVerdict(Exception):
    """The page says: raise."""


class Close(Exception):
    """A float is too near to a limit to judge it."""


def exceeds(value: float, limit: float) -> bool:
    if abs(value - limit) < 1e-9:
        raise Close
    return value > limit


def second_times(timed: Rows) -> dict[str, list[F]]:
    found: dict[tuple[str, int], F] = {}
    for row in timed:
        if row["cell"] != "150k":
            continue
        if type(row["rep"]) is not int or type(row["ttft_ns"]) is not int or row["ttft_ns"] <= 0:
            raise NoVerdict
        if (row["arm"], row["rep"]) in found:
            raise NoVerdict
        found[row["arm"], row["rep"]] = F(row["ttft_ns"], SECOND)
    if set(found) != {(arm, rep) for arm in (OFF, CAUSE, FIX) for rep in (1, 2)}:
        raise NoVerdict
    return {arm: [found[arm, 1], found[arm, 2]] for arm in (OFF, CAUSE, FIX)}


def second_speed(times: dict[str, list[F]]) -> str:
    middle = {arm: (one + two) / 2 for arm, (one, two) in times.items()}
    off, cause, fix = middle[OFF], middle[CAUSE], times[FIX]
    if any(abs(one - two) / middle[arm] > F("0.03") for arm, (one, two) in times.items()):
        return "spread"
    if any(rep > F("0.8") * off for rep in times[CAUSE]):
        return "cause-not-reproduced"
    if all(rep >= F("0.95") * off for rep in fix):
        return "fix-like-off"
    if all(abs(rep - cause) <= F("0.05") * cause and rep <= F("0.8") * off for rep in fix):
        return "fix-like-cause"
    return "faster" if any(rep < F("0.95") * cause for rep in fix) else "between"


def second_top(entries: list[list[Any]]) -> dict[int, float]:
    if len(entries) < 20 or len({token for token, _ in entries}) < len(entries):
        raise NoVerdict
    if any(logprob is None or math.isnan(logprob) or logprob > 0.001 for _, logprob in entries):
        raise NoVerdict
    masses = {token: math.exp(min(logprob, 0)) if logprob > -9999 else 0.0 for token, logprob in entries}
    kept = sorted(masses, key=lambda token: -masses[token])[:20]
    if exceeds(math.fsum(masses[token] for token in kept), 1.001):
        raise NoVerdict
    return {token: masses[token] for token in kept if masses[token] > 0}


def second_kl(p: dict[int, float], q: dict[int, float]) -> tuple[float, float]:
    common = sorted(set(p) & set(q))
    p_sum, q_sum = (math.fsum(one[token] for token in common) for one in (p, q))
    p_cells, q_cells = ([one[token] / max(1, total) for token in common] for one, total in ((p, p_sum), (q, q_sum)))
    kl = math.fsum(x * math.log(x / y) for x, y in zip(p_cells, q_cells, strict=True))
    if p_sum < 1:
        kl += (1 - p_sum) * math.log((1 - p_sum) / max(1 - q_sum, 1e-12))
    return kl, min(p_sum, q_sum, 1)


def second_arm(rows: Rows, slots: set[str]) -> tuple[dict[str, tuple[str, int]], dict[str, dict[int, float]], set[str]]:
    kinds = Counter(row["kind"] for row in rows)
    greedy = {row["prompt"]: (row["sha256"], row["completion_tokens"]) for row in rows if row["kind"] == "greedy"}
    probes = {row["slot"]: row for row in rows if row["kind"] == "logit"}
    due = {"identity": 1, "greedy": 6, "logit": len(slots)}
    if kinds != due or len(greedy) != 6 or set(probes) != slots:
        raise NoVerdict
    if any(row["cached_tokens"] != 0 or row["prompt_tokens"] != 8192 for row in probes.values()):
        raise NoVerdict
    tops = {slot: second_top(row["top"]) for slot, row in probes.items()}
    return greedy, tops, {row["prompt_sha256"] for row in probes.values()}


def second_safety(checked: Checks) -> dict[str, Any] | None:
    arms = {
        arm: second_arm(rows, slots)
        for arm, slots in ((OFF, {"a", "aa"}), (FIX, {"b"}))
        if (rows := checked.get(arm)) is not None
    }
    if len(set().union(*(prompts for _, _, prompts in arms.values()))) > 1:
        raise NoVerdict
    if len(arms) < 2:
        return None
    (off, tops, _), (fix, fix_tops, _) = arms[OFF], arms[FIX]
    empty = [prompt for prompt in off if off[prompt][0] == sha("") and fix.get(prompt, ("",))[0] == sha("")]
    if set(off) != set(fix) or empty:
        raise NoVerdict
    same = sum(off[prompt] == fix[prompt] for prompt in off)
    kl_fix, mass = second_kl(tops["a"], fix_tops["b"])
    kl_floor, floor_mass = second_kl(tops["a"], tops["aa"])
    limit = 0.005 if exceeds(0.99, floor_mass) else max(0.005, 2 * kl_floor)
    passes = not exceeds(kl_fix, limit) and not exceeds(0.99, mass)
    return {"same": same, "kl": [kl_fix, kl_floor, limit, mass], "pass": same == 6 and passes}


def second_verdict(speed: str, safety: dict[str, Any] | None) -> str:
    if safety and not safety["pass"]:
        return "UNSAFE"
    confirmed = "CONFIRMED" if safety else "AMBIGUOUS"
    told = {"cause-not-reproduced": "CAUSE_NOT_REPRODUCED", "fix-like-off": "REFUTED", "fix-like-cause": confirmed}
    return told.get(speed, "AMBIGUOUS")


@st.composite
def some_times(draw: st.DrawFn) -> Rows:
    """Reps on a limit of the rule, a nanosecond beside it, or somewhere near."""
    off = draw(st.integers(1, 2_400_000)) * 40_000

    def reps(middle: int) -> list[int]:
        half = draw(st.sampled_from([0, 0, 0, middle // 100, middle * 3 // 200]))
        return [max(1, middle + sign * half + draw(st.sampled_from([-1, 0, 0, 1]))) for sign in (-1, 1)]

    cause = off * draw(st.sampled_from([60, 75, 76, 78, 80, 81])) // 100
    base, hundredths = draw(
        st.sampled_from(
            [(off, 80), (off, 95), (off, 96), (off, 88), (cause, 95), (cause, 100), (cause, 105), (cause, 90)]
        )
    )
    timed = cells(reps(off), reps(cause), reps(base * hundredths // 100))
    return [*timed, {"arm": OFF, "cell": "32k", "rep": 1, "ttft_ns": 0}]


@st.composite
def some_checks(draw: st.DrawFn) -> Checks:
    """Checks of both arms, tops as odd as servers give them; or of one arm, or of none."""
    count = draw(st.integers(20, 23))
    weights = draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count, unique=True))
    mass = draw(st.sampled_from([*[0.9985] * 5, 0.9, 0.992, 1.0, 1.0005]))
    moved = draw(st.sampled_from([0.0, 1e-4, 0.02, 0.08, 0.3]))

    def seldom() -> bool:
        return draw(st.integers(0, 11)) == 11

    def top() -> list[list[Any]]:
        signs = draw(st.lists(st.sampled_from([-1, 0, 1]), min_size=count, max_size=count))
        shifted = [weight * math.exp(moved * sign) for weight, sign in zip(weights, signs, strict=True)]
        entries = [[token, round(math.log(mass * one / sum(shifted)), 6)] for token, one in enumerate(shifted)]
        if seldom():
            entries[0][0] = draw(st.sampled_from([500, 501]))
        if seldom():
            entries[1][1] = draw(st.sampled_from([-9999.0, -1e9, -math.inf, 0.0009]))
        masses = sorted((logprob for _, logprob in entries), reverse=True)
        assume(count == 20 or masses[19] != masses[20])
        return draw(st.permutations(entries))

    found = {
        OFF: arm_checks(logit("a") | {"top": top()}, logit("aa") | {"top": top()}),
        FIX: arm_checks(logit("b") | {"top": top()}),
    }
    if seldom():
        found[FIX][draw(st.integers(1, 6))]["sha256"] = sha(draw(st.sampled_from(["", "x"])))
    if seldom():
        found[FIX][draw(st.integers(1, 6))]["completion_tokens"] = 299
    return {arm: None if seldom() else rows for arm, rows in found.items()}


@given(some_times(), some_checks(), st.one_of(*[st.none()] * 4, st.sampled_from(list(DAMAGES.values()))), st.randoms())
@settings(deadline=None, max_examples=400)
def test_a_second_reading_from_the_page_alone_says_the_same(
    timed: Rows, checked: Checks, harm: Damage | None, chance: Any
) -> None:
    if harm is not None:
        with contextlib.suppress(AssertionError):
            harm(timed, checked)
    chance.shuffle(timed)
    try:
        times, safety = second_times(timed), second_safety(checked)
    except Close:
        assume(False)
    except NoVerdict:
        with pytest.raises(EvidenceError):
            match_reading(timed, checked)
        return
    speed = second_speed(times)
    reading: dict[str, Any] = match_reading(timed, checked)
    assert (reading["speed"], reading["verdict"]) == (speed, second_verdict(speed, safety))
    for arm, (one, two) in times.items():
        assert reading["ttft_s"][arm] == pytest.approx([float(one), float(two)], rel=1e-11)
        assert reading["median_s"][arm] == pytest.approx(float(one + two) / 2, rel=1e-11)
        assert reading["spread"][arm] == pytest.approx(float(2 * abs(one - two) / (one + two)), rel=1e-11)
    if safety is None:
        assert reading["safety"] is None
    else:
        logits = reading["safety"]["logit"]
        got = [logits[name] for name in ("kl_fix", "kl_floor", "limit", "common_mass")]
        assert got == pytest.approx(safety["kl"], rel=1e-9, abs=1e-11)
        assert (reading["safety"]["greedy"]["same"], reading["safety"]["pass"]) == (safety["same"], safety["pass"])


def naive_speed(times: dict[str, list[float]]) -> str:
    """The same rule as one would write it in seconds and floats."""
    off, cause = statistics.median(times[OFF]), statistics.median(times[CAUSE])
    if any((max(reps) - min(reps)) / statistics.median(reps) > 0.03 for reps in times.values()):
        return "spread"
    if any(rep > 0.80 * off for rep in times[CAUSE]):
        return "cause-not-reproduced"
    if all(rep >= 0.95 * off for rep in times[FIX]):
        return "fix-like-off"
    if all((1 - 0.05) * cause <= rep <= (1 + 0.05) * cause and rep <= 0.80 * off for rep in times[FIX]):
        return "fix-like-cause"
    return "faster" if any(rep < (1 - 0.05) * cause for rep in times[FIX]) else "between"


def floats(timed: Rows, digits: int | None = None) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for row in timed:
        ttft_s = row["ttft_ns"] / 1e9
        times.setdefault(row["arm"], []).append(ttft_s if digits is None else round(ttft_s, digits))
    return times


@pytest.mark.parametrize(
    ("timed", "exact", "naive"),
    [
        pytest.param(
            cells([94_829_000_000] * 2, [75_863_200_000] * 2, [75_863_200_000] * 2),
            *("CONFIRMED", "CAUSE_NOT_REPRODUCED"),
            id="cause is 0.80 of off",
        ),
        pytest.param(
            cells([94_829_000_000] * 2, [73_000_000_000] * 2, [75_863_200_000] * 2),
            *("CONFIRMED", "AMBIGUOUS"),
            id="fix is 0.80 of off",
        ),
        pytest.param(
            cells([92_653_000_000] * 2, [70_000_000_000] * 2, [88_020_350_000] * 2),
            *("REFUTED", "AMBIGUOUS"),
            id="fix is 0.95 of off",
        ),
        pytest.param(
            cells([95_000_000_000] * 2, [70_109_000_000] * 2, [73_614_450_000] * 2),
            *("CONFIRMED", "AMBIGUOUS"),
            id="fix is 1.05 of cause",
        ),
        pytest.param(
            cells([95_000_000_000] * 2, [70_290_000_000] * 2, [66_775_500_000] * 2),
            *("CONFIRMED", "AMBIGUOUS"),
            id="fix is 0.95 of cause",
        ),
        pytest.param(
            cells([94_124_630_000, 96_991_370_000], [70_000_000_000] * 2, [70_000_000_000] * 2),
            *("CONFIRMED", "AMBIGUOUS"),
            id="off spreads 3 %",
        ),
    ],
)
def test_on_a_limit_the_reading_is_right_where_floats_are_wrong(timed: Rows, exact: str, naive: str) -> None:
    passing = {"pass": True}
    assert second_verdict(naive_speed(floats(timed)), passing) == naive
    assert second_verdict(second_speed(second_times(timed)), passing) == exact
    assert match_reading(timed, checks())["verdict"] == exact


def test_over_a_limit_by_a_nanosecond_the_reading_is_right_where_milliseconds_are_wrong() -> None:
    timed = cells([94_825_000_000] * 2, [75_860_000_000, 75_860_000_001], [75_000_000_000] * 2)
    assert second_verdict(naive_speed(floats(timed, digits=3)), {"pass": True}) == "CONFIRMED"
    assert second_speed(second_times(timed)) == "cause-not-reproduced"
    assert match_reading(timed, checks())["verdict"] == "CAUSE_NOT_REPRODUCED"


# ---- the check driver

WORD = "velvetharbour"
PROMPTS = "".join(f"{WORD} {number}: count on\n" for number in range(1, 7))
PROBE = f"{WORD} " + "3,1,6,2," * 1024
PROBE = PROBE[: 8192 - 1] + ","


class Site:
    """A folder with the site's pinned files, and a driver that is run in it."""

    def __init__(self, folder: Path, port: int, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.out = folder / "rows.jsonl"
        self.ledger = folder / "rows.jsonl.ledger.jsonl"
        self.port = port
        self._capsys = capsys
        (folder / "prompts.txt").write_text(PROMPTS)
        (folder / "probe.txt").write_text(PROBE)

    def argv(self, **changes: object) -> list[str]:
        flags: dict[str, object] = {
            "base_url": f"http://127.0.0.1:{self.port}",
            "model": "m",
            "prompts": self.folder / "prompts.txt",
            "probe": self.folder / "probe.txt",
            "slots": "a,aa",
            "out": self.out,
        }
        given = flags | changes
        words = [(f"--{name.replace('_', '-')}", value) for name, value in given.items()]
        return [f"{word}" for flag, value in words for word in ((flag,) if value is True else (flag, value))]

    def ask(self, **changes: object) -> tuple[int, str, str]:
        """Return exit status, standard output and standard error."""
        self._capsys.readouterr()
        try:
            status = main(self.argv(**changes))
        except SystemExit as end:
            status = int(f"{end.code}")
        said = self._capsys.readouterr()
        assert "Traceback" not in said.err
        return status, said.out, said.err

    def rows(self) -> Rows:
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def records(self) -> Rows:
        return read_ledger(self.ledger.read_bytes())

    def texts(self) -> str:
        """All that the driver left, beside the site's own files."""
        own = {"prompts.txt", "probe.txt"}
        return "".join(path.read_text() for path in self.folder.iterdir() if path.is_file() and path.name not in own)


class Recording(faulty.Handler):
    """The scripted server's handler, which keeps what it was asked."""

    def complete(self, asked: dict[str, Any]) -> None:
        BODIES.append(asked)
        super().complete(asked)


BODIES: list[dict[str, Any]] = []


@contextlib.contextmanager
def scripted(fault: str = "") -> Iterator[int]:
    given = argparse.Namespace(host="127.0.0.1", port=0, max_model_len=16384, fault=fault, overlay=[])
    server = faulty.Server(given)
    server.RequestHandlerClass = Recording
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    BODIES.clear()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Site]:
    with scripted() as port:
        yield Site(tmp_path, port, capsys)


def test_the_checks_of_both_arms_are_asked_of_a_real_server_and_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sites = []
    with serving("--max-model-len", "8704") as server:
        for slots in ("a,aa", "b"):
            (tmp_path / slots).mkdir()
            sites.append(Site(tmp_path / slots, server.port, capsys))
            argv = [sys.executable, "-m", "offload.prefill_cause2.match_requests"]
            argv += sites[-1].argv(model="reference", slots=slots)
            environ = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300)
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout == f"{sites[-1].out}: {9 if slots == 'a,aa' else 8} rows, SHA-256 " + (
                hashlib.sha256(sites[-1].out.read_bytes()).hexdigest() + "\n"
            )
        again = Site(tmp_path, server.port, capsys)
        status, _, said = again.ask(model="reference", slots="b")
        assert (status, again.out.exists()) == (3, False)
        assert "probe/b: not cold: the server had 8128 of its prompt tokens" in said
    off, fix = sites
    assert [row["kind"] for row in off.rows()] == ["identity", *["greedy"] * 6, "logit", "logit"]
    assert off.rows()[0]["model"] == "reference"
    assert off.rows()[0]["fingerprint"].startswith("fairtrial-")
    assert {row["completion_tokens"] for row in off.rows()[1:7]} == {300}
    assert {row["prompt_sha256"] for row in (*off.rows()[7:], *fix.rows()[7:])} == {sha(PROBE)}
    reading: dict[str, Any] = match_reading(CONFIRMING, {OFF: off.rows(), FIX: fix.rows()})
    assert reading["safety"]["greedy"] == {"same": 6, "of": 6}
    assert reading["safety"]["logit"]["kl_fix"] == reading["safety"]["logit"]["kl_floor"] == 0
    for one in sites:
        assert WORD not in one.texts()
        assert {stat.S_IMODE(path.stat().st_mode) for path in (one.out, one.ledger)} == {0o600}


def test_every_arm_is_asked_the_same_greedy_bodies_and_each_probe_has_its_own_salt(site: Site) -> None:
    assert site.ask()[0] == 0
    off = copy.deepcopy(BODIES)
    BODIES.clear()
    assert site.ask(slots="b", out=site.folder / "fix.jsonl")[0] == 0
    fix = copy.deepcopy(BODIES)
    assert off[:7] == fix[:7]
    assert [body["prompt"] for body in off[1:7]] == PROMPTS.splitlines()
    assert {(body["temperature"], body["max_tokens"], body["stream"]) for body in off[1:7]} == {(0, 300, True)}
    probes = [*off[7:], *fix[7:]]
    assert [(body["prompt"], body["max_tokens"], body["logprobs"]) for body in probes] == [(PROBE, 1, 20)] * 3
    assert all(body["return_tokens_as_token_ids"] and body["temperature"] == 0 for body in probes)
    assert len({body["cache_salt"] for body in (*off, *fix)}) == 7 + 3
    BODIES.clear()
    assert site.ask(out=site.folder / "other.jsonl", seed="another")[0] == 0
    assert {body["cache_salt"] for body in BODIES}.isdisjoint(body["cache_salt"] for body in off)


def test_the_ledger_tells_what_was_asked_before_and_what_came_after_in_hashes_and_numbers(site: Site) -> None:
    assert site.ask()[0] == 0
    records = site.records()
    assert [record["kind"] for record in records] == ["begin", *["request", "response"] * 9, "rows"]
    assert records[-1]["sha256"] == hashlib.sha256(site.out.read_bytes()).hexdigest()
    assert records[0]["probe_sha256"] == sha(PROBE)
    assert records[4]["answer_sha256"] == site.rows()[1]["sha256"]
    assert [record["body_sha256"] for record in records[1:-1:2]] == [
        hashlib.sha256(canonical(body)).hexdigest() for body in BODIES
    ]
    assert not any(word in site.texts() for word in (WORD, faulty.ANSWER_WORD, "Dice", "3,1,6"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("cached", "probe/a: not cold: the server had 8192 of its prompt tokens in its prefix cache: start the server"),
        ("silent-cache", "probe/a: the server says nothing of cached tokens, so the probe is not proved cold"),
        ("counts", "probe/a: the server counts 8193 prompt tokens in the probe, 8192 are due"),
        ("few-logprobs", "probe/a: the server gave 5 first-token logprobs by token id, 20 are needed"),
        ("text-logprobs", "probe/a: logprobs are keyed by text"),
        ("no-generation", "identity: HTTP status 500: the server sent an error object (type ServerError)"),
        ("error-body", "greedy/1: HTTP status 400: the server sent an error object (type BadRequestError, code 400)"),
        ("error-event", "greedy/1: the server sent an error object"),
        ("cut", "greedy/1: the connection"),
        ("no-usage", "greedy/1: the stream ended without usage"),
        ("no-finish", "greedy/1: the stream ended without finish reason"),
        ("no-done", "greedy/1: the stream ended without [DONE]"),
        ("not-http", "greedy/1: what the server sent is not HTTP/1.1"),
        ("not-a-stream", "greedy/1: the answer is not an event stream"),
        ("endless", "greedy/1: no whole answer within 0.5 s"),
    ],
)
def test_a_fault_on_the_way_ends_with_status_3_no_rows_and_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, message: str
) -> None:
    with scripted(fault) as port:
        one = Site(tmp_path, port, capsys)
        status, _, said = one.ask(**({"limit_s": 0.5} if fault == "endless" else {}))
    assert status == 3
    assert said.startswith("match_requests: failed, no rows were written: ")
    assert message in said
    assert not one.out.exists()
    last = one.records()[-1]
    assert (last["kind"], last["reason"] in said) == ("failed", True)
    left = one.texts() + said
    assert not any(word in left for word in (WORD, faulty.ANSWER_WORD, faulty.ERROR_WORD))


def test_a_server_that_is_down_is_said(site: Site) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        status, _, said = site.ask(base_url=f"http://127.0.0.1:{held.getsockname()[1]}/")
    assert (status, site.out.exists()) == (3, False)
    assert "identity: no connection: Connection refused" in said


def test_more_tokens_than_were_asked_for_fail(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    told = faulty.Handler.usage
    monkeypatch.setattr(
        faulty.Handler,
        "usage",
        lambda self, asked, count: told(self, asked, count + (count == 300)),
    )
    status, _, said = site.ask()
    assert (status, site.out.exists()) == (3, False)
    assert "greedy/1: 301 tokens came, at most 300 were asked for" in said


@pytest.mark.parametrize(
    ("logprob", "message"),
    [(-math.inf, "a logprob is infinite"), (math.nan, "a logprob is NaN"), (0.5, "a logprob is over 0.001")],
)
def test_rows_that_the_reading_would_refuse_are_not_written(
    site: Site, monkeypatch: pytest.MonkeyPatch, logprob: float, message: str
) -> None:
    top = faulty.top("") | {"token_id:19": logprob}
    monkeypatch.setattr(faulty, "top", lambda fault: top)
    status, _, said = site.ask()
    assert (status, site.out.exists()) == (3, False)
    assert message in said


def test_a_file_that_cannot_be_written_in_the_end_is_said(site: Site) -> None:
    (site.folder / "rows.jsonl.partial").mkdir()
    status, _, said = site.ask()
    assert (status, site.out.exists()) == (3, False)
    assert "cannot be written (Is a directory)" in said


def test_an_interrupt_ends_it_with_status_3_and_no_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with scripted("slow") as port:
        one = Site(tmp_path, port, capsys)
        argv = [sys.executable, "-m", "offload.prefill_cause2.match_requests", *one.argv()]
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not (one.ledger.exists() and "greedy/1" in one.ledger.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, one.out.exists()) == (3, False)
    assert said == "match_requests: interrupted, no rows were written\n"
    assert (one.records()[-1]["kind"], one.records()[-1]["reason"]) == ("failed", "interrupted")


def written(name: str, content: bytes) -> Callable[[Path], dict[str, object]]:
    def write(folder: Path) -> dict[str, object]:
        (folder / name).write_bytes(content)
        return {}

    return write


def linked(folder: Path) -> dict[str, object]:
    (folder / "rows.jsonl").symlink_to(folder / "nowhere")
    return {}


REFUSALS: dict[str, tuple[Callable[[Path], dict[str, object]], str]] = {
    "no prompts": (lambda folder: {"prompts": folder / "none"}, "none: No such file or directory; name a file"),
    "a folder": (lambda folder: {"probe": folder}, "Is a directory; name a file that can be read"),
    "not text": (written("probe.txt", b"3,1,\xff"), "probe.txt: byte 4 is not UTF-8"),
    "empty probe": (written("probe.txt", b"\n"), "probe.txt: it is empty"),
    "five prompts": (written("prompts.txt", b"1\n2\n\n3\n4\n5\n"), "it holds 5 prompts, 6 are due"),
    "other prompts": (lambda _: {"prompts_sha256": "0" * 64}, f"its SHA-256 is {sha(PROMPTS)}, pinned is 000"),
    "another probe": (lambda _: {"probe_sha256": "0" * 64}, f"its SHA-256 is {sha(PROBE)}, pinned is 000"),
    "rows are there": (written("rows.jsonl", b"kept"), "rows.jsonl: there already, and rows are never overwritten"),
    "a link to nothing": (linked, "rows.jsonl: there already"),
    "a ledger is there": (written("rows.jsonl.ledger.jsonl", b""), "of an earlier attempt; keep it"),
    "no folder": (lambda folder: {"out": folder / "no" / "rows"}, "No such file or directory; name an --out"),
    "a partial": (lambda folder: {"out": folder / "rows.partial"}, "choose another name"),
    "a folder as out": (lambda folder: {"out": folder}, "there already"),
    "here as out": (lambda _: {"out": "."}, "there already"),
    "https": (lambda _: {"base_url": "https://127.0.0.1:1"}, "is not http://HOST:PORT"),
    "a path": (lambda _: {"base_url": "http://127.0.0.1:1/v1"}, "is not http://HOST:PORT"),
    "a password": (lambda _: {"base_url": "http://a:b@127.0.0.1:1"}, "is not http://HOST:PORT"),
    "no port": (lambda _: {"base_url": "http://127.0.0.1:99999"}, "is not http://HOST:PORT"),
    "no host": (lambda _: {"base_url": "http://["}, "is not http://HOST:PORT"),
    "slots": (lambda _: {"slots": "a"}, "argument --slots: invalid choice"),
    "a hash": (lambda _: {"probe_sha256": "abc"}, "is no SHA-256 (64 hex digits)"),
    "a limit": (lambda _: {"limit_s": "nan"}, "is no number of seconds above 0"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_asked_is_refused_before_anything_is_sent(site: Site, name: str) -> None:
    arrange, message = REFUSALS[name]
    changes = arrange(site.folder)
    before = {path.name: path.is_file() and path.read_bytes() for path in site.folder.iterdir()}
    status, out, said = site.ask(**changes)
    assert (status, out, BODIES) == (2, "", [])
    assert message in said
    assert {path.name: path.is_file() and path.read_bytes() for path in site.folder.iterdir()} == before


def test_pinned_files_and_blank_lines_and_capital_hashes_are_taken(site: Site) -> None:
    (site.folder / "prompts.txt").write_text("\n" + PROMPTS)
    pins = {"prompts_sha256": sha("\n" + PROMPTS).upper(), "probe_sha256": sha(PROBE)}
    assert site.ask(**pins)[0] == 0


def test_a_dry_run_says_all_of_it_and_opens_no_connection_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        one = Site(tmp_path, listener.getsockname()[1], capsys)
        status, out, said = one.ask(dry_run=True)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert (status, said) == (0, "")
    names = ["identity", *(f"greedy/{number}" for number in range(1, 7)), "probe/a", "probe/aa"]
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("identity", "greedy", "probe/"))] == names
    assert sha(PROMPTS) in out
    assert sha(PROBE) in out
    assert WORD not in out
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.txt", "probe.txt"}
    one.out.write_text("kept")
    assert one.ask(dry_run=True)[0] == 2
