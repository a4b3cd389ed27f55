"""The memory of a keys table: a page that stays, and shards that grow.

region   | page (table_page.py) | row initializer |

# Note [Capacity claims]
An add to several shards must not run out of memory at the third shard after two have taken their
part. So it first claims, on its worker's line of the page, room for as many new keys as it may
bring to any one shard, makes every shard grow until all claims fit, and withdraws its claim when
all shards have their part:

    keys present + claims of all workers  ≤  capacity        checked with the shard's lock held

Everybody counts everybody's claims, so nobody fills room that another has claimed. The claim of a
dead worker counts until the worker is marked dead.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.ipc import Waiting, aligned
from phalanx.tables.hash_index import mix
from phalanx.tables.key_shard import KeyShard, first_region
from phalanx.tables.membership import Membership
from phalanx.tables.part import Entry
from phalanx.tables.row_initializer import RowInit, RowInitializer
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.sharded import Sharded
from phalanx.tables.spec import TableSpec
from phalanx.tables.table_page import CLAIMED, CLAIMED_AS, SEED, TablePage

__all__ = ["CapacityClaims", "KeyStorage"]

_LOOK_S = 30.0  # for the adds of the dead, where a caller gives no deadline


class CapacityClaims:
    """Claims of all workers, as one process sees them. See Note [Capacity claims].

    Args:
        page: The table's.
        membership: Whose claims count.
    """

    def __init__(self, page: TablePage, membership: Membership) -> None:
        self._page = page
        self._membership = membership
        self._mutex = threading.Lock()  # threads may share a worker, and so its line

    @contextmanager
    def claim(self, worker: int, num_keys: int) -> Iterator[None]:
        """Claim room for ``num_keys`` new keys in every shard. The caller makes the room."""
        self._change(worker, num_keys)
        try:
            yield
        finally:
            self._change(worker, -num_keys)

    def total(self) -> int:
        """Return for how many new keys every shard must have room."""
        claimed = self._page.of_workers(CLAIMED)
        return sum(n for worker, n in enumerate(claimed) if n and self._counts(worker))

    def _counts(self, worker: int) -> bool:
        return self._membership.is_here(worker, self._page.worker(worker)[CLAIMED_AS])

    def _change(self, worker: int, num_keys: int) -> None:
        line = self._page.worker(worker)
        with self._mutex:
            before = line[CLAIMED] if self._counts(worker) else 0
            line[CLAIMED] = before + num_keys
            line[CLAIMED_AS] = self._membership.incarnation(worker)


def _page_bytes(spec: TableSpec) -> int:
    return aligned(TablePage.needed_bytes(spec.num_shards))


class KeyStorage(Sharded[KeyShard]):
    """The memory of one keys table, as one process sees it.

    Args:
        spec: What all workers agree on.
        regions: Where its regions come from.
        membership: The workers of the run.
    """

    shards: list[KeyShard]

    def __init__(self, spec: TableSpec, regions: RunRegions, membership: Membership) -> None:
        super().__init__(spec, regions, membership)
        self._claims = CapacityClaims(self._page, membership)
        first = RowInitializer(spec, self.region, _page_bytes(spec))
        self.shards = [
            KeyShard(
                spec,
                i,
                self._page.shard(i),
                self._lock_of(i),
                first,
                regions,
                self._seed,
                self._page.done(i),
                self._logged_for(i),
            )
            for i in range(spec.num_shards)
        ]

    @staticmethod
    def region_sizes(spec: TableSpec) -> dict[str, int]:
        """Return names and sizes of the regions of a new table."""
        return {
            f"table-{spec.name}": _page_bytes(spec) + RowInitializer.needed_bytes(spec),
            **dict(first_region(spec, index) for index in range(spec.num_shards)),
        }

    @property
    def nbytes(self) -> int:
        """How much memory the table takes now, logs apart."""
        if self._closed:
            return 0
        return self.region.nbytes + sum(shard.nbytes for shard in self.shards)

    def _seed(self) -> int:
        return self._page.table[SEED]

    def _begin_shards(self, init: RowInit) -> None:
        self._page.table[SEED] = secrets.randbits(63)  # before the first segment is looked at
        for shard in self.shards:
            shard.begin(init)

    def _owners(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        # The upper bits: the lower ones say where in a shard's index a key begins to be sought.
        owners = (mix(rows ^ np.int64(self._seed())) >> np.uint64(32)) % np.uint64(len(self.shards))
        return owners.astype(np.uint8)

    @contextmanager
    def _room_for(self, entries: list[Entry], waiting: Waiting) -> Iterator[None]:
        """Have room for new keys in every shard, before the first takes its part."""
        num_new = {
            id(shard): (shard, shard.num_new(part))
            for entry in entries
            for shard, part in self._parts_of(entry)
        }
        most = max((count for _, count in num_new.values()), default=0)
        if not most:
            yield
            return
        with self._claims.claim(entries[0].worker, most):
            for shard, brings in num_new.values():
                if brings:
                    shard.make_room(self._claims.total, waiting.remaining_s())
            yield

    # --- all of it --------------------------------------------------------------------------------

    def num_keys(self) -> int:
        """Return how many keys are there."""
        self._end_logged_adds(_LOOK_S)
        return sum(shard.num_rows for shard in self.shards)

    def keys(self, timeout_s: float) -> Tensor:
        """Return the keys that are there, in ascending order."""
        self._end_logged_adds(timeout_s)
        keys = torch.cat([shard.copy_keys(timeout_s) for shard in self.shards])
        return keys.sort().values

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        """Return the keys, ascending, their values and their states; each shard's of one moment."""
        self._end_logged_adds(timeout_s)
        found = [shard.copy_all(timeout_s) for shard in self.shards]
        keys, *parts = [torch.cat(pieces) for pieces in zip(*found, strict=True)]
        keys, order = keys.sort()
        return [keys, *(part[order] for part in parts)]

    def replace_all(self, parts: list[Tensor], timeout_s: float) -> None:
        """Replace everything by these keys, each once, and their values and states."""
        owners = self._owners(parts[0].numpy())
        for index, shard in enumerate(self.shards):
            mine = torch.from_numpy(owners == index)
            shard.replace_all([part[mine] for part in parts], timeout_s)
