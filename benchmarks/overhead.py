"""The runner's own time in a window, from its ledger: all HOLD time outside stop, start, request, check and waits.

Of each step's time (begin to end) are taken away: requests (request to response), the host's stops, starts and
proofs (play end, start, prove: command to reply), the wait for readiness, and the registered waits. What is left is
ours: looking, proving identity, guards, writing down.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairtrial import demo
from fairtrial.ledger import read

TAKEN = {"end", "start", "prove"}


def own_time_s(records: Sequence[dict[str, Any]], waits: dict[str, float]) -> dict[str, float]:
    """Seconds of the runner's own in each step, in order; the time between steps stands under ``between``."""
    own: dict[str, float] = {"between": 0.0}
    step, begun, since, outside = "", 0, 0, 0.0
    opened: dict[tuple[str, int], int] = {}
    for record in records:
        at, kind = record["mono_ns"], record["kind"]
        if kind == "begin":
            if since:
                own["between"] += (at - since) / 1e9
            step, begun, outside = record["step"], at, 0.0
        elif kind == "end":
            outside += waits.get(step, 0.0) + float(record["observed"].get("ready_s", 0.0))
            own[step] = max(0.0, (at - begun) / 1e9 - outside)
            since = at
        elif kind == "request" or (kind == "command" and TAKEN & set(record.get("verbs", []))):
            opened[kind, record["n"]] = at
        elif kind in ("response", "reply"):
            started = opened.pop(("request" if kind == "response" else "command", record["n"]), None)
            if started is not None:
                outside += (at - started) / 1e9
    return own


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("dir", type=Path, nargs="?", help="a window's folder (default: run the demo)")
    arguments.add_argument("--port", type=int, default=8001)
    arguments.add_argument("--quick", action="store_true")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = given.dir or Path(scratch) / "demo"
        if given.dir is None:
            code = demo.run(story="confirmed", out=out, port=given.port, keep=False, quick=given.quick)
            if code != 0:
                return code
        records = read((out / "ledger.jsonl").read_bytes())
        registered = json.loads((out / "registration.json").read_bytes())["experiment"]
    held = next(index for index, record in enumerate(records) if record.get("step") == "hold")
    own = own_time_s(records[held:], {"idle": registered["waits"]["idle_s"]})
    for step, seconds in own.items():
        print(f"{step:<18} {seconds * 1000:8.0f} ms", file=sys.stderr)
    total_s = sum(own.values())
    print(f"{'total':<18} {total_s * 1000:8.0f} ms", file=sys.stderr)
    json.dump({"benchmark": "overhead", "total_s": round(total_s, 3), "own_s": own}, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
