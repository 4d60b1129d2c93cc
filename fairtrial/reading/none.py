"""The reading ``none``: cells and spreads of every arm, no verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fairtrial.reading.cells import Row, no_verdict, read_cells, timing


def none(cells: Iterable[Row], *, arms: Sequence[str], cell: str, reps: Mapping[str, int] | int) -> dict[str, object]:
    """Return the keys of the rule ``match``: the timing of ``arms`` (seconds, ratios), ``verdict`` null.

    ``reps`` counts the timed reps of each arm. Raises ``EvidenceError`` where an arm has other reps than
    these, or a TTFT is no whole number of nanoseconds above 0.
    """
    faults: list[str] = []
    counts = {arm: reps if isinstance(reps, int) else reps[arm] for arm in arms}
    ttft_ns = read_cells(cells, cell=cell, reps=counts, faults=faults)
    if faults:
        raise no_verdict("none", faults)
    absent = dict.fromkeys(("verdict", "speed", "safety", "thresholds", "meaning", "next"))
    return {**absent, **timing(ttft_ns), "reasons": []}
