"""The limits of the rule ``match``, as exact decimals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from typing import Any, Self

from fairtrial.reading.quantities import is_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Every limit is inclusive. Ratios: the first four and ``mass_min``; nats: ``kl_min``; counts: the last four.

    Raises ``ValueError`` for a limit that is negative, not finite, or has more digits than its JSON number
    keeps.
    """

    spread_max: Decimal
    speedup_max: Decimal
    band: Decimal
    refute_min: Decimal
    kl_min: Decimal
    kl_floor_multiple: Decimal
    mass_min: Decimal
    greedy_total: int
    top_n: int
    probe_tokens: int
    reps: int

    def __post_init__(self) -> None:
        for name in _COUNTS:
            count = getattr(self, name)
            if not is_integer(count) or count < 1:
                raise ValueError(f"{name} must be a whole number of 1 or more")
        for name in _LIMITS:
            limit: Decimal = getattr(self, name)
            if not limit.is_finite() or limit < 0 or Decimal(repr(float(limit))) != limit:
                raise ValueError(f"{name} must be a finite decimal of 0 or more, with at most 15 digits")

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Self:
        """Return the thresholds in a table of all eleven keys: strings, integers, floats as they print.

        Raises ``ValueError`` for a key too many or too few and for a value that is no such number.
        """
        wrong = sorted(set(values) ^ {field.name for field in fields(cls)})
        if wrong:
            raise ValueError(f"thresholds unknown or missing: {', '.join(wrong)}")
        read: dict[str, Any] = {name: values[name] for name in _COUNTS}
        return cls(**read | {name: _exact(name, values[name]) for name in _LIMITS})

    def as_json(self) -> dict[str, int | float]:
        """Return the thresholds as plain JSON numbers; ``of`` reads the same limits back."""
        limits = {name: getattr(self, name) for name in _LIMITS}
        return {
            name: int(limit) if limit == limit.to_integral_value() else float(limit) for name, limit in limits.items()
        } | {name: getattr(self, name) for name in _COUNTS}


_COUNTS = ("greedy_total", "top_n", "probe_tokens", "reps")
_LIMITS = tuple(field.name for field in fields(Thresholds) if field.name not in _COUNTS)


def _exact(name: str, value: object) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        raise ValueError(f"{name} must be a number or a decimal string")
    try:
        return Decimal(float.__repr__(value)) if isinstance(value, float) else Decimal(value)
    except InvalidOperation:
        raise ValueError(f"{name} must be a number or a decimal string") from None


MATCH_THRESHOLDS = Thresholds(
    spread_max=Decimal("0.03"),
    speedup_max=Decimal("0.80"),
    band=Decimal("0.05"),
    refute_min=Decimal("0.95"),
    kl_min=Decimal("0.005"),
    kl_floor_multiple=Decimal(2),
    mass_min=Decimal("0.99"),
    greedy_total=6,
    top_n=20,
    probe_tokens=8192,
    reps=2,
)
