"""The rows of a table as one worker read them last, which some updaters compare with."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from phalanx.tables.part import add_up_repeats


class LastRead:
    """The rows that a worker has read, in its own memory.

    Args:
        rows: All rows, as they were when the worker opened the table.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._mutex = threading.Lock()  # threads may share a worker

    def remember(self, rows: Tensor | None, values: Tensor) -> None:
        """Keep what a get has returned."""
        with self._mutex:
            self._rows[slice(None) if rows is None else rows] = values

    def widened(self, rows: Tensor | None, delta: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return rows, each once, and for each its delta beside the row as it was read last."""
        if rows is not None:
            rows, delta = add_up_repeats(rows, delta)
        with self._mutex:
            last = self._rows if rows is None else self._rows[rows]
            return rows, torch.cat([delta, last], 1)
