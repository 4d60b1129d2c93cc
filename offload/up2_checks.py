"""The logit floor of PF1: pure, and the engine's own computation under PF1's limits."""

from __future__ import annotations

from collections.abc import Mapping

from fairtrial.reading import MATCH_THRESHOLDS
from fairtrial.reading import numerical as engine_numerical


def numerical(
    off_a: Mapping[str, object], off_aa: Mapping[str, object], fix_b: Mapping[str, object]
) -> dict[str, object]:
    """Return the logit floor of three logit rows: what ``safety["logit"]`` of a reading holds.

    A row is ``{"prompt_sha256", "prompt_tokens", "cached_tokens", "top": [[token_id, logprob], ...]}``, logprobs
    natural and as printed; other keys, its slot too, are not looked at: the place of the argument says which it is.

    Returned, numbers rounded to 12 digits after they were compared: ``kl_fix`` = KL(off_a || fix_b) and
    ``kl_floor`` = KL(off_a || off_aa), in nats, over the tokens that stand in both top 20s, by id, and OTHER;
    ``limit`` = max(0.005, 2 x kl_floor); ``common_mass``, the smaller of the two masses of the common tokens;
    ``pass``: kl_fix <= limit and common_mass >= 0.99. Beside them ``kl_aa_fix`` = KL(off_aa || fix_b), and
    ``floor_mass``, the common mass of off_a and off_aa: under 0.99 it keeps the limit at 0.005.

    Raises ``EvidenceError`` for a row that is malformed, not cold, not of 8,192 tokens, or of another prompt.
    """
    return engine_numerical(off_a, off_aa, fix_b, MATCH_THRESHOLDS)
