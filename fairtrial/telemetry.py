"""One line of telemetry a sample: what the guards saw, when, and in which phases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairtrial.guards import View

COLUMNS = (
    "utc_s",
    "mono_ns",
    "available_b",
    "swap_used_b",
    "listeners",
    "peers",
    "marked",
    "lease_left_s",
    "switch_beat_age_s",
    "demand",
    "phases",
)
HEADER = (",".join(COLUMNS) + "\n").encode()


def row(utc_s: float, sample: Mapping[str, Any], view: View) -> bytes:
    """A sample as a CSV line of ``COLUMNS``; listeners and peers are counted over the watched ports."""
    ports = sample.get("ports", {}).values()
    values = (
        f"{utc_s:.3f}",
        view.now_ns,
        sample["memory"]["available_b"],
        sample["memory"]["swap_used_b"],
        sum(len(port.get("listeners", [])) for port in ports),
        sum(len(port.get("peers", [])) for port in ports),
        len(sample.get("marked", [])),
        (sample.get("hold") or {}).get("left_s"),
        (sample.get("switch") or {}).get("beat_age_s"),
        view.demand,
        " ".join(sorted(view.phases)),
    )
    return (",".join("" if value is None else str(value) for value in values) + "\n").encode()
