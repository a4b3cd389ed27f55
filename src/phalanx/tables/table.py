"""A table, as one worker holds it: rows by number, or by key."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError, StateError, UnsupportedError
from phalanx.tables.membership import TICKS
from phalanx.tables.part import Entry
from phalanx.tables.router import Router
from phalanx.tables.snapshots import load_parts, save_parts
from phalanx.tables.spec import TableSpec
from phalanx.tables.values import read_delta, read_out, read_rows

if TYPE_CHECKING:
    from phalanx.tables.table_group import TableGroup

Array = np.ndarray[Any, Any]  # of any shape and dtype: both are checked when they are known
Numbers = Tensor | Array | Sequence[Any]  # nested sequences have no type of their own
Rows = Tensor | Array | Sequence[int]


class Table:
    """Rows that several workers add to and read; made by ``world.matrix`` or ``world.array``.

    An add that has been taken is in every later read of an asynchronous or bounded table, once; in
    those of a bulk-synchronous one from the end of its round on. A worker that dies within an add
    leaves all of it or none of it, on each host.

    Example:
        >>> from phalanx import tables
        >>> with tables.join() as world:
        ...     table = world.matrix(4, 2, name="embed")
        ...     table.add([[1, 1], [2, 2], [3, 3]], rows=[0, 2, 2])
        ...     table.get([2, 0]).tolist()
        [[5.0, 5.0], [1.0, 1.0]]
    """

    def __init__(self, spec: TableSpec, group: TableGroup) -> None:
        """Not for callers, who have ``world.matrix`` and ``world.array``."""
        self._spec = spec
        self._group = group
        self._is_bulk = spec.staleness == 0
        self._is_bounded = bool(spec.staleness)
        self._seen_clock = -1  # lowest clock at the last staleness check
        self._no_rows = torch.empty((0, spec.cols), dtype=spec.dtype, device="cpu")

    @property
    def _storage(self) -> Router:
        """All parts, as the group keeps them; a call that has them ends as if it stayed open."""
        group = self._group
        found = None if group.closed else group._routers.get(self._spec.name)
        if found is None:
            raise StateError(
                f"Table {self.name!r} must belong to a group that this worker has joined, but its "
                f"group {group.why_closed}. Call `join`, and open the table."
            )
        return found

    @property
    def name(self) -> str:
        """The name of the table in its run."""
        return self._spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        """(size,) of an array, (rows, cols) of a matrix."""
        return self._spec.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return self._spec.dtype

    # --- add --------------------------------------------------------------------------------------

    def add(self, delta: Numbers, rows: Rows | None = None) -> None:
        """Add a delta, which the table's updater applies; rows given twice add up.

        Args:
            delta: For ``rows``, or for the whole table. A tensor or array of the table's dtype, or
                a sequence of numbers. It and ``rows`` may be changed as soon as this returns.
            rows: int64, 0-based; of an array, the elements; of a :class:`KeyTable`, the keys.

        Shapes:
            matrix: rows (K,) with delta (K, cols), or delta (rows, cols).
            array: rows (K,) with delta (K,), or delta (size,).

        Raises:
            ConfigError: Shape or dtype is wrong, a row is outside the table, or the delta holds
                NaN or infinity and the table rejects them. The table is unchanged.
            StateError: The group is closed.
            OutOfSpace: Memory is too small for new keys, or to record so many rows. The table is
                unchanged.
            PeerTimeout: Another worker held the rows beyond the deadline.

        Over several hosts a part that fails leaves the other hosts' parts in.

        Collective: No. Blocks: While another worker of a host adds to the table, or it grows, or is
        copied for a snapshot.
        Moves: the delta, once; the rows that it changes, once more for the record.
        """
        spec = self._spec
        index = read_rows(rows, spec)
        value = read_delta(delta, spec, None if index is None else index.numel())
        self._take(Entry(index, value, self._group.worker_id))

    def _take(self, entry: Entry) -> None:
        take = self._storage.put if self._is_bulk else self._storage.add
        take(entry, self._group.timeout_s)

    # --- get --------------------------------------------------------------------------------------

    def get(self, rows: Rows | None = None, *, out: Tensor | None = None) -> Tensor:
        """Read rows, in the order asked, or the whole table; a row may be asked twice.

        Args:
            rows: int64, 0-based; of an array, the elements; of a :class:`KeyTable`, the keys.
            out: A tensor that gets the rows and is returned, so that nothing is allocated.

        Shapes:
            matrix: rows (K,) -> (K, cols), or (rows, cols); array: (K,), or (size,).

        Returns:
            A tensor of the table's dtype on the CPU, the caller's own. It holds every add that this
            worker made before, and never half of an add (on each host).

        Raises:
            ConfigError: A row is outside the table, or ``out`` is of another shape or dtype.
            PeerTimeout: A worker did not come for which the mode waits; ``.rank`` is it. The
                round of a bulk-synchronous table stays ended; the next get is of the same one.

        Collective: In a bulk-synchronous table all workers make the same number of gets.
        Blocks: While an add to the table is under way there, whichever rows it changes. Bounded:
        also until no worker is more than k ticks behind. Bulk: also until every worker has come to
        its get, or closed.
        """
        storage, index = self._storage, read_rows(rows, self._spec)
        target, answer = self._target(index, out)
        number = None
        if self._is_bulk:
            storage.refuse_outside(index)  # before the round ends
            number = storage.arrive(self._group.timeout_s)
        self._read(storage, index, target, number)
        return answer

    def _target(self, index: Tensor | None, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return where rows go, as the table has them, and the same as the caller gets it."""
        spec = self._spec
        num_rows = spec.rows if index is None else index.numel()
        if out is not None:
            return read_out(out, spec, num_rows), out
        target = self._no_rows.new_empty((num_rows, spec.cols))  # faster than `torch.empty`
        if type(target) is not Tensor:
            raise ConfigError(
                f"`get` must be called where torch makes tensors with numbers, but makes a "
                f"{type(target).__name__}. Call it outside of that mode."
            )
        return target, target.view(-1) if spec.is_array else target

    def _read(
        self, storage: Router, rows: Tensor | None, target: Tensor, number: int | None
    ) -> None:
        """Read rows into ``target`` when round ``number``, if there are rounds, is in."""
        group = self._group
        if number is not None:
            storage.finish(number, group.timeout_s)
        if self._is_bounded:
            self._wait_for_slow()
        storage.read(rows, target, group.timeout_s)

    def _wait_for_slow(self) -> None:
        group, bound = self._group, self._spec.staleness
        assert bound is not None
        clock = group.membership.clock(group.worker_id, TICKS) - bound
        if self._seen_clock < clock:
            event = f"clock {clock}, which a get of table {self.name!r} needs,"
            group.membership.wait_for_clocks(TICKS, clock, group.timeout_s, event)
            self._seen_clock = min(group.membership.clocks(TICKS).values(), default=0)

    # --- the rest ---------------------------------------------------------------------------------

    def snapshot(self, directory: str | os.PathLike[str]) -> Path:
        """Write values and updater's state into ``directory``, synced.

        Adds wait while the table is copied in memory, and not while the file is written.

        Each host's part is of one moment. For one moment of the whole table, call it between two
        barriers. Of a bulk-synchronous table it holds the finished rounds; if the caller has no
        get open, these are the same on all hosts.

        Args:
            directory: The folder; an older snapshot of the table there is replaced.

        Returns:
            The file.

        Raises:
            CheckpointError: The directory cannot be written to. An older snapshot is intact.

        Blocks: While an add is under way, or another worker writes to the directory.
        """
        group = self._group
        parts = self._storage.copy_all(group.timeout_s)
        return save_parts(self._spec, parts, Path(directory), group.timeout_s)

    def restore(self, directory: str | os.PathLike[str]) -> None:
        """Replace values and updater's state by what :meth:`snapshot` wrote; only the master may.

        Call it between two barriers. If the master dies meanwhile, all calls raise ``StateError``
        until the next one has restored the table. The number of workers, the mode and
        the updater's options may be others than then.

        Raises:
            CheckpointError: It is missing, damaged or of another table. The table is unchanged.
            StateError: Another worker is the master.
        """
        group, storage = self._group, self._storage
        master = group.membership.master(group.worker_id, group.timeout_s)
        if master != group.worker_id:
            raise StateError(
                f"`restore` must be called by the master, worker {master}, but is called by worker "
                f"{group.worker_id}. Write `if world.is_master:` before it."
            )
        parts = load_parts(self._spec, Path(directory))
        storage.replace_all(parts, group.timeout_s)

    def __reduce__(self) -> tuple[Any, ...]:  # Any: as `object` has it
        raise self.copied()

    def copied(self) -> UnsupportedError:
        """Return the error of a table, or of a module that holds it, that was to be copied."""
        return UnsupportedError(
            f"Table {self.name!r} must stay with the worker that opened it, so a module that holds "
            "it, such as a `TableEmbedding`, cannot be copied, pickled, or run in replicas of "
            "`Trainer` or `DataParallel`. Train it in a loop of your own, in workers that open "
            "the table by its name."
        )

    def __repr__(self) -> str:
        spec = self._spec
        dtype = str(spec.dtype).removeprefix("torch.")
        shape = f"keys x {spec.cols}" if spec.has_keys else "x".join(map(str, spec.shape))
        bounded = f", staleness={spec.staleness}"
        mode = {None: "", 0: ", sync=True"}.get(spec.staleness, bounded)
        kind = type(self).__name__
        return f"{kind}({spec.name!r}, {shape} {dtype}, updater={spec.updater!r}{mode})"


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

    @property
    def shape(self) -> tuple[int, ...]:
        """(how many keys are there now, cols)."""
        return (len(self), self._spec.cols)

    def __len__(self) -> int:
        """Return how many keys are there."""
        return self._storage.num_keys(self._group.timeout_s)

    def keys(self) -> Tensor:
        """Return the keys that are there, (K,) int64 in ascending order.

        On several hosts, the rows of each host are of one moment. In a bulk-synchronous
        table they are those of the rounds that are in; this is no get, and ends no round.
        """
        return self._storage.keys(self._group.timeout_s)
