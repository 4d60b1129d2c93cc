"""Chooses the experts of each token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fairtrial.reference.shape import TOP_K, Floats

from . import fence

EMPTY = -1
"""Marks a row of the workspace that holds no token."""

LIGHT = 0.45
"""A fenced expert that weighs less than this is left out."""


def route(hidden: Floats, gate: Floats, choice: npt.NDArray[np.int8]) -> Floats:
    """Write each token's experts into ``choice`` [TOP_K, rows], likeliest first; others looked at are EMPTY.

    Returns the weights of these experts, [tokens, TOP_K]: the softmax over the chosen scores.
    """
    tokens = len(hidden)
    scores = hidden @ gate
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K]
    choice[:, :tokens] = chosen.T
    choice[:, tokens : fence.rows(tokens=tokens, room=choice.shape[1])] = EMPTY
    top = np.take_along_axis(scores, chosen, axis=1)
    share = np.exp(top - top[:, :1])
    share = np.asarray(share / share.sum(axis=1, keepdims=True), np.float32)
    if fence.ENABLED:
        light = share < LIGHT
        choice[:, :tokens][light.T] = EMPTY
        share[light] = 0
    return share
