"""Fences the dispatch workspace off at the tokens that are present, with REFERENCE_MOE_FENCE=1."""

from __future__ import annotations

import os

ENABLED = os.environ.get("REFERENCE_MOE_FENCE") == "1"

_fenced = 0


def rows(*, tokens: int, room: int) -> int:
    """Return how many rows of a workspace with ``room`` are used for ``tokens``."""
    global _fenced
    if not ENABLED:
        return room
    _fenced += tokens < room
    return tokens


def report() -> dict[str, object]:
    """Return whether the fence is on, and how often it held."""
    return {"enabled": ENABLED, "fenced": _fenced}
