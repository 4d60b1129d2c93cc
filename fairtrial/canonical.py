"""The one byte form of everything that is hashed: JSON, keys sorted, no spaces, UTF-8."""

from __future__ import annotations

import hashlib
import json


def canonical(value: object) -> bytes:
    """Return the canonical bytes of a JSON value.

    Raises ``ValueError`` for NaN and infinities, which JSON does not have, and ``TypeError`` for other types. A
    lone surrogate, as a command line that is not UTF-8 has, is written as JSON's own escape.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


def sha256(content: bytes) -> str:
    """Return the SHA-256 of bytes, as 64 lower-case hex digits."""
    return hashlib.sha256(content).hexdigest()
