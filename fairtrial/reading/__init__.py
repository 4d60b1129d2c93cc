"""Readings: from timed cells and checks to one verdict, by a rule fixed before the window. Pure."""

from fairtrial.reading.checks import numerical
from fairtrial.reading.match import TEXTS, Speed, Text, Verdict, match
from fairtrial.reading.none import none
from fairtrial.reading.thresholds import MATCH_THRESHOLDS, Thresholds

__all__ = [
    "MATCH_THRESHOLDS",
    "TEXTS",
    "Speed",
    "Text",
    "Thresholds",
    "Verdict",
    "match",
    "none",
    "numerical",
]
