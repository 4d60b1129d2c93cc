"""From a cause to the trip, and from the trip to the closed connection, while a cell runs.

The cause is a stranger that connects to the arm's port at a random moment of the timed cell. Times are read from the
ledger: the stranger's connect (this process's monotonic clock, the same machine), the record ``noted`` that says how
long closing took, and the ``end`` of the step.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from fairtrial import conduct, demo
from fairtrial.ledger import read
from fairtrial.progress import Lines


def strike(out: Path, port: int, delay_s: float, struck: list[int]) -> None:
    """Wait for the first timed cell of the first arm, then connect as a stranger would."""
    ledger = out / "ledger.jsonl"
    while not (ledger.exists() and b'"purpose":"off long rep 1"' in ledger.read_bytes()):
        time.sleep(0.005)
    time.sleep(delay_s)
    with socket.create_connection(("127.0.0.1", port)):
        struck.append(time.monotonic_ns())
        time.sleep(5)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--times", type=int, default=10)
    arguments.add_argument("--port", type=int, default=8001)
    given = arguments.parse_args()
    to_trip_s, to_close_s = [], []
    with tempfile.TemporaryDirectory() as scratch:
        demo.bring_up(given.port, False, Lines())
        try:
            for turn in range(given.times):
                out, struck = Path(scratch) / f"trip-{turn}", list[int]()
                thread = threading.Thread(
                    target=strike, args=(out, given.port + 1, 1.0 * turn / given.times, struck), daemon=True
                )
                thread.start()
                code = conduct.run_experiment(demo.experiment(port=given.port), base=demo.PACKAGE, out=out)
                thread.join()
                records = read((out / "ledger.jsonl").read_bytes())
                closed = next(record for record in records if record["kind"] == "noted" and record["what"] == "closed")
                stop = next(record for record in records if record["kind"] == "stop")
                if code != 3 or "demand" not in stop["cause"]:
                    print(f"unexpected: exit {code}, {stop['cause']}", file=sys.stderr)
                    return 1
                to_close_s.append(closed["ns"] / 1e9)
                to_trip_s.append((closed["mono_ns"] - closed["ns"] - struck[0]) / 1e9)
        finally:
            demo.end_production(given.port, Lines())
    result = {
        "benchmark": "trip",
        "times": given.times,
        "cause_to_trip_s": shown(to_trip_s),
        "trip_to_closed_s": shown(to_close_s),
    }
    json.dump(result, sys.stdout, indent=1)
    print()
    return 0


def shown(values: list[float]) -> dict[str, float]:
    """Minimum, median and maximum, seconds."""
    return {
        "min": round(min(values), 4),
        "median": round(statistics.median(values), 4),
        "max": round(max(values), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
