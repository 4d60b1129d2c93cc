"""The tokenizer: one token a byte, and one token that ends a text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

END = 256
"""The end-of-text token."""

VOCABULARY = 257


def encode(text: str) -> list[int]:
    """Return the token ids of a text: its UTF-8 bytes (lone surrogates as ``?``)."""
    return list(text.encode("utf-8", "replace"))


def decode(ids: Iterable[int]) -> str:
    """Return the text of token ids; bytes that are no UTF-8 become U+FFFD, ``END`` has no text."""
    return bytes(token for token in ids if token != END).decode("utf-8", "replace")


def token_text(token: int) -> str:
    """Return how one token is shown on its own."""
    return "" if token == END else bytes([token]).decode("utf-8", "replace")


class Detokenizer:
    """Turns tokens into text one at a time, holding back bytes of a character that is not whole yet."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int, *, last: bool) -> str:
        """Return the text that this token completes; with ``last``, also all that was held back."""
        return self._decoder.decode(b"" if token == END else bytes([token]), final=last)
