from __future__ import annotations

import pytest

from fairtrial.canonical import canonical
from fairtrial.errors import EvidenceError
from fairtrial.reading import match, none


def row(arm: str, rep: int, ttft_ns: object, cell: str = "150k") -> dict[str, object]:
    return {"arm": arm, "cell": cell, "rep": rep, "ttft_ns": ttft_ns}


CELLS = [
    row("off-327", 1, 68_900_000_001),
    row("off-327", 2, 71_200_000_000),
    row("warm", 1, "not read", cell="32k"),
    row("off-524", 1, 90_800_000_000),
    row("off-524", 2, 95_800_000_000),
]


def test_the_reading_none_writes_cells_and_spreads_and_no_verdict() -> None:
    reading = none(CELLS, arms=("off-327", "off-524"), cell="150k", reps=2)
    assert reading == none(CELLS[::-1], arms=("off-327", "off-524"), cell="150k", reps=2)
    assert canonical(reading) == (
        b'{"meaning":null,"median_s":{"off-327":70.0500000005,"off-524":93.3},"next":null,"reasons":[],"safety":null,'
        b'"speed":null,"spread":{"off-327":0.0328336902068,"off-524":0.05359056806},"thresholds":null,'
        b'"ttft_s":{"off-327":[68.900000001,71.2],"off-524":[90.8,95.8]},"verdict":null}'
    )


def test_the_reading_none_has_the_keys_of_the_rule_match() -> None:
    cells = [row(arm, rep, 1000) for arm in "ocf" for rep in (1, 2)]
    matched = match(cells, {"o": None, "f": None}, off="o", cause="c", fix="f", cell="150k")
    assert none(cells, arms="ocf", cell="150k", reps=2).keys() == matched.keys()


def test_arms_may_have_different_reps() -> None:
    cells = [CELLS[0], CELLS[3], CELLS[4]]
    reading = none(cells, arms=("off-327", "off-524"), cell="150k", reps={"off-327": 1, "off-524": 2})
    assert reading["spread"] == {"off-327": 0.0, "off-524": 0.05359056806}


@pytest.mark.parametrize("count", [1, 3])
def test_other_reps_than_registered_raise(count: int) -> None:
    with pytest.raises(EvidenceError, match="off-524"):
        none(CELLS, arms=("off-327", "off-524"), cell="150k", reps={"off-327": 2, "off-524": count})


def test_an_arm_that_was_not_registered_raises() -> None:
    with pytest.raises(EvidenceError, match="its arm is none of off-327"):
        none(CELLS, arms=("off-327",), cell="150k", reps=2)
