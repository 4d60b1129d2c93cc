"""Chooses the experts of each token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fairtrial.reference.shape import TOP_K, Floats

from . import trace

EMPTY = -1
"""Marks a row of the workspace that holds no token."""


def route(hidden: Floats, gate: Floats, choice: npt.NDArray[np.int8]) -> tuple[Floats, int]:
    """Write each token's experts into ``choice`` [TOP_K, rows], likeliest first; other rows are EMPTY.

    Returns the weights of these experts, [tokens, TOP_K]: the softmax over the chosen scores; and the rows that
    hold a token as far as they are known: counted when chunks are traced, else all.
    """
    tokens = len(hidden)
    scores = hidden @ gate
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K]
    choice[:, :tokens] = chosen.T
    choice[:, tokens:] = EMPTY
    top = np.take_along_axis(scores, chosen, axis=1)
    share = np.exp(top - top[:, :1])
    held = int(np.count_nonzero(choice[0] != EMPTY)) if trace.ENABLED else choice.shape[1]
    return np.asarray(share / share.sum(axis=1, keepdims=True), np.float32), held
