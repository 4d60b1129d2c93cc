"""Rehearse the demo's window and, with ``--pairs``, a second fault in each restore: runs, seconds, runs a second."""

from __future__ import annotations

import json
import sys
import time

from fairtrial import demo
from fairtrial.rehearsal import rehearse
from fairtrial.rehearsal.forks import forked
from fairtrial.rehearsal.play import clean


def main(words: list[str]) -> None:
    window = demo.experiment()
    began = time.monotonic()
    forked(lambda: clean(window, demo.PACKAGE))
    clean_s = time.monotonic() - began
    found = rehearse(window, demo.PACKAGE, pairs="--pairs" in words)
    broken = sum(len(run.broken) for run in found.all_runs)
    document = {
        "benchmark": "rehearsal",
        "clean_s": round(clean_s, 3),
        "effects": found.effects,
        "single_runs": len(found.runs),
        "shared": found.shared,
        "states": found.states,
        "stands_for": found.stands_for,
        "second_runs": len(found.second),
        "broken": broken,
        "seconds": round(found.seconds, 1),
        "runs_per_s": round(len(found.all_runs) / found.seconds, 1),
    }
    print(json.dumps(document, indent=1))
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
