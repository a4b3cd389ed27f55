"""A table whose rows are found by key, as one worker holds it."""

from __future__ import annotations

from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.tables.key_storage import KeyStorage
from phalanx.tables.shard import Entry
from phalanx.tables.table import Numbers, PendingGet, Rows, Table, TableStats
from phalanx.tables.values import read_rows, read_value

__all__ = ["KeyTable"]


class KeyTable(Table):
    """Rows that are found by key, any int64, and that come with the first add; see ``world.keys``.

    It is used as any table, with keys for row numbers; what it promises of adds and gets holds for
    new keys as well. A key that is not there reads as the table's first row, and a get does not
    make it. There is no get of everything: keys come while it is read. ``table.get(table.keys())``
    reads what is there. :meth:`restore` takes away keys that are not in the snapshot; first rows
    stay this table's own.

    Example:
        >>> from phalanx import tables
        >>> with tables.join() as world:
        ...     table = world.keys(2, init=0.5)
        ...     table.add([[1, 1], [2, 2], [3, 3]], rows=[10**18, -4, -4])
        ...     table.get([-4, 7]).tolist(), table.keys().tolist(), len(table)
        ([[5.5, 5.5], [0.5, 0.5]], [-4, 1000000000000000000], 2)
    """

    _storage: KeyStorage

    @property
    def shape(self) -> tuple[int, ...]:
        """(how many keys are there now, cols)."""
        return (len(self), self._spec.cols)

    def __len__(self) -> int:
        """Return how many keys are there."""
        self._check_open()
        return self._storage.num_keys()

    def keys(self) -> Tensor:
        """Return the keys that are there, (K,) int64 in ascending order.

        With several shards, each is of a moment of its own. In a bulk-synchronous table they are
        those of the rounds that are in; this is no get, and ends no round.
        """
        self._check_open()
        return self._storage.keys(self._world.timeout_s)

    def add(self, delta: Numbers, rows: Rows | None = None, *, wait: bool = True) -> None:
        """Give the table a delta for keys; a new key begins with the first row.

        Args:
            delta: (K, cols), as for any table.
            rows: The keys, (K,) int64; a key given twice gets both.
            wait: Whether the add has been taken when this returns. On one host it always has.

        Raises:
            ConfigError: As for any table; or there are no keys. The table is unchanged.
            OutOfSpace: There is no memory for so many keys. The table is unchanged.
            PeerTimeout: Another worker held the shard beyond the deadline.

        Blocks: While another worker adds to the same shard, or it grows.
        """
        super().add(delta, self._some(rows), wait=wait)

    def assign(self, value: Numbers, rows: Rows | None = None) -> None:
        """Replace the rows of keys, past the updater; only the master may. Others stay.

        In a bulk-synchronous table it takes part in the round as an add does.

        Args:
            value: (K, cols).
            rows: The keys, (K,) int64, each once. New keys come.

        Raises:
            ConfigError: Shape or dtype is another, or a key is there twice.
            StateError: Another worker is the master.
            OutOfSpace: There is no memory for so many keys. The table is unchanged.
        """
        self._check_open()
        self._check_master("assign")
        keys = read_rows(self._some(rows), self._spec)
        if len(keys.unique()) != len(keys):
            raise ConfigError(
                "`rows` must hold each key once for `assign`, but one is there twice."
            )
        given = read_value(value, self._spec, len(keys))
        self._take(Entry(keys, given, self._world.worker_id, assigns=True))

    def async_get(self, rows: Rows | None = None, *, out: Tensor | None = None) -> PendingGet:
        """Begin a :meth:`get`; ``wait()`` on the answer ends it. Several may be open."""
        return super().async_get(self._some(rows), out=out)

    def _some(self, rows: Rows | None) -> Rows:
        if rows is None:
            raise ConfigError(
                f"`rows` must be the keys that are meant of table {self.name!r}, but is None. Give "
                "`table.keys()` for all that are there."
            )
        return rows

    def stats(self) -> TableStats:
        """Return what this worker has done so far, and how much memory the table has now."""
        stats = super().stats()
        stats.nbytes = self._storage.nbytes
        return stats
