"""The rows of a table as one worker read them last, which some updaters compare with.

They lie in the worker's own memory: as many as the table has, or as many keys as it has read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from phalanx.tables.part import add_up_repeats
from phalanx.tables.spec import TableSpec

__all__ = ["LastRead"]


class LastRead:
    """The rows that a worker has read.

    Args:
        spec: The table.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self._places: dict[int, int] | None = {} if spec.has_keys else None  # by key
        self._rows = self._new_rows(spec.rows)
        self._is_known = np.zeros(spec.rows, dtype=np.bool_)
        self._mutex = threading.Lock()  # threads may share a worker

    def remember(self, rows: Tensor | None, values: Tensor) -> None:
        """Keep what a get has returned."""
        with self._mutex:
            self._keep(self._places_of(rows), values)

    def widened(
        self, rows: Tensor | None, delta: Tensor, read: Callable[[Tensor, Tensor], None]
    ) -> tuple[Tensor | None, Tensor]:
        """Return rows, each once, and for each its delta beside the row as it was read last.

        Rows that were not read yet are read now: ``read(rows, out)`` does so.
        """
        if rows is not None:
            rows, delta = add_up_repeats(rows, delta)
        with self._mutex:
            places = self._places_of(rows)
            if not self._is_known[places].all():
                numbers = self._unknown(rows, places)
                values = self._new_rows(len(numbers))
                read(numbers, values)
                self._keep(self._places_of(numbers), values)
            return rows, torch.cat([delta, self._rows[places]], 1)

    def _unknown(self, rows: Tensor | None, places: Tensor | slice) -> Tensor:
        numbers = torch.arange(self._spec.rows, device="cpu") if rows is None else rows
        return numbers[torch.from_numpy(~self._is_known[places])]

    def _keep(self, places: Tensor | slice, values: Tensor) -> None:
        self._rows[places] = values
        self._is_known[places] = True

    def _places_of(self, rows: Tensor | None) -> Tensor | slice:
        """Return where rows lie here, with room for new keys."""
        if rows is None:
            return slice(None)
        places = self._places
        if places is None:
            return rows
        found = [places.setdefault(key, len(places)) for key in rows.tolist()]
        if len(places) > len(self._rows):
            more = 2 * len(places) - len(self._rows)
            self._rows = torch.cat([self._rows, self._new_rows(more)])
            self._is_known = np.append(self._is_known, np.zeros(more, dtype=np.bool_))
        return torch.tensor(found, dtype=torch.int64, device="cpu")

    def _new_rows(self, num_rows: int) -> Tensor:
        spec = self._spec
        with torch.inference_mode(False):  # else nobody could write to it outside of that mode
            return torch.empty((num_rows, spec.cols), dtype=spec.dtype, device="cpu")
