"""Runs the tokens of a chunk through their experts and adds up what these return."""

from __future__ import annotations

import numpy as np

from fairtrial.reference.shape import TOP_K, ExpertWeights, Floats

from .dispatch import Dispatch
from .router import route


def feed_forward(rows: Floats, up: Floats, down: Floats) -> Floats:
    """One expert: a gated SiLU network; ``rows`` [tokens, width] in, the same shape out."""
    gate, value = np.split(rows @ up, 2, axis=1)
    return np.asarray((gate / (1 + np.exp(-gate)) * value) @ down, np.float32)


class Experts:
    """The mixture of experts. ``rows`` is the size of the dispatch workspace: the context of the model."""

    def __init__(self, *, rows: int, experts: int) -> None:
        self._dispatch = Dispatch(rows=rows, experts=experts)
        self._single = np.empty((TOP_K, 1), np.int8)

    def __call__(self, hidden: Floats, weights: ExpertWeights, /) -> Floats:
        """Return the weighted sum of each token's experts; ``hidden`` is [tokens, width]."""
        if len(hidden) == 1:
            return self._one(hidden, weights)
        share = route(hidden, weights.gate, self._dispatch.choice)
        place, loads = self._dispatch.place(len(hidden))
        place = place[:, : len(hidden)]
        grouped = np.empty((TOP_K * len(hidden), hidden.shape[1]), np.float32)
        for rank in range(TOP_K):
            grouped[place[rank]] = hidden
        start = 0
        for expert, load in enumerate(loads):
            if load:
                rows = slice(start, start + load)
                grouped[rows] = feed_forward(grouped[rows], weights.up[expert], weights.down[expert])
            start += load
        mixed = np.zeros_like(hidden)
        for rank in range(TOP_K):
            mixed += share[:, rank, None] * grouped[place[rank]]
        return mixed

    def _one(self, hidden: Floats, weights: ExpertWeights) -> Floats:
        """A decode step has one token, which needs no grouping."""
        share = route(hidden, weights.gate, self._single)
        mixed = np.zeros_like(hidden)
        for rank in range(TOP_K):
            expert = int(self._single[rank, 0])
            mixed += share[0, rank] * feed_forward(hidden, weights.up[expert], weights.down[expert])
        return mixed
