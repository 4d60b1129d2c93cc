"""The quantities that readings compare: rationals for times, 50-digit decimals for probabilities.

Decimal ``exp`` and ``ln`` are correctly rounded, so the same logprobs give the same digits on every machine;
sums run in the order of token ids, so the order of rows changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import (
    ROUND_HALF_EVEN,
    Context,
    Decimal,
    DivisionByZero,
    InvalidOperation,
    Overflow,
    localcontext,
)
from fractions import Fraction

from fairtrial.errors import EvidenceError

_TRAPS = [InvalidOperation, DivisionByZero, Overflow]
FIFTY_DIGITS = Context(prec=50, rounding=ROUND_HALF_EVEN, Emin=-999_999, Emax=999_999, clamp=0, traps=_TRAPS)
_TWELVE_DIGITS = Context(prec=12, rounding=ROUND_HALF_EVEN, Emin=-999_999, Emax=999_999, clamp=0, traps=_TRAPS)

_ZERO, _ONE = Decimal(0), Decimal(1)
_LOGPROB_SLACK = Decimal("0.001")
_LOGPROB_OF_ZERO = Decimal(-9999)
_SUM_MAX = Decimal("1.001")
_OTHER_FLOOR = Decimal("1e-12")


def median(values: Sequence[int]) -> Fraction:
    """Return the exact median of one or more integers; of an even count, the mean of the middle two."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return Fraction(ordered[half] + ordered[~half], 2)


def spread(values: Sequence[int]) -> Fraction:
    """Return (max - min) / median of one or more positive integers: a ratio, exact."""
    return (max(values) - min(values)) / median(values)


def rounded(value: Fraction | Decimal) -> float:
    """Return a value as it is written: 12 significant digits, half to even. Never compare it."""
    if isinstance(value, Decimal):
        return float(_TWELVE_DIGITS.plus(value))
    return float(_TWELVE_DIGITS.divide(Decimal(value.numerator), Decimal(value.denominator)))


def is_integer(value: object) -> bool:
    """Say whether a JSON value is an integer; ``true`` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def probability(logprob: object) -> Decimal:
    """Return the probability of a natural logprob as printed (int, float or Decimal), to 50 digits.

    -9999 or less, and -inf, is how servers write probability zero. Between 0 and 0.001 is rounding, taken
    as 0. Raises ``EvidenceError`` for null, NaN, a string, a boolean, and anything over 0.001.
    """
    if isinstance(logprob, bool) or not isinstance(logprob, (int, float, Decimal)):
        raise EvidenceError(f"a logprob is {type(logprob).__name__}, not a number")
    printed = Decimal(float.__repr__(logprob)) if isinstance(logprob, float) else Decimal(logprob)
    if printed.is_nan():
        raise EvidenceError("a logprob is NaN")
    if printed > _LOGPROB_SLACK:
        raise EvidenceError(f"a logprob is over {_LOGPROB_SLACK}: no probability is over 1")
    if printed <= _LOGPROB_OF_ZERO:
        return _ZERO
    return min(printed, _ZERO).exp(FIFTY_DIGITS)


def captured(top: object, top_n: int) -> dict[int, Decimal]:
    """Return the probabilities above zero, by token id, of the ``top_n`` likeliest of a top.

    ``top`` is ``[[token_id, logprob], ...]``. Of equal logprobs at the cut the smaller token id is kept.
    Raises ``EvidenceError`` for fewer than ``top_n`` entries, a token id twice, a malformed entry, or a sum
    of those kept over 1.001.
    """
    if not isinstance(top, Sequence) or isinstance(top, str):
        raise EvidenceError("its top is no list of [token id, logprob]")
    found: dict[int, Decimal] = {}
    for entry in top:
        if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 2:
            raise EvidenceError("an entry of its top is no pair of token id and logprob")
        token, logprob = entry
        if not is_integer(token) or token < 0:
            raise EvidenceError("a token id in its top is no whole number: ask the server for token ids, not text")
        if token in found:
            raise EvidenceError(f"token id {token} stands twice in its top")
        found[token] = probability(logprob)
    if len(found) < top_n:
        raise EvidenceError(f"its top has {len(found)} entries, fewer than {top_n}")
    kept = sorted(sorted(found), key=found.__getitem__, reverse=True)[:top_n]
    total = _total(found, sorted(kept))
    if total > _SUM_MAX:
        raise EvidenceError(f"the probabilities of its top {top_n} sum to {rounded(total)}, over {_SUM_MAX}")
    return {token: found[token] for token in kept if found[token]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """KL(p || q) in nats over the common tokens and OTHER, and the smaller of the two masses they capture."""

    kl: Decimal
    mass: Decimal


def divergence(p: Mapping[int, Decimal], q: Mapping[int, Decimal]) -> Divergence:
    """Return the coarse KL(p || q) of two captured distributions (token id to probability).

    Each sums to at most 1.001. The cells are the tokens that both captured, and OTHER = 1 - their sum: the
    only partition whose masses are known exactly. Merging cells never raises a KL (the log sum inequality;
    Cover and Thomas, Elements of Information Theory, section 2.7), so the result is never above the full
    one.
    """
    tokens = sorted(p.keys() & q.keys())
    p_cells, p_mass = _cells(p, tokens)
    q_cells, q_mass = _cells(q, tokens)
    with localcontext(FIFTY_DIGITS):
        kl = sum((x * (x / y).ln() for x, y in zip(p_cells, q_cells, strict=True)), _ZERO)
        if p_mass < 1:
            kl += (1 - p_mass) * ((1 - p_mass) / max(1 - q_mass, _OTHER_FLOOR)).ln()
    return Divergence(kl=max(kl, _ZERO), mass=min(p_mass, q_mass))


def _cells(found: Mapping[int, Decimal], tokens: Sequence[int]) -> tuple[list[Decimal], Decimal]:
    mass = _total(found, tokens)
    if mass <= 1:
        return [found[token] for token in tokens], mass
    with localcontext(FIFTY_DIGITS):
        return [found[token] / mass for token in tokens], _ONE


def _total(found: Mapping[int, Decimal], tokens: Sequence[int]) -> Decimal:
    with localcontext(FIFTY_DIGITS):
        return sum((found[token] for token in tokens), _ZERO)
