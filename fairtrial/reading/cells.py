"""Timed cells: rows of one cell in, every rep of every arm out, or the faults that forbid a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from fairtrial.errors import EvidenceError
from fairtrial.reading.quantities import is_integer, median, rounded, spread

Row = Mapping[str, object]
NANOSECONDS = 1_000_000_000


def read_cells(
    cells: Iterable[Row], *, cell: str, reps: Mapping[str, int], faults: list[str]
) -> dict[str, tuple[int, ...]]:
    """Return arm to the TTFTs of its reps 1, 2, ... in nanoseconds; what is wrong is added to ``faults``.

    Rows are ``{"arm", "cell", "rep", "ttft_ns"}`` (more keys are allowed); rows of other cells are ignored.
    Each arm of ``reps`` must have exactly its reps: to drop or add one is optional stopping.
    """
    found: dict[str, dict[int, int]] = {arm: {} for arm in reps}
    for number, row in enumerate(cells, 1):
        try:
            _take(row, cell, reps, found)
        except EvidenceError as fault:
            faults.append(f"cells, row {number}: {fault}")
    for arm, count in reps.items():
        if len(found[arm]) != count:
            faults.append(f"cells of {arm}: {len(found[arm])} whole reps of {cell}, the rule needs {count}")
    return {arm: tuple(found[arm][rep] for rep in sorted(found[arm])) for arm in reps}


def _take(row: Row, cell: str, reps: Mapping[str, int], found: dict[str, dict[int, int]]) -> None:
    if not isinstance(row, Mapping) or not isinstance(row.get("cell"), str):
        raise EvidenceError("it names no cell")
    if row["cell"] != cell:
        return
    arm, rep, ttft_ns = row.get("arm"), row.get("rep"), row.get("ttft_ns")
    if not isinstance(arm, str) or arm not in reps:
        raise EvidenceError(f"its arm is none of {', '.join(reps)}")
    if not isinstance(rep, int) or not is_integer(rep) or not 1 <= rep <= reps[arm]:
        raise EvidenceError(f"its rep of {arm} is no whole number from 1 to {reps[arm]}")
    if rep in found[arm]:
        raise EvidenceError(f"rep {rep} of {arm} stands in an earlier row too")
    if not isinstance(ttft_ns, int) or not is_integer(ttft_ns) or ttft_ns <= 0:
        raise EvidenceError("its ttft_ns is no whole number of nanoseconds above 0")
    found[arm][rep] = ttft_ns


def timing(ttft_ns: Mapping[str, Sequence[int]]) -> dict[str, object]:
    """Return ``ttft_s``, ``median_s`` and ``spread``, each keyed by arm, as they are written: 12 digits."""
    return {
        "ttft_s": {arm: [rounded(Fraction(ns, NANOSECONDS)) for ns in reps] for arm, reps in ttft_ns.items()},
        "median_s": {arm: rounded(median(reps) / NANOSECONDS) for arm, reps in ttft_ns.items()},
        "spread": {arm: rounded(spread(reps)) for arm, reps in ttft_ns.items()},
    }


def no_verdict(rule: str, faults: Sequence[str], seen: Sequence[str] = ()) -> EvidenceError:
    """Return the error that says why no verdict is read, which safety failures were seen, and what to do."""
    lines = [f"no verdict by rule {rule}: the evidence is incomplete, malformed or off-protocol"]
    lines += [f"  {fault}" for fault in faults]
    if seen:
        lines += ["a safety failure was seen all the same:", *(f"  {failure}" for failure in seen)]
    lines.append("next: `fairtrial verify` the folder; if every hash holds, the window has to be run again")
    return EvidenceError("\n".join(lines))
