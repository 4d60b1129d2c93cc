"""Each story of the demo, some times over: how many reached their verdict, all restored and verified."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from fairtrial import demo
from fairtrial.evidence import verify

VERDICTS = {"confirmed": "CONFIRMED", "refuted": "REFUTED", "state": "CAUSE_NOT_REPRODUCED", "unsafe": "UNSAFE"}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--times", type=int, default=5)
    arguments.add_argument("--port", type=int, default=8001)
    arguments.add_argument("--quick", action="store_true")
    given = arguments.parse_args()
    found: dict[str, list[str]] = {story: [] for story in VERDICTS}
    faults = 0
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(given.times):
            for story in VERDICTS:
                out = Path(scratch) / f"{story}-{turn}"
                code = demo.run(story=story, out=out, port=given.port, keep=False, quick=given.quick)
                summary = json.loads((out / "summary.json").read_bytes())
                found[story].append(str(summary["verdict"]))
                faults += code != 0 or not summary["restored"] or bool(verify(out).problems)
    reached = {story: verdicts.count(VERDICTS[story]) for story, verdicts in found.items()}
    result = {"benchmark": "stories", "times": given.times, "reached": reached, "verdicts": found, "faults": faults}
    json.dump(result, sys.stdout, indent=1)
    print()
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
