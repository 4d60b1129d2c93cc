"""PF1's matched window: how its evidence is read. Pure.

Three arms of one HOLD, at --max-model-len 524,288: ``off-524`` (production), ``cause-524`` (the traced build that was
fast once) and ``fix-524`` (production and the fence). The rule is the engine's ``match``; arms, limits and texts are
PF1's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from fairtrial import reading
from fairtrial.reading import Text, Thresholds, Verdict

OFF, CAUSE, FIX = "off-524", "cause-524", "fix-524"
CELL = "150k"

MATCH_THRESHOLDS: Final[Mapping[str, int | float]] = MappingProxyType(reading.MATCH_THRESHOLDS.as_json())
"""The registered limits, each inclusive.

Ratios: ``spread_max``, ``speedup_max``, ``band``, ``refute_min``, ``mass_min``, ``kl_floor_multiple``; nats:
``kl_min``; counts: ``greedy_total``, ``top_n``, ``probe_tokens``, ``reps``.
"""

MATCH_TEXTS: Final[Mapping[Verdict, Text]] = MappingProxyType(
    {
        Verdict.CONFIRMED: Text(
            meaning="the event records in the MoE half are the effective difference (item 1 D1); the switch removes "
            "the 524,288 gap",
            next="K1-PROMOTE memory/promotion rows at 524,288 with the switch; 300K points; then narrow the 25 sites",
        ),
        Verdict.REFUTED: Text(
            meaning="the records alone do not do it; the trace runtime's host work (D2-D5) does",
            next="fix candidate 2: the host-side part (bookkeeping pace / allocator read) as its own switch",
        ),
        Verdict.CAUSE_NOT_REPRODUCED: Text(
            meaning="CW's fast 524,288 was state, not code",
            next="the alternating off/cause arm series (state dependence)",
        ),
        Verdict.UNSAFE: Text(
            meaning="the switch changed outputs: never adopt",
            next="diagnose; no promotion",
        ),
        Verdict.AMBIGUOUS: Text(
            meaning="no decision",
            next="repeat or redesign",
        ),
    }
)
"""What each verdict means for PF1 and what is next, as registered."""


def match_reading(
    cells: Iterable[Mapping[str, object]],
    checks: Mapping[str, Iterable[Mapping[str, object]] | None],
    thresholds: Mapping[str, object] = MATCH_THRESHOLDS,
) -> dict[str, object]:
    """Return the reading of one PF1 window, ready for JSON. The order of rows changes nothing.

    ``cells``: rows ``{"arm", "cell": "150k", "rep": 1 | 2, "ttft_ns": int}``, exactly two of each arm; rows of other
    cells are ignored. ``checks``: ``{"off-524": rows | None, "fix-524": rows | None}``, None where they were not run
    (``offload.prefill_cause2.match_requests`` writes such rows). ``thresholds``: all eleven keys of
    ``MATCH_THRESHOLDS``.

    Keys returned: ``verdict``, ``speed`` (timing alone), ``safety`` (None: checks not run), ``ttft_s`` and
    ``median_s`` (seconds, by arm), ``spread`` (ratio, by arm), ``thresholds``, ``meaning``, ``next``, ``reasons``
    (each condition with value and limit).

    Raises ``EvidenceError`` for evidence that is incomplete, malformed or off-protocol, with every fault and any
    safety failure already seen; ``ValueError`` for thresholds that are none.
    """
    return reading.match(
        cells,
        checks,
        off=OFF,
        cause=CAUSE,
        fix=FIX,
        cell=CELL,
        thresholds=Thresholds.of(thresholds),
        texts=MATCH_TEXTS,
    )
