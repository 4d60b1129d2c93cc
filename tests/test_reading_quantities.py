from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal, getcontext, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.errors import EvidenceError
from fairtrial.reading.quantities import captured, divergence, median, probability, rounded, spread

TIMES = st.lists(st.integers(1, 10**15), min_size=1, max_size=7)


@given(TIMES)
@settings(deadline=None)
def test_the_median_has_as_many_values_on_either_side(times: list[int]) -> None:
    middle = median(times)
    below, above = sum(t < middle for t in times), sum(t > middle for t in times)
    assert below == above or abs(below - above) < sum(t == middle for t in times)
    assert median(times[::-1]) == middle


def test_the_median_of_two_is_their_mean_and_of_three_the_middle_one() -> None:
    assert median([3, 4]) == Fraction(7, 2)
    assert median([9, 1, 4]) == 4
    assert median([5]) == 5


@given(st.integers(1, 10**15), st.integers(1, 10**15))
@settings(deadline=None)
def test_the_spread_of_two_is_twice_their_distance_over_their_sum(a: int, b: int) -> None:
    assert spread([a, b]) * (a + b) == 2 * abs(a - b)


def test_the_spread_of_one_rep_is_zero() -> None:
    assert spread([7]) == 0


def test_a_value_is_written_to_twelve_digits_half_to_even() -> None:
    assert rounded(Fraction(1, 3)) == 0.333333333333
    assert rounded(Decimal("1.000000000005")) == 1.0
    assert rounded(Decimal("1.000000000015")) == 1.00000000002
    assert rounded(Fraction(3, 10**20)) == 3e-20


@pytest.mark.parametrize("value", [None, True, "-0.5", float("nan"), Decimal("NaN"), Decimal("sNaN"), [0.5], 0.0010001])
def test_what_is_no_logprob_raises(value: object) -> None:
    with pytest.raises(EvidenceError, match="a logprob is"):
        probability(value)


@pytest.mark.parametrize("value", [float("inf"), Decimal("Infinity"), 1])
def test_a_logprob_over_a_thousandth_raises(value: object) -> None:
    with pytest.raises(EvidenceError, match="no probability is over 1"):
        probability(value)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, 0.001, Decimal("0.001"), 1e-9])
def test_a_logprob_of_zero_to_a_thousandth_is_a_probability_of_one(value: object) -> None:
    assert probability(value) == 1


@pytest.mark.parametrize("value", [-9999, -9999.0, -10000.5, float("-inf"), Decimal("-Infinity")])
def test_minus_9999_and_less_is_a_probability_of_zero(value: object) -> None:
    assert probability(value) == 0


def test_just_over_minus_9999_is_no_zero() -> None:
    assert probability(-9998.999) > 0


def test_a_logprob_counts_as_it_was_printed_not_as_its_binary_float() -> None:
    assert probability(-0.1) == probability(Decimal("-0.1")) != probability(Decimal.from_float(-0.1))
    assert probability(np.float64(-0.1)) == probability(-0.1)


def test_a_probability_has_fifty_digits_whatever_the_callers_context() -> None:
    expected = Decimal("0.36787944117144232159552377016146086744581113103177")
    assert probability(-1) == expected
    with localcontext() as context:
        context.prec = 3
        assert probability(-1) == expected
        few = divergence({1: Decimal("0.5")}, {1: Decimal("0.4")})
    assert few == divergence({1: Decimal("0.5")}, {1: Decimal("0.4")})
    assert getcontext().prec == 28


def top(probabilities: Mapping[int, float]) -> list[list[object]]:
    return [[token, math.log(p) if p else -9999.0] for token, p in probabilities.items()]


def test_more_than_n_entries_leave_the_n_likeliest() -> None:
    assert captured(top({1: 0.1, 2: 0.5, 3: 0.3}), 2).keys() == {2, 3}


def test_of_equal_logprobs_at_the_cut_the_smaller_token_id_stays_in_any_order() -> None:
    rows = [[7, -1.5], [3, -1.5], [5, -0.7]]
    assert captured(rows, 2).keys() == captured(rows[::-1], 2).keys() == {5, 3}


def test_a_probability_of_zero_fills_the_list_but_captures_nothing() -> None:
    assert captured(top({1: 0.9, 2: 0.0}), 2).keys() == {1}


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([[1, -0.5]], "1 entries, fewer than 2"),
        ([[1, -0.5], [1, -0.7]], "token id 1 stands twice"),
        ([[1, -0.5], [2, -2.0], [1, -9.0]], "token id 1 stands twice"),
        ([["token_id:1", -0.5], [2, -0.7]], "ask the server for token ids"),
        ([[True, -0.5], [2, -0.7]], "ask the server for token ids"),
        ([[-1, -0.5], [2, -0.7]], "ask the server for token ids"),
        ([[1, -0.5, 0], [2, -0.7]], "no pair"),
        (["ab", "cd"], "no pair"),
        ([1, 2], "no pair"),
        ("abc", "no list"),
        (None, "no list"),
        ({"1": -0.5}, "no list"),
        ([[1, -0.5], [2, None]], "not a number"),
        ([[1, -0.1], [2, -0.1]], "over 1.001"),
    ],
)
def test_a_malformed_top_raises(rows: object, why: str) -> None:
    with pytest.raises(EvidenceError, match=why):
        captured(rows, 2)


def test_the_sum_of_the_kept_may_reach_1_001_and_no_more() -> None:
    assert captured([[1, 0], [2, Decimal("-6.90775527898213705206")]], 2).keys() == {1, 2}
    with pytest.raises(EvidenceError, match=r"over 1\.001"):
        captured([[1, 0], [2, Decimal("-6.90775527898213705205")]], 2)


def test_an_entry_beyond_the_likeliest_does_not_count_in_the_sum() -> None:
    rows = [[1, math.log(0.6)], [2, math.log(0.4)], [3, math.log(0.3)]]
    assert captured(rows, 2).keys() == {1, 2}


D = Decimal


def test_identical_distributions_have_no_divergence() -> None:
    p = {1: D("0.7"), 2: D("0.2")}
    assert divergence(p, p).kl == 0
    assert divergence(p, p).mass == D("0.9")


def test_tokens_of_one_side_only_go_to_other() -> None:
    p, q = {1: D("0.7"), 2: D("0.2")}, {1: D("0.6"), 3: D("0.4")}
    measured = divergence(p, q)
    assert measured.mass == D("0.6")
    assert float(measured.kl) == pytest.approx(0.7 * math.log(0.7 / 0.6) + 0.3 * math.log(0.3 / 0.4), rel=1e-14)


def test_disjoint_sets_diverge_by_nothing_and_capture_nothing() -> None:
    measured = divergence({1: D("0.9")}, {2: D("0.9")})
    assert measured.kl == measured.mass == 0


def test_other_of_zero_counts_nothing_in_the_reference_and_a_floor_in_the_denominator() -> None:
    whole, part = {1: D(1)}, {1: D("0.9")}
    assert float(divergence(whole, part).kl) == pytest.approx(math.log(1 / 0.9), rel=1e-14)
    expected = 0.9 * math.log(0.9) + 0.1 * math.log(0.1 / 1e-12)
    assert float(divergence(part, whole).kl) == pytest.approx(expected, rel=1e-12)


def test_a_mass_of_other_under_its_floor_makes_no_divergence_negative() -> None:
    almost = {1: 1 - D("1e-13")}
    assert divergence(almost, almost).kl == 0


def test_a_common_sum_over_one_divides_its_cells_by_itself() -> None:
    over = {1: D("0.6006"), 2: D("0.4004")}
    measured = divergence(over, {1: D("0.6"), 2: D("0.4")})
    assert measured.mass == 1
    assert measured.kl == 0


def test_the_divergence_is_directed() -> None:
    p, q = {1: D("0.9")}, {1: D("0.5")}
    assert float(divergence(p, q).kl) == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-14)
    assert float(divergence(q, p).kl) == pytest.approx(0.5 * math.log(5 / 9) + 0.5 * math.log(5), rel=1e-14)


WEIGHTS = st.lists(st.floats(1e-4, 1.0), min_size=25, max_size=25)


@given(WEIGHTS, WEIGHTS)
@settings(deadline=None, max_examples=60)
def test_the_coarse_kl_is_that_of_numpy_and_never_above_the_full_one(left: list[float], right: list[float]) -> None:
    p, q = np.array(left) / sum(left), np.array(right) / sum(right)
    tops = [captured([[i, math.log(x)] for i, x in enumerate(side)], 20) for side in (p, q)]
    measured = divergence(*tops)

    likeliest = [np.argsort(-np.log(side), kind="stable")[:20] for side in (p, q)]
    common = np.isin(np.arange(25), np.intersect1d(likeliest[0], likeliest[1]))
    coarse_p = np.append(p[common], p[~common].sum())
    coarse_q = np.append(q[common], q[~common].sum())
    assert float(measured.kl) == pytest.approx(float((coarse_p * np.log(coarse_p / coarse_q)).sum()), abs=1e-12)
    assert float(measured.mass) == pytest.approx(float(min(p[common].sum(), q[common].sum())), abs=1e-12)
    assert float(measured.kl) <= float((p * np.log(p / q)).sum()) + 1e-12


@given(st.permutations(range(20)), st.permutations(range(20)))
@settings(deadline=None, max_examples=30)
def test_the_order_of_entries_changes_no_digit(one: list[int], other: list[int]) -> None:
    p = [[i * 4096, -1.5 - 0.37 * i] for i in range(20)]
    q = [[i * 4096, -1.4 - 0.39 * i] for i in range(20)]
    left, right = captured(p, 20), captured(q, 20)
    assert captured([p[i] for i in one], 20) == left
    mixed = {i * 4096: right[i * 4096] for i in other}
    assert divergence({i * 4096: left[i * 4096] for i in one}, mixed) == divergence(left, right)
