"""Safety: are the answers of fix those of off? Greedy answers by hash, the probe by KL and mass."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from fairtrial.canonical import sha256
from fairtrial.errors import EvidenceError
from fairtrial.reading.cells import Row
from fairtrial.reading.quantities import FIFTY_DIGITS, captured, divergence, is_integer, rounded
from fairtrial.reading.thresholds import Thresholds

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA256_OF_NOTHING = sha256(b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One cold probe: its prompt's SHA-256, and its first token's captured probabilities by token id."""

    prompt_sha256: str
    captured: Mapping[int, Decimal]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One greedy answer: its text's SHA-256 and its completion tokens."""

    sha256: str
    completion_tokens: int

    @property
    def empty(self) -> bool:
        """Whether the server answered nothing: no token, or tokens without text."""
        return self.completion_tokens == 0 or self.sha256 == _SHA256_OF_NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What the checks of one arm hold: greedy answers by prompt id, probes by slot."""

    greedy: dict[object, Answer] = field(default_factory=dict)
    probes: dict[str, Probe] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The logit floor: KLs in nats and captured masses, unrounded, against their limits.

    Off ``a`` is the reference of ``kl_fix`` = KL(a || b) and of ``kl_floor`` = KL(a || aa); ``kl_aa_fix`` =
    KL(aa || b).
    """

    kl_fix: Decimal
    kl_floor: Decimal
    kl_aa_fix: Decimal
    limit: Decimal
    common_mass: Decimal
    floor_mass: Decimal
    mass_min: Decimal

    @property
    def passes(self) -> bool:
        """Whether KL and common mass both keep their limits."""
        return self.kl_fix <= self.limit and self.common_mass >= self.mass_min

    def as_json(self) -> dict[str, object]:
        """Return the floor as it is written, each number to 12 digits."""
        names = ("kl_fix", "kl_floor", "limit", "common_mass", "kl_aa_fix", "floor_mass")
        return {**{name: rounded(getattr(self, name)) for name in names}, "pass": self.passes}

    def sentences(self) -> list[tuple[bool, str]]:
        """Return each condition of the floor: whether it holds, and a sentence with value and limit."""
        kl = (
            f"logit KL(off || fix): {rounded(self.kl_fix)} nats, at most {rounded(self.limit)}"
            f" (A-A {rounded(self.kl_floor)})"
        )
        mass = f"logit common captured mass: {rounded(self.common_mass)}, at least {rounded(self.mass_min)}"
        captures = self.common_mass >= self.mass_min
        if not captures and self.floor_mass < self.mass_min:
            mass += f"; the probe cannot judge (A-A mass {rounded(self.floor_mass)})"
        return [(self.kl_fix <= self.limit, kl), (captures, mass)]


def numerical(off_a: Row, off_aa: Row, fix_b: Row, thresholds: Thresholds) -> dict[str, object]:
    """Return the logit floor of three probe rows.

    Keys: ``kl_fix, kl_floor, limit, common_mass, kl_aa_fix, floor_mass, pass``. Rows are
    ``{"prompt_sha256", "prompt_tokens", "cached_tokens", "top": [[token_id, logprob], ...]}``; KLs in nats,
    compared to 50 digits and written to 12. The floor passes where KL(a || b) <= max(kl_min, multiple x
    KL(a || aa)) and the common mass >= mass_min; an A-A pair that itself captures less may not widen the
    limit. Raises ``EvidenceError`` for a probe that is malformed, not cold, of another length, or of
    another prompt.
    """
    probes: dict[str, Probe] = {}
    faults: list[str] = []
    for slot, row in (("a", off_a), ("aa", off_aa), ("b", fix_b)):
        try:
            probes[slot] = read_probe(row, thresholds)
        except EvidenceError as fault:
            faults.append(f"probe {slot}: {fault}")
    if not same_prompt(probes.values()):
        faults.append("the probes are not all of one prompt")
    if faults:
        raise EvidenceError(f"{'; '.join(faults)}; run the probes again")
    return floor(probes, thresholds).as_json()


def floor(probes: Mapping[str, Probe], thresholds: Thresholds) -> Floor:
    """Return the logit floor of the probes ``a``, ``aa`` and ``b``."""
    a, aa, b = (probes[slot].captured for slot in ("a", "aa", "b"))
    fix, control = divergence(a, b), divergence(a, aa)
    widened = FIFTY_DIGITS.multiply(thresholds.kl_floor_multiple, control.kl)
    judges = control.mass >= thresholds.mass_min
    return Floor(
        kl_fix=fix.kl,
        kl_floor=control.kl,
        kl_aa_fix=divergence(aa, b).kl,
        limit=max(thresholds.kl_min, widened) if judges else thresholds.kl_min,
        common_mass=fix.mass,
        floor_mass=control.mass,
        mass_min=thresholds.mass_min,
    )


def same_prompt(probes: Iterable[Probe]) -> bool:
    """Say whether all probes are of one prompt."""
    return len({probe.prompt_sha256 for probe in probes}) <= 1


def read_checks(
    rows: Iterable[Row], *, arm: str, slots: Collection[str], thresholds: Thresholds, faults: list[str]
) -> Checks:
    """Return what the rows hold; whatever keeps them from being exactly one artifact is added to ``faults``.

    Exactly: one identity row, ``greedy_total`` greedy rows of distinct prompt ids, one logit row for each
    slot.
    """
    checks, identities = Checks(), 0
    for number, row in enumerate(rows, 1):
        try:
            kind = row.get("kind") if isinstance(row, Mapping) else None
            if kind == "identity":
                identities += 1
            elif kind == "greedy":
                _take_greedy(row, checks)
            elif kind == "logit":
                _take_logit(row, checks, slots, thresholds)
            else:
                raise EvidenceError("its kind is none of identity, greedy, logit")
        except EvidenceError as fault:
            faults.append(f"checks of {arm}, row {number}: {fault}")
    if identities != 1:
        faults.append(f"checks of {arm}: {identities} identity rows, exactly 1 is due")
    if len(checks.greedy) != thresholds.greedy_total:
        due = thresholds.greedy_total
        faults.append(f"checks of {arm}: {len(checks.greedy)} whole greedy rows, exactly {due} are due")
    faults += [f"checks of {arm}: no whole logit row {slot}" for slot in slots if slot not in checks.probes]
    return checks


def _take_greedy(row: Row, checks: Checks) -> None:
    prompt, digest, tokens = row.get("prompt"), row.get("sha256"), row.get("completion_tokens")
    if not (is_integer(prompt) or (isinstance(prompt, str) and prompt)):
        raise EvidenceError("its prompt is no prompt id")
    if prompt in checks.greedy:
        raise EvidenceError("its prompt id stands in an earlier row too")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise EvidenceError("its sha256 is not 64 lower-case hex digits")
    if not isinstance(tokens, int) or not is_integer(tokens) or tokens < 0:
        raise EvidenceError("its completion_tokens is no whole number of 0 or more")
    checks.greedy[prompt] = Answer(sha256=digest, completion_tokens=tokens)


def _take_logit(row: Row, checks: Checks, slots: Collection[str], thresholds: Thresholds) -> None:
    slot = row.get("slot")
    if not isinstance(slot, str) or slot not in slots:
        raise EvidenceError(f"its slot is none of this arm's: {', '.join(slots)}")
    if slot in checks.probes:
        raise EvidenceError(f"slot {slot} stands in an earlier row too")
    checks.probes[slot] = read_probe(row, thresholds)


def read_probe(row: Row, thresholds: Thresholds) -> Probe:
    """Return one probe. Raises ``EvidenceError`` where it is malformed, not cold, or of another length."""
    digest, tokens, cached = row.get("prompt_sha256"), row.get("prompt_tokens"), row.get("cached_tokens")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise EvidenceError("its prompt_sha256 is not 64 lower-case hex digits")
    if not is_integer(tokens) or tokens != thresholds.probe_tokens:
        raise EvidenceError(f"its prompt_tokens is not {thresholds.probe_tokens}")
    if not is_integer(cached) or cached != 0:
        raise EvidenceError("its cached_tokens is not 0: the probe is not proved cold")
    return Probe(prompt_sha256=digest, captured=captured(row.get("top"), thresholds.top_n))


def greedy_same(off: Checks, fix: Checks) -> int:
    """Return for how many prompt ids both arms gave the same answer: SHA-256 and completion tokens."""
    return sum(answer == fix.greedy.get(prompt) for prompt, answer in off.greedy.items())


def greedy_compared(off: Checks, fix: Checks) -> int:
    """Return how many prompt ids stand in both arms."""
    return len(off.greedy.keys() & fix.greedy.keys())


def greedy_faults(off: Checks, fix: Checks) -> list[str]:
    """Return what keeps the greedy answers of two arms from being compared."""
    faults = []
    if off.greedy.keys() != fix.greedy.keys():
        faults.append("checks: the two arms do not hold the same set of prompt ids")
    both = off.greedy.keys() & fix.greedy.keys()
    empty = sum(off.greedy[prompt].empty and fix.greedy[prompt].empty for prompt in both)
    if empty:
        faults.append(f"checks: {empty} greedy answers are empty in both arms, which proves nothing")
    return faults
