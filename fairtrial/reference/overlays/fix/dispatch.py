"""Gives each routed token its place among the tokens of its expert."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fairtrial.reference.shape import TOP_K

from . import fence
from .router import EMPTY


class Dispatch:
    """The dispatch workspace: allocated once, with one row for every position that the context can have.

    ``choice`` [TOP_K, rows] is what the router writes: the expert of each row, or EMPTY.
    """

    def __init__(self, *, rows: int, experts: int) -> None:
        self.choice = np.full((TOP_K, rows), EMPTY, np.int8)
        self._experts = experts
        self._mine = np.empty(TOP_K * rows, np.bool_)
        self._rank = np.empty(TOP_K * rows, np.int32)
        self._place = np.zeros(TOP_K * rows, np.int32)

    def place(self, tokens: int) -> tuple[npt.NDArray[np.int32], list[int]]:
        """Return each row's place when rows are grouped by expert, [TOP_K, rows], and each expert's rows.

        Looks at the first ``tokens`` rows of the workspace or, without the fence, at all.
        Rows keep their order within an expert: a row's rank is the running count of its expert's rows.
        """
        rows = fence.rows(tokens=tokens, room=self.choice.shape[1])
        chosen = self.choice[:, :rows].reshape(-1)
        size = chosen.size
        mine, rank, place = self._mine[:size], self._rank[:size], self._place[:size]
        loads: list[int] = []
        for expert in range(self._experts):
            np.equal(chosen, expert, out=mine)
            np.cumsum(mine, dtype=np.int32, out=rank)
            np.add(rank, sum(loads) - 1, out=place, where=mine)
            loads.append(int(rank[-1]))
        return place.reshape(TOP_K, -1), loads
