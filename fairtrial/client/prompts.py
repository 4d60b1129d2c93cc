"""Prompts and salts from a registered seed: pure, and the same for ever.

Every draw starts from ``key = SHA-256(canonical([label, seed]))``; block ``i`` is ``SHA-256(key + i)`` with
``i`` as 8 bytes, big-endian; a block is eight words of 4 bytes, big-endian. A word ``w`` gives
``low + w % span``, and is rejected where ``w >= span * (2**32 // span)``, so that no value is likelier than
another. A salt is the first 32 hex digits of ``SHA-256(canonical([label, seed, name]))``. All this is part of a
registration: another format needs another label.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from hashlib import sha256

from fairtrial.canonical import canonical
from fairtrial.errors import Refused

_PADDINGS = 16
_TRIES = 12
_FEW, _MORE = 8, 40


def token_ids(seed: str, count: int, low: int, high: int) -> list[int]:
    """Return ``count`` token ids, uniform in ``low <= id < high``. Raises ``Refused`` for an empty range."""
    if not (0 <= low < high <= 2**32 and count >= 0):
        raise Refused(f"token ids: cannot draw {count} of {low} <= id < {high}; name a range that is not empty")
    return _draw("fairtrial.token_ids/1", seed, count, low, high)


def salt(seed: str, name: str) -> str:
    """Return the cache salt of one request: 32 hex digits, another for each name under the same seed."""
    return _key("fairtrial.salt/1", seed, name).hex()[:32]


def prompt_lines(content: bytes) -> list[str]:
    """Return the prompts of a pinned file, one a line, blank lines left out. Raises ``UnicodeDecodeError``."""
    return [line for line in content.decode().splitlines() if line.strip()]


def dice(seed: str, count: int) -> str:
    """Return ``count`` throws of a die as text, ``Dice rolls: 3,1,6,``: it ends where the next throw is due."""
    return _dice_text(_throws(seed, count), 0)


def sized_dice(seed: str, tokens: int, tokenize: Callable[[str], list[int]]) -> list[int]:
    """Return the ids of a text of dice throws that has exactly ``tokens`` tokens and ends after a comma.

    ``tokenize`` is the server's own. The number of throws is searched and, where a throw is worth more than one
    token, the text is padded in front. Raises ``Refused`` where no such text is found.
    """
    throws = _throws(seed, max(tokens, _MORE))
    rate = (len(tokenize(_dice_text(throws[:_MORE], 0))) - len(tokenize(_dice_text(throws[:_FEW], 0)))) / (_MORE - _FEW)
    for padding in range(_PADDINGS if rate > 0 else 0):
        count, tried = _FEW, set[int]()
        while 0 < count <= len(throws) and count not in tried and len(tried) < _TRIES:
            tried.add(count)
            ids = tokenize(_dice_text(throws[:count], padding))
            if len(ids) == tokens:
                return ids
            count += round((tokens - len(ids)) / rate)
    raise Refused(
        f"probe: no text of dice throws has exactly {tokens} tokens with this server's tokenizer; "
        "ask for another length, or name a pinned probe file"
    )


def _key(*parts: str) -> bytes:
    return sha256(canonical(list(parts))).digest()


def _words(key: bytes) -> Iterator[int]:
    for number in itertools.count():
        block = sha256(key + number.to_bytes(8, "big")).digest()
        for at in range(0, len(block), 4):
            yield int.from_bytes(block[at : at + 4], "big")


def _draw(label: str, seed: str, count: int, low: int, high: int) -> list[int]:
    span = high - low
    bound = span * (2**32 // span)
    drawn = (low + word % span for word in _words(_key(label, seed)) if word < bound)
    return list(itertools.islice(drawn, count))


def _throws(seed: str, count: int) -> list[int]:
    return _draw("fairtrial.dice/1", seed, count, 1, 7)


def _dice_text(throws: list[int], padding: int) -> str:
    return "So " * padding + "Dice rolls: " + "".join(f"{throw}," for throw in throws)
