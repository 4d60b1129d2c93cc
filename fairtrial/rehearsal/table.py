"""What a rehearsal found, for a person: by step and fault, and what broke."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fairtrial.rehearsal.play import Rehearsal, Run

COLUMNS = ("error", "hang", "lost", "lie", "torn", "kill", "signal", "trip")
_OTHERS = {"full disk": "error", "stall": "hang", "two signals": "signal"}
SHOWN = 20
"""How many broken runs are named."""


def column(fault: str) -> str:
    """The column of the table that a fault belongs to."""
    word = fault.partition(" ")[0].rstrip(",")
    return _OTHERS.get(fault) or (word if word in COLUMNS else "trip")


def text(name: str, found: Rehearsal) -> str:
    """The table, and what broke."""
    lines = [
        f"rehearsal of {name}: {found.effects} effects of the clean run, seed 0",
        f"  {found.repeats} effects repeat while something is waited for: the first and the last of each kind in each "
        "step stand for them",
        f"  {found.shared} kills after an effect are the kill before the next, and were run once",
        "",
        *_table(found.runs),
    ]
    if found.second:
        lines += [
            "",
            f"a second fault in each restore: {found.states} states in which a restore began, which stand for "
            f"{found.stands_for} of these runs",
            "",
            *_table(found.second),
        ]
    runs = found.all_runs
    broken = [(run, name, why) for run in runs for name, why in run.broken]
    lines += [
        "",
        f"{len(runs)} runs, {len(broken)} broken invariants, {found.seconds:.1f} s "
        f"({len(runs) / max(found.seconds, 1e-9):.0f} runs a second)",
    ]
    for run, invariant, why in broken[:SHOWN]:
        lines.append(f"  BROKEN {invariant}: {why}")
        lines.append(f"    exits {run.exits}; again: --at '{run.point}'")
    if len(broken) > SHOWN:
        lines.append(f"  and {len(broken) - SHOWN} more (--json has all)")
    return "\n".join(lines) + "\n"


def _table(runs: Sequence[Run]) -> list[str]:
    cells = Counter((run.step, column(run.fault)) for run in runs)
    bad = Counter(run.step for run in runs if run.broken)
    steps = list(dict.fromkeys(run.step for run in runs))
    head = f"{'step':<16}" + "".join(f"{name:>8}" for name in COLUMNS) + f"{'runs':>8}{'broken':>8}"
    lines = [head]
    for step in steps:
        counts = [cells[step, name] for name in COLUMNS]
        shown = "".join(f"{count or '.':>8}" for count in counts)
        lines.append(f"{step:<16}{shown}{sum(counts):>8}{bad[step] or '.':>8}")
    totals = [sum(cells[step, name] for step in steps) for name in COLUMNS]
    lines.append(
        f"{'all':<16}" + "".join(f"{total:>8}" for total in totals) + f"{sum(totals):>8}{sum(bad.values()):>8}"
    )
    return lines


def run_text(run: Run, records: Sequence[Mapping[str, Any]], output: str) -> str:
    """One run alone: what was said, the ledger, and how it ended."""
    lines = [f"stop point: {run.point}   (all of it simulated)", "", output.rstrip("\n"), "", "LEDGER"]
    for row in records:
        own = ("seq", "at", "mono_ns", "prev", "kind")
        fields = " ".join(f"{key}={value}" for key, value in row.items() if key not in own)
        lines.append(f"  {row['seq']:>4} {row['mono_ns'] / 1e9:>9.3f} s  {row['kind']:<9} {fields[:160]}")
    lines += ["", f"exits {run.exits}"]
    lines += [f"BROKEN {name}: {why}" for name, why in run.broken] or ["every invariant holds"]
    return "\n".join(lines) + "\n"
