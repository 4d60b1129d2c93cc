"""Tables in the documentation hold what the code holds: verdicts, guards, records, statuses, steps of a restore."""

from __future__ import annotations

import re
from pathlib import Path

from fairtrial.decide import TABLE, Outcome, Status
from fairtrial.experiment import load
from fairtrial.guards import GUARDS
from fairtrial.reading import MATCH_THRESHOLDS
from fairtrial.reading.match import TEXTS
from fairtrial.switch.state import STATES
from fairtrial.window import steps

ROOT = Path(__file__).parents[2]


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its head."""
    text = (ROOT / page).read_text()
    below = text[text.index(f"\n{heading}\n") :].splitlines()
    rows: list[list[str]] = []
    for line in below[2:]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


def names(rows: list[list[str]]) -> list[str]:
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]


def test_every_verdict_is_explained_in_readme_and_reading() -> None:
    verdicts = [verdict.value for verdict in TEXTS]
    assert names(table("docs/reading.md", "## Verdicts")) == verdicts
    assert names(table("README.md", "## What the verdicts mean")) == verdicts


def test_reading_quotes_the_rules_own_limits() -> None:
    text = (ROOT / "docs/reading.md").read_text()
    rule = text[text.index("## Rule `match`") : text.index("## Rule `none`")]
    limits = MATCH_THRESHOLDS
    for shown in (
        f"is over {limits.spread_max * 100:.0f} %",
        f"over {limits.speedup_max} of off's median",
        f"at least {limits.refute_min} of off's median",
        f"within {limits.band * 100:.0f} % of cause's median and at most {limits.speedup_max} of off's",
        f"({limits.greedy_total} of {limits.greedy_total})",
        f"the {limits.top_n} likeliest",
        f"the larger of {limits.kl_min} and twice",
        f"at least {limits.mass_min} of the mass",
    ):
        assert shown in " ".join(rule.split()), shown


def test_every_guard_is_explained() -> None:
    assert names(table("docs/host.md", "## Guards")) == list(dict.fromkeys(guard.name for guard in GUARDS))


def test_every_kind_of_record_and_outcome_is_explained() -> None:
    assert set(names(table("docs/evidence.md", "## The ledger"))) == {kind for _, kind in TABLE}
    text = (ROOT / "docs/evidence.md").read_text()
    assert all(f"`{outcome}`" in text for outcome in Outcome)


def test_every_state_of_a_host_is_named() -> None:
    rows = {row[0]: row[1] for row in table("docs/host.md", "## What runs there")}
    assert rows["`last.json`"].endswith(": " + ", ".join(STATES))


def test_the_steps_of_a_restore_are_those_that_undo() -> None:
    content = (ROOT / "fairtrial" / "demo.toml").read_bytes()
    undo = [step.name for step in steps(load(content, file="demo.toml")) if step.undoes]
    assert names(table("docs/host.md", "## How production is brought back")) == undo


def test_the_drawn_table_of_statuses_is_the_one_that_decides() -> None:
    statuses = list(Status)
    kinds = sorted({kind for _, kind in TABLE})
    due = [[f"`{kind}`", *(str(TABLE.get((status, kind), "")) for status in statuses)] for kind in kinds]
    drawn = table("ARCHITECTURE.md", "## Statuses")
    lines = "\n".join("| " + " | ".join(row) + " |" for row in due)
    assert drawn == due, f"ARCHITECTURE.md, Statuses: draw it so:\n{lines}"
