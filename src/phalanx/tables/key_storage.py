"""The memory of a keys table: a page that stays, and shards that grow.

region   | page | workers' lines | the first rows' rule |

The last word of the page's first line is the seed of the indices, drawn by who makes the table.
"""

from __future__ import annotations

import secrets

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.memory import Region, Waiting
from phalanx.tables.first_rows import FirstRow, FirstRows
from phalanx.tables.hash_index import mix
from phalanx.tables.key_shard import KeyShard, Regions, first_region
from phalanx.tables.membership import Membership
from phalanx.tables.reservations import Reservations
from phalanx.tables.shard import Entry
from phalanx.tables.sharded import Sharded
from phalanx.tables.spec import Layout, TableSpec

__all__ = ["KeyStorage"]

_SEED = 7
_FIRST_ROWS = Layout.PAGE + Layout.LINES


class KeyStorage(Sharded[KeyShard]):
    """The memory of one keys table, as one process sees it.

    Args:
        spec: What all workers agree on.
        regions: Where the regions come from.
        membership: Who works here.
    """

    shards: list[KeyShard]

    def __init__(self, spec: TableSpec, regions: Regions, membership: Membership) -> None:
        region = _open_page(spec, regions)
        super().__init__(spec, region, regions.open_region, membership)
        self._reservations = Reservations(self._lines, membership)
        self._first_rows = FirstRows(spec, region, _FIRST_ROWS)
        self.shards = [
            KeyShard(
                spec, i, self._line(i), self._lock_of(i), self._first_rows, regions, self._seed
            )
            for i in range(spec.num_shards)
        ]

    @staticmethod
    def regions(spec: TableSpec) -> dict[str, int]:
        """Return names and sizes of what a new table takes."""
        return {
            f"table-{spec.name}": _FIRST_ROWS + FirstRows.needed_bytes(spec),
            **dict(first_region(spec, index) for index in range(spec.num_shards)),
        }

    @property
    def nbytes(self) -> int:
        """How much memory the table takes now, logs apart."""
        if self._closed:
            return 0
        return self.region.nbytes + sum(shard.nbytes for shard in self.shards)

    def _seed(self) -> int:
        return self._page[_SEED]

    def _write_first(self, init: FirstRow) -> None:
        self._page[_SEED] = secrets.randbits(63)  # before the first generation is looked at
        self._first_rows.write(init)
        for shard in self.shards:
            shard.begin()

    def _owners(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        # The upper bits: the lower ones say where in a shard's index a key begins to be sought.
        owners = (mix(rows ^ np.int64(self._seed())) >> np.uint64(32)) % np.uint64(len(self.shards))
        return owners.astype(np.uint8)

    def _add_parts(self, parts: list[tuple[KeyShard, Entry]], waiting: Waiting) -> None:
        """Make room for the new keys in every shard before the first takes its part."""
        slots = [shard.find(part, waiting.remaining_s()) for shard, part in parts]
        found = [(s, part._replace(slots=at)) for (s, part), at in zip(parts, slots, strict=True)]
        num_new = [len(at.new_keys) for at in slots]
        if not any(num_new):
            super()._add_parts(found, waiting)
            return
        with self._reservations.of(parts[0][1].worker, max(num_new)):
            for (shard, _), brings in zip(parts, num_new, strict=True):
                if brings:
                    shard.make_room(self._reservations.total, waiting.remaining_s())
            super()._add_parts(found, waiting)

    # --- all of it --------------------------------------------------------------------------------

    def num_keys(self) -> int:
        """Return how many keys are there."""
        return sum(shard.num_rows for shard in self.shards)

    def keys(self, timeout_s: float) -> Tensor:
        """Return the keys that are there, in ascending order."""
        keys = torch.cat([shard.copy_keys(timeout_s) for shard in self.shards])
        return keys.sort().values

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        """Return the keys, ascending, their values and their states; each shard's of one moment."""
        found = [shard.copy_all(timeout_s) for shard in self.shards]
        keys, *parts = [torch.cat(pieces) for pieces in zip(*found, strict=True)]
        keys, order = keys.sort()
        return [keys, *(part[order] for part in parts)]

    def replace_all(self, parts: list[Tensor], timeout_s: float) -> None:
        """Replace everything by these keys, each once, and their values and states."""
        keys, *others = parts
        owners = self._owners(keys.numpy())
        for index, shard in enumerate(self.shards):
            mine = torch.from_numpy(owners == index)
            shard.replace(keys[mine], [part[mine] for part in others], timeout_s)


def _open_page(spec: TableSpec, regions: Regions) -> Region:
    name = f"table-{spec.name}"
    return regions.open_region(name, KeyStorage.regions(spec)[name])
