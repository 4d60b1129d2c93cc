"""``docs/rehearsal.md`` names every fault and every invariant, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from fairtrial.rehearsal.effects import FAULTS, RESTORES
from fairtrial.rehearsal.invariants import INVARIANTS

TEXT = (Path(__file__).parents[2] / "docs" / "rehearsal.md").read_text()


def rows(heading: str) -> list[list[str]]:
    below = TEXT[TEXT.index(heading) :]
    lines = below[below.index("|---|") :].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_invariant_has_its_row_in_order() -> None:
    assert [row[0] for row in rows("## What must hold after every run")] == [*INVARIANTS, "fired"]


def test_every_fault_is_named_and_no_other() -> None:
    shown = {
        re.sub(r" \(.*?\)", "", fault).strip() for row in rows("## Stop points")[1:] for fault in row[1].split(",")
    }
    shown -= {"the same", "without the lie: a probe that lied would be no probe"}
    verbs = {
        re.sub(r" \(.*?\)", "", fault).strip()
        for fault in re.sub(r"\(.*?\)", "", rows("## Stop points")[0][1]).split(",")
    }
    assert shown | verbs == {fault for faults in FAULTS.values() for fault in faults}


def test_who_comes_after_a_kill_is_told() -> None:
    assert RESTORES == ("then restore", "then the switch")
