"""Counts how the tokens of each chunk spread over the experts, with REFERENCE_TRACE=1."""

from __future__ import annotations

import os
from collections import deque

ENABLED = os.environ.get("REFERENCE_TRACE") == "1"

_loads: deque[tuple[int, ...]] = deque(maxlen=65_536)


def record(loads: list[int]) -> None:
    """Record one event: the tokens that each expert of a layer got in a chunk."""
    if ENABLED:
        _loads.append(tuple(loads))


def report() -> dict[str, object]:
    """Return what was recorded: events, and the largest share of a chunk's tokens that one expert got."""
    peaks = [max(loads) / sum(loads) for loads in list(_loads)]
    return {"enabled": ENABLED, "events": len(peaks), "peak_share": max(peaks, default=None)}
