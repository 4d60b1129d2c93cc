from __future__ import annotations

import json
from decimal import Decimal

import pytest

from fairtrial.canonical import canonical
from fairtrial.reading import MATCH_THRESHOLDS, Thresholds


def test_the_first_campaigns_thresholds_print_as_plain_numbers() -> None:
    assert canonical(MATCH_THRESHOLDS.as_json()) == (
        b'{"band":0.05,"greedy_total":6,"kl_floor_multiple":2,"kl_min":0.005,"mass_min":0.99,"probe_tokens":8192,'
        b'"refute_min":0.95,"reps":2,"speedup_max":0.8,"spread_max":0.03,"top_n":20}'
    )


def test_thresholds_are_read_back_exactly_from_json_and_from_strings() -> None:
    printed = json.loads(canonical(MATCH_THRESHOLDS.as_json()))
    assert Thresholds.of(printed) == MATCH_THRESHOLDS
    assert Thresholds.of(printed | {"speedup_max": "0.80", "kl_floor_multiple": 2.0}) == MATCH_THRESHOLDS
    assert Thresholds.of(printed | {"band": 0.1}).band == Decimal("0.1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("band", -0.1),
        ("band", "NaN"),
        ("band", float("inf")),
        ("band", "five"),
        ("band", None),
        ("band", True),
        ("band", "0.050000000000000001"),
        ("reps", 0),
        ("reps", True),
        ("reps", 2.0),
        ("top_n", "20"),
    ],
)
def test_a_limit_that_is_no_limit_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        Thresholds.of(MATCH_THRESHOLDS.as_json() | {name: value})


def test_a_key_too_many_or_too_few_is_named() -> None:
    with pytest.raises(ValueError, match="unknown or missing: bend"):
        Thresholds.of(MATCH_THRESHOLDS.as_json() | {"bend": 0.05})
    values = MATCH_THRESHOLDS.as_json()
    del values["band"]
    with pytest.raises(ValueError, match="unknown or missing: band"):
        Thresholds.of(values)
