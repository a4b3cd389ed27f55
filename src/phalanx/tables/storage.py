"""The memory of a table of numbered rows, as one process sees it; its workers' handles share it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.tables.membership import Membership
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.shard import TableShard
from phalanx.tables.sharded import Sharded
from phalanx.tables.spec import TableLayout, TableSpec, view_backups, view_parts

__all__ = ["Storage"]


class Storage(Sharded[TableShard]):
    """The memory of a table of numbered rows: one region, cut into shards.

    Args:
        spec: What all workers agree on.
        regions: Where its regions come from.
        membership: The workers of the run.
    """

    shards: list[TableShard]

    def __init__(self, spec: TableSpec, regions: RunRegions, membership: Membership) -> None:
        super().__init__(spec, regions, membership)
        self._layout = layout = TableLayout.of(spec)
        self._parts = view_parts(self.region, spec, layout)
        backups = view_backups(self.region, spec, layout)
        self.shards = [self._shard(index, backups) for index in range(spec.num_shards)]
        self._bounds = np.array(layout.shard_starts[1:-1], dtype=np.int64)

    @staticmethod
    def region_sizes(spec: TableSpec) -> dict[str, int]:
        """Return name and size of the region of a new table."""
        return {f"table-{spec.name}": TableLayout.of(spec).nbytes}

    @property
    def nbytes(self) -> int:
        """How much memory the table takes, logs apart."""
        return self.region.nbytes

    def _shard(self, index: int, backups: Sequence[Tensor]) -> TableShard:
        layout, spec = self._layout, self.spec
        first, stop = layout.shard_starts[index : index + 2]
        values, *states = [(a[first:stop], b[first:stop]) for a, b in self._parts]
        return TableShard(
            lock=self._lock_of(index),
            header=self._page.shard(index),
            values=values,
            states=states,
            ids=self.region.tensor(torch.int64, layout.undo_rows[index], layout.ids[index]),
            backups=[backup[first:stop] for backup in backups],
            updater=spec.updater,
            first_row=first,
        )

    def _write_first(self, init: Tensor) -> None:
        for shard in self.shards:
            shard.begin()
        for (state, _), first in zip(
            self._parts[1:], self.spec.updater.first_states(), strict=True
        ):
            state.fill_(first)
        self._parts[0][0].copy_(init)

    def _owners(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        return np.searchsorted(self._bounds, rows, side="right").astype(np.uint8)

    # --- all of it --------------------------------------------------------------------------------

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        """Return copies of the values and of each state; every shard's are of one moment."""
        copies = [torch.empty_like(a) for a, _ in self._parts]
        for shard in self.shards:
            rows = slice(shard.first_row, shard.first_row + shard.num_rows)
            shard.read_all([copy[rows] for copy in copies], timeout_s)
        return copies

    def replace_all(self, parts: list[Tensor], timeout_s: float) -> None:
        """Replace the values, and as many states as are given."""
        for shard in self.shards:
            rows = slice(shard.first_row, shard.first_row + shard.num_rows)
            shard.assign([part[rows] for part in parts], timeout_s)
