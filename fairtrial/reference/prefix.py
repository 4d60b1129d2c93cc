"""The prefix cache: whole blocks of keys and values, found by salt and by every token before their end."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

from fairtrial.reference.shape import BLOCK, Floats

CAPACITY_BLOCKS = 256


class PrefixCache:
    """Blocks of earlier prompts, the least recently used leave first. A salt, and none, is a space of its own."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, Floats] = OrderedDict()

    @staticmethod
    def keys(ids: list[int], salt: str | None) -> list[bytes]:
        """Return the key of each whole block of a prompt: a hash chain over the blocks, begun by the salt."""
        key = b"unsalted" if salt is None else hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()
        chain = []
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            key = hashlib.sha256(key + array("I", ids[start : start + BLOCK]).tobytes()).digest()
            chain.append(key)
        return chain

    def find(self, keys: list[bytes], tokens: int) -> list[Floats]:
        """Return the leading blocks that are held; of a prompt of ``tokens`` at least one is left to compute."""
        found: list[Floats] = []
        for key in keys[: (tokens - 1) // BLOCK]:
            if key not in self._blocks:
                break
            found.append(self._blocks[key])
        # A block is of no use without those before it, so the later ones are made the older.
        for key in reversed(keys[: len(found)]):
            self._blocks.move_to_end(key)
        return found

    def add(self, key: bytes, block: Floats) -> None:
        """Hold a block."""
        self._blocks[key] = block
        if len(self._blocks) > CAPACITY_BLOCKS:
            self._blocks.popitem(last=False)
