"""The sizes of the model, and the arrays that the model and its mixture of experts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

TOP_K = 2
"""Experts that each token is sent to."""

BLOCK = 64
"""Tokens of a prefix-cache block, and of a prefill chunk while the context is short."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes of one model. ``long_context`` is in tokens: beyond it, prefill chunks are half a block."""

    layers: int
    width: int
    heads: int
    experts: int
    expert_width: int
    long_context: int


SHAPES = {
    "demo": Shape(layers=4, width=256, heads=4, experts=16, expert_width=320, long_context=1024),
    "tiny": Shape(layers=3, width=192, heads=3, experts=16, expert_width=512, long_context=256),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """One layer's experts: ``gate`` [width, experts], ``up`` [experts, width, 2 x expert width] with the gated
    half first, ``down`` [experts, expert width, width]."""

    gate: Floats
    up: Floats
    down: Floats


class Mixture(Protocol):
    """The mixture of experts of a model: hidden states [tokens, width] in, the same shape out."""

    def __call__(self, hidden: Floats, weights: ExpertWeights, /) -> Floats: ...
