"""A table's memory, as one process sees it; its workers' handles share it."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from phalanx.errors import PeerTimeout
from phalanx.memory import LockFile, Region
from phalanx.tables.membership import Membership, await_others
from phalanx.tables.rounds import READY, OpenRegion, Rounds
from phalanx.tables.shard import Entry, Shard
from phalanx.tables.spec import Layout, TableSpec
from phalanx.tables.updaters import state_dtype

__all__ = ["Storage", "agree_on"]

_SPEC_BYTES = 8192


def agree_on(
    spec: TableSpec, open_region: OpenRegion, membership: Membership, timeout_s: float
) -> None:
    """Write the spec down as the table's first worker, or compare it with what that one gave.

    The table's memory is taken first: where there is not enough, the name stays free.

    Raises:
        ConfigError: Another worker made a table of this name and of another kind.
    """
    words = open_region(f"spec-{spec.name}", _SPEC_BYTES).buffer
    length = words[:8].cast("q")
    with membership.lock.exclusive(timeout_s):
        if length[0]:
            spec.refuse_other(json.loads(bytes(words[8 : 8 + length[0]])))
            return
        open_region(f"table-{spec.name}", Layout.of(spec).nbytes)
        text = spec.to_json().encode()
        words[8 : 8 + len(text)] = text
        length[0] = len(text)


class Storage:
    """The region of one table, cut into shards.

    Args:
        spec: What all workers agree on.
        open_region: Where the region comes from.
        membership: Who works here.
    """

    def __init__(self, spec: TableSpec, open_region: OpenRegion, membership: Membership) -> None:
        self.spec = spec
        self._membership = membership
        self._layout = layout = Layout.of(spec)
        self.region = region = open_region(f"table-{spec.name}", layout.nbytes)
        self._file = LockFile(region)
        self._page = region.buffer[: layout.PAGE].cast("q")
        self._lock = self._file.range(0, 64, label=f"rounds of table {spec.name}")
        self._parts = self._all_parts(region)
        self.shards = [self._shard(index) for index in range(spec.num_shards)]
        self.bounds = torch.tensor(layout.first_rows[1:-1], dtype=torch.int64)
        self.rounds = Rounds(
            spec=spec,
            page=self._page[:8],
            lines=region.buffer[layout.PAGE : layout.PAGE + layout.LINES].cast("q"),
            lock=self._lock,
            membership=membership,
            open_region=open_region,
            take_in=self._take_in,
        )

    @property
    def nbytes(self) -> int:
        """How much memory the table takes, logs apart."""
        return self.region.nbytes

    def _all_parts(self, region: Region) -> list[tuple[Tensor, Tensor]]:
        """Values and states, each of A and of B, as (rows, width)."""
        spec, layout = self.spec, self._layout
        kinds = [(*layout.values, spec.cols, spec.dtype)]
        kinds += [(a, b, width, state_dtype(spec.dtype)) for a, b, width in layout.states]
        parts = []
        for a, b, width, dtype in kinds:
            sides = [
                region.tensor(dtype, spec.rows * width, at).view(spec.rows, width) for at in (a, b)
            ]
            parts.append((sides[0], sides[1]))
        return parts

    def _backups(self) -> list[Tensor]:
        spec, size = self.spec, Layout.backup_bytes(self.spec)
        return [
            self.region.tensor(
                spec.dtype, spec.rows * spec.cols, self._layout.backups + worker * size
            ).view(spec.rows, spec.cols)
            for worker in range(spec.num_backups)
        ]

    def _shard(self, index: int) -> Shard:
        layout, spec = self._layout, self.spec
        first, stop = layout.first_rows[index : index + 2]
        line = 8 * (1 + index)
        values, *states = [(a[first:stop], b[first:stop]) for a, b in self._parts]
        return Shard(
            lock=self._file.range(8 * line, 64, label=f"shard {index} of table {spec.name}"),
            header=self._page[line : line + 8],
            values=values,
            states=states,
            ids=self.region.tensor(torch.int64, layout.undo_rows[index], layout.ids[index]),
            backups=[backup[first:stop] for backup in self._backups()],
            updater=spec.updater,
            first_row=first,
        )

    # --- the first value --------------------------------------------------------------------------

    def open(self, worker: int, init: Tensor | float | None, timeout_s: float) -> None:
        """Fill the table as the master, or wait until the master has; then begin as ``worker``.

        Raises:
            PeerTimeout: The master did not open the table; ``.rank`` is its number.
        """

        def ready() -> bool:
            if not self._page[READY] and min(self._membership.holding(), default=worker) == worker:
                self._fill(init, timeout_s)
            return bool(self._page[READY])

        if not await_others(ready, lambda: self._membership.bury(timeout_s), timeout_s):
            master = min(self._membership.holding())
            raise PeerTimeout(
                f"Worker {master}, the master, must open table {self.spec.name!r} first, but did "
                f"not within {timeout_s:g} s.",
                master,
            )
        if self.spec.staleness.is_bulk_synchronous:
            self.rounds.enter(worker, timeout_s)
        for shard in self.shards:
            shard.begin_backup(worker, timeout_s)

    def _fill(self, init: Tensor | float | None, timeout_s: float) -> None:
        with self._lock.exclusive(timeout_s):
            if self._page[READY]:
                return
            for shard in self.shards:
                shard.begin()
            for (state, _), first in zip(
                self._parts[1:], self.spec.updater.first_states(), strict=True
            ):
                state.fill_(first)
            values = self._parts[0][0]
            if isinstance(init, Tensor):
                values.copy_(init)
            else:
                values.fill_(0 if init is None else init)
            self._page[READY] = 1

    # --- reading and changing ---------------------------------------------------------------------

    def read(self, rows: Tensor | None, out: Tensor, worker: int, timeout_s: float) -> None:
        """Copy rows, checked, into ``out``."""
        if len(self.shards) == 1:
            self._read_from(self.shards[0], rows, out, worker, timeout_s)
        elif rows is None:
            for shard in self.shards:
                part = out[shard.first_row : shard.first_row + shard.num_rows]
                self._read_from(shard, None, part, worker, timeout_s)
        else:
            for shard, places in self._route(rows):
                part = torch.empty((len(places), out.shape[1]), dtype=out.dtype)
                self._read_from(shard, rows[places] - shard.first_row, part, worker, timeout_s)
                out.index_copy_(0, places, part)

    def _read_from(
        self, shard: Shard, rows: Tensor | None, out: Tensor, worker: int, timeout_s: float
    ) -> None:
        if self.spec.num_backups and self._membership.is_here(worker):
            shard.read_and_back_up(rows, out, worker, timeout_s)
        else:
            shard.read(rows, out, timeout_s)

    def add(self, entry: Entry, timeout_s: float) -> None:
        """Take one add, checked, shard by shard."""
        for shard, part in self._parts_of(entry):
            shard.add(part, timeout_s)

    def _take_in(self, number: int, entries: list[Entry], timeout_s: float) -> None:
        """Take a round's adds; every shard counts each, also those that have no row of it."""
        by_shard: list[list[Entry]] = [[] for _ in self.shards]
        index_by_shard = {id(shard): index for index, shard in enumerate(self.shards)}
        for entry in entries:
            for part in by_shard:
                part.append(self._nothing(entry))
            for shard, piece in self._parts_of(entry):
                by_shard[index_by_shard[id(shard)]][-1] = piece
        for shard, pieces in zip(self.shards, by_shard, strict=True):
            shard.apply_round(number, pieces, timeout_s)

    def _nothing(self, entry: Entry) -> Entry:
        return Entry(
            torch.empty(0, dtype=torch.int64),
            torch.empty((0, self.spec.cols), dtype=self.spec.dtype),
            entry.worker,
        )

    def _parts_of(self, entry: Entry) -> list[tuple[Shard, Entry]]:
        if len(self.shards) == 1:
            return [(self.shards[0], entry)]
        rows, delta, worker, assigns = entry
        if rows is None:
            return [
                (
                    shard,
                    Entry(
                        None,
                        delta[shard.first_row : shard.first_row + shard.num_rows],
                        worker,
                        assigns,
                    ),
                )
                for shard in self.shards
            ]
        return [
            (shard, Entry(rows[places] - shard.first_row, delta[places], worker))
            for shard, places in self._route(rows)
        ]

    def _route(self, rows: Tensor) -> list[tuple[Shard, Tensor]]:
        """Return for each shard that has any of the rows where in the list they stand."""
        owner = torch.bucketize(rows, self.bounds, right=True)
        routed = []
        for index, shard in enumerate(self.shards):
            places = (owner == index).nonzero().view(-1)
            if len(places):
                routed.append((shard, places))
        return routed

    # --- all of it --------------------------------------------------------------------------------

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        """Return copies of the values and of each state; every shard's are of one moment."""
        copies = [torch.empty_like(a) for a, _ in self._parts]
        for shard in self.shards:
            rows = slice(shard.first_row, shard.first_row + shard.num_rows)
            for target, part in zip(copies, shard.read_states(timeout_s), strict=True):
                target[rows] = part
        return copies

    def replace_all(self, parts: list[Tensor], timeout_s: float) -> None:
        """Replace the values, and as many states as are given."""
        for shard in self.shards:
            rows = slice(shard.first_row, shard.first_row + shard.num_rows)
            shard.assign([part[rows] for part in parts], timeout_s)

    @property
    def num_undone(self) -> int:
        """How many interrupted adds were undone, by anybody."""
        return sum(shard.num_undone for shard in self.shards)

    def close(self) -> None:
        """Let go of the locks; the memory goes with the last tensor over it."""
        self._file.close()
