"""The model: a decoder-only transformer in float32, its weights drawn from a fixed seed.

Pre-norm blocks of causal attention with rotary positions (Su et al. 2021) and a mixture of gated experts of which
each token uses two (Lepikhin et al. 2020). All arithmetic of a token depends on the chunk that it is computed in,
and chunks begin at fixed positions: a prompt gives the same bits whether its beginning was cached or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from fairtrial.reference.shape import BLOCK, ExpertWeights, Floats, Mixture, Shape
from fairtrial.reference.tokens import VOCABULARY

SEED = 20_261_129
FAVOURED = b"123456, etaoinsh\n"
"""Bytes that the output bias favours, as the prior of a trained model favours common ones."""
FAVOUR_NATS = 13.0
LOGIT_SPREAD_NATS = 1.6
ATTENTION_SHARPNESS = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    qkv: Floats
    out: Floats
    experts: ExpertWeights


class Context:
    """Keys and values of one sequence: per layer [heads, tokens, width of a head], grown by doubling."""

    def __init__(self, shape: Shape) -> None:
        self._blocks = (shape.layers, 2, shape.heads)
        self._depth = shape.width // shape.heads
        self._held = np.empty((*self._blocks, BLOCK, self._depth), np.float32)
        self.tokens = 0

    def reserve(self, tokens: int) -> None:
        """Make room for a context of ``tokens``."""
        room = self._held.shape[3]
        if tokens > room:
            grown = np.empty((*self._blocks, max(tokens, 2 * room), self._depth), np.float32)
            grown[:, :, :, : self.tokens] = self._held[:, :, :, : self.tokens]
            self._held = grown

    def layer(self, index: int) -> Floats:
        """Return the keys and values of a layer, [2, heads, room, width of a head]: a view."""
        return cast("Floats", self._held[index])

    def block(self, start: int) -> Floats:
        """Return a copy of the block that begins at ``start``, [layers, 2, heads, BLOCK, width of a head]."""
        return self._held[:, :, :, start : start + BLOCK].copy()

    def append_block(self, block: Floats) -> None:
        """Append a block that an earlier sequence computed."""
        self.reserve(self.tokens + BLOCK)
        self._held[:, :, :, self.tokens : self.tokens + BLOCK] = block
        self.tokens += BLOCK


def _normal(hidden: Floats) -> Floats:
    """Root-mean-square normalisation (Zhang & Sennrich 2019), without a learned gain."""
    return np.asarray(hidden / np.sqrt(np.mean(hidden * hidden, axis=1, keepdims=True) + 1e-6), np.float32)


def _rotate(heads: Floats, start: int) -> Floats:
    """Rotate [.., tokens, width of a head] by position; its first and second half are the two coordinates."""
    half = heads.shape[-1] // 2
    angle = np.arange(start, start + heads.shape[-2])[:, None] * 10_000.0 ** (-np.arange(half) / half)
    cosine, sine = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    a, b = heads[..., :half], heads[..., half:]
    return np.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=-1)


class Model:
    """A model of a size with a mixture of experts. Not for use from two threads at once."""

    def __init__(self, shape: Shape, mixture: Mixture) -> None:
        self.shape = shape
        self._mixture = mixture
        draw = np.random.default_rng(SEED)

        def normal(*sizes: int, fan_in: int, gain: float = 1.0) -> Floats:
            drawn = draw.standard_normal(sizes, dtype=np.float32)
            drawn *= np.float32(gain / np.sqrt(fan_in))
            return drawn

        width, inner = shape.width, shape.expert_width
        self._embedding = normal(VOCABULARY, width, fan_in=1)
        self._layers = []
        for _ in range(shape.layers):
            qkv = normal(width, 3 * width, fan_in=width)
            qkv[:, :width] *= np.float32(ATTENTION_SHARPNESS)
            self._layers.append(
                _Layer(
                    qkv=qkv,
                    out=normal(width, width, fan_in=width),
                    experts=ExpertWeights(
                        gate=normal(width, shape.experts, fan_in=width),
                        up=normal(shape.experts, width, 2 * inner, fan_in=width),
                        down=normal(shape.experts, inner, width, fan_in=inner, gain=2.0),
                    ),
                )
            )
        self._head = normal(width, VOCABULARY, fan_in=width, gain=LOGIT_SPREAD_NATS)
        self._bias = np.zeros(VOCABULARY, np.float32)
        self._bias[list(FAVOURED)] = FAVOUR_NATS

    def chunk_end(self, start: int, tokens: int) -> int:
        """Return where the prefill chunk that begins at ``start`` ends, in a prompt of ``tokens``.

        In a long context chunks are half as long, which bounds the memory of the attention scores.
        """
        size = BLOCK if start < self.shape.long_context else BLOCK // 2
        return min(start + size, tokens)

    def forward(self, ids: list[int], context: Context) -> Floats:
        """Append tokens to a context; return their last hidden states, [tokens, width]."""
        start, end = context.tokens, context.tokens + len(ids)
        context.reserve(end)
        hidden = self._embedding[ids]
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attend(_normal(hidden), layer, context.layer(index), start)
            hidden = hidden + self._mixture(_normal(hidden), layer.experts)
        context.tokens = end
        return hidden

    def logits(self, hidden: Floats) -> Floats:
        """Return the logits that follow each hidden state, [tokens, vocabulary]."""
        return np.asarray(_normal(hidden) @ self._head + self._bias, np.float32)

    def _attend(self, hidden: Floats, layer: _Layer, held: Floats, start: int) -> Floats:
        tokens, end = len(hidden), start + len(hidden)
        depth = self.shape.width // self.shape.heads
        queries, keys, values = (hidden @ layer.qkv).reshape(tokens, 3, self.shape.heads, depth).transpose(1, 2, 0, 3)
        held[0, :, start:end] = _rotate(keys, start)
        held[1, :, start:end] = values
        scores = (_rotate(queries, start) * np.float32(depth**-0.5)) @ held[0, :, :end].transpose(0, 2, 1)
        if tokens > 1:
            scores[:, :, start:][:, np.triu(np.ones((tokens, tokens), np.bool_), 1)] = -np.inf
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        mixed = (scores @ held[1, :, :end]) / scores.sum(axis=2, keepdims=True)
        return np.asarray(mixed.transpose(1, 0, 2).reshape(tokens, -1) @ layer.out, np.float32)


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    """Return the natural logarithms of the probabilities, in float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float64)
