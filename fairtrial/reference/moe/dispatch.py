"""Gives each routed token its place among the tokens of its expert."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fairtrial.reference.shape import TOP_K

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

    def place(self) -> tuple[npt.NDArray[np.int32], list[int]]:
        """Return each row's place when rows are grouped by expert, [TOP_K, rows], and each expert's rows.

        Rows keep their order within an expert: a row's rank is the running count of its expert's rows.
        """
        chosen = self.choice.reshape(-1)
        loads: list[int] = []
        for expert in range(self._experts):
            np.equal(chosen, expert, out=self._mine)
            np.cumsum(self._mine, dtype=np.int32, out=self._rank)
            np.add(self._rank, sum(loads) - 1, out=self._place, where=self._mine)
            loads.append(int(self._rank[-1]))
        return self._place.reshape(TOP_K, -1), loads
