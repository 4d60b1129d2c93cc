"""A-A on the demo's server: one arm, started fresh twenty times in one window, read as ten pairs.

Spread is that of the two reps of one start, (max - min) / median; ratio is the second start's median over the
first's, of each pair. Nothing differs between the arms but their names.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from fairtrial import conduct, demo
from fairtrial.experiment import Experiment, parse
from fairtrial.progress import Lines
from fairtrial.store import Directory
from fairtrial.summary import load_evidence, rows_of


def experiment(pairs: int, port: int, quick: bool) -> Experiment:
    """The demo's off arm, 2 x ``pairs`` times, with the reading ``none``."""
    raw = demo.experiment(port=port, quick=quick).dump()
    raw["name"] = "aa"
    raw["question"] = "How much does the same arm differ from itself?"
    raw["overlays"] = {}
    raw["checks"] = None
    off = {**raw["arms"][0], "checks": []}
    raw["arms"] = [{**off, "name": f"off-{pair}{turn}"} for pair in range(1, pairs + 1) for turn in "ab"]
    raw["reading"] = {"rule": "none", "cell": "long"}
    return parse(raw, file="aa")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--pairs", type=int, default=10)
    arguments.add_argument("--port", type=int, default=8001)
    arguments.add_argument("--quick", action="store_true")
    given = arguments.parse_args()
    lines = Lines()
    window = experiment(given.pairs, given.port, given.quick)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "aa"
        demo.bring_up(given.port, given.quick, lines)
        try:
            code = conduct.run_experiment(window, base=demo.PACKAGE, out=out, progress=lines)
        finally:
            demo.end_production(given.port, lines)
        if code != 0:
            return code
        store = Directory.open(out)
        rows, _ = rows_of(store, load_evidence(store)[0])
    ttft_s: dict[str, list[float]] = {}
    for row in rows:
        if row["cell"] == "long":
            ttft_s.setdefault(row["arm"], []).append(row["ttft_ns"] / 1e9)
    medians = {arm: statistics.median(reps) for arm, reps in ttft_s.items()}
    spreads = [(max(reps) - min(reps)) / medians[arm] for arm, reps in ttft_s.items()]
    ratios = [medians[f"off-{pair}b"] / medians[f"off-{pair}a"] for pair in range(1, given.pairs + 1)]
    result = {
        "benchmark": "aa",
        "pairs": given.pairs,
        "ttft_s": ttft_s,
        "spread_within_a_start": quartiles(spreads),
        "ratio_between_starts": quartiles(ratios),
        "largest_deviation_between_starts": max(abs(ratio - 1) for ratio in ratios),
    }
    json.dump(result, sys.stdout, indent=1)
    print()
    return 0


def quartiles(values: list[float]) -> dict[str, float]:
    """Minimum, median and maximum, rounded."""
    return {
        "min": round(min(values), 4),
        "median": round(statistics.median(values), 4),
        "max": round(max(values), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
