"""The memory of a table, as one process uses it: a list of parts, on this host and on others.

A call is cut over the parts (cut.py). This host's are done where they lie; what is asked of other
hosts is under way meanwhile. Each host's part is a table of its own there, of which all workers of
the run are workers (host_service.py). So an add is whole or absent per host, and a round is in on a
host when all workers have arrived there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.errors import PhalanxError
from phalanx.ipc import Waiting, fail_point, fail_points
from phalanx.memory import all_within
from phalanx.tables.asking import abandon, ask, wait_for
from phalanx.tables.own_part import OwnPart
from phalanx.tables.part import Entry
from phalanx.tables.spec import TableSpec
from phalanx.tables.values import outside, refuse_nonfinite

if TYPE_CHECKING:  # else runs on one host would import what speaks to others
    from phalanx.cluster import RemoteCall
    from phalanx.tables.remote_part import RemotePart

RemoteParts = Callable[[int], "list[RemotePart]"]
"""Returns a table's parts on other hosts, in their order, as a worker uses them."""

READ_POINTS = ("before read", "reader's lock held", "rows read")
"""Fail points of a get, in order; it takes a lock only where adds overtake it."""

_CALL_S = 30.0  # where a caller gives no deadline


class Router:
    """All parts of a table, for the workers of one process.

    Args:
        spec: The table, of all hosts.
        here: This host's part.
        remote: Returns those of other hosts; None where there is no other.
    """

    def __init__(self, spec: TableSpec, here: OwnPart, remote: RemoteParts | None = None) -> None:
        self.spec = spec
        self.here = here
        self._remote = remote
        self._cut = here.cut
        self._others: dict[int, dict[int, RemotePart]] = {}  # by worker, then by index
        self._turns: dict[int, threading.Lock] = {}  # by worker
        self._part = here.part
        in_order = spec.staleness.is_bulk_synchronous or spec.updater.remembers
        self._looks_itself = spec.has_keys or (remote is None and not in_order)

    def remote_parts(self, worker: int) -> dict[int, RemotePart]:
        """Return the parts on other hosts, by their index, as a worker uses them."""
        others = self._others.get(worker)
        if others is None:
            remote = [] if self._remote is None else self._remote(worker)
            indices = (i for i in range(self._cut.num_parts) if i != self._cut.own)
            others = self._others[worker] = dict(zip(indices, remote, strict=True))
        return others

    def forget(self, worker: int) -> None:
        """Let go of what a worker that has closed had; another may get its number."""
        self._others.pop(worker, None)

    def _all_parts(self, worker: int) -> list[Any]:
        # Any: a `KeyPart` has more methods than a `TablePart`.
        parts: list[Any] = list(self.remote_parts(worker).values())
        parts.insert(self._cut.own, self._part)
        return parts

    # --- the first value --------------------------------------------------------------------------

    def open(self, worker: int, init: Any, timeout_s: float) -> None:  # Any: as `OwnPart.open`
        """Fill all parts as the master, or wait until the master has; then begin as ``worker``.

        Raises:
            PeerTimeout: The master did not open the table; ``.rank`` is its number.
        """
        whole = not isinstance(init, Tensor) or init.dim() == 0 or self.spec.has_keys
        waiting, here, cut = Waiting(timeout_s), self.here, self._cut
        here.open(worker, init if whole else init[cut.span(cut.own)], timeout_s)
        others = self.remote_parts(worker)
        if not others:
            return
        clocks = {
            index: part.open(init if whole else init[cut.span(index)], waiting.remaining_s())
            for index, part in others.items()
        }
        if self.spec.staleness.is_bulk_synchronous:
            # A worker that comes later finds rounds that are in on one host and not on another.
            latest = max(here.rounds.clock_of(worker), *clocks.values())
            here.rounds.arrive(worker, latest)
            for index, part in others.items():
                if clocks[index] < latest:
                    part.begin_arrive(latest, waiting.remaining_s()).wait()

    # --- reading ----------------------------------------------------------------------------------

    def refuse_outside(self, rows: Tensor | None) -> None:
        """Raise if a row is outside the table, unless :meth:`read` and :meth:`add` look themselves.

        Raises:
            ConfigError: One is.
        """
        if not (self._looks_itself or rows is None or all_within(rows, self.spec.rows)):
            raise outside(rows, self.spec)

    def read(self, rows: Tensor | None, out: Tensor, worker: int, timeout_s: float) -> None:
        """Copy rows, checked, into ``out``, as ``worker``."""
        if fail_points.fault is not None:
            fail_point("before read")
        if self._remote is None or self._cut.is_own(rows):
            self._part.read(rows, out, timeout_s)
        else:
            self._read_parts(rows, out, worker, timeout_s)
        if fail_points.fault is not None:
            fail_point("rows read")

    def _read_parts(self, rows: Tensor | None, out: Tensor, worker: int, timeout_s: float) -> None:
        cut = self._cut
        if rows is None:
            spans = range(cut.num_parts)
            self._read_each([(i, None, out[cut.span(i)]) for i in spans], worker, timeout_s)
            return
        index = cut.only_part(rows)
        if index is not None:
            self._read_each([(index, rows, out)], worker, timeout_s)
            return
        order, pieces = cut.route(rows)
        found = torch.empty_like(out)
        self._read_each([(i, own, found[span]) for i, own, span in pieces], worker, timeout_s)
        # The inverse of `order`, because selecting rows is four times as fast as placing them.
        ascending = torch.arange(order.numel(), device="cpu")
        back = torch.empty_like(order).scatter_(0, order, ascending)
        torch.index_select(found, 0, back, out=out)

    def _read_each(
        self, wanted: list[tuple[int, Tensor | None, Tensor]], worker: int, timeout_s: float
    ) -> None:
        """Read rows of parts, None for all of one, into tensors."""
        waiting, others = Waiting(timeout_s), self.remote_parts(worker)

        def read_here() -> None:
            for index, rows, out in wanted:
                if index not in others:
                    self._part.read(rows, out, waiting.remaining_s())

        asked = [(others[index], rows, out) for index, rows, out in wanted if index in others]

        def begin(part: RemotePart, rows: Tensor | None, out: Tensor) -> RemoteCall:
            return part.begin_read(rows, out, waiting.remaining_s())

        ask([partial(begin, *each) for each in asked], read_here)

    # --- changing ---------------------------------------------------------------------------------

    def add(self, entry: Entry, timeout_s: float) -> None:
        """Take one add, whole or not at all on each host; one with a number, once."""
        if self._remote is None or self._cut.is_own(entry.rows):
            self._part.add(entry, timeout_s)
        else:
            self._add_to_hosts(entry, timeout_s)

    def _add_to_hosts(self, entry: Entry, timeout_s: float) -> None:
        refuse_nonfinite(entry.delta, self.spec, "delta")
        mine, others = self._cut_add(entry)
        waiting, parts = Waiting(timeout_s), self.remote_parts(entry.worker)

        def begin(index: int) -> RemoteCall:
            return parts[index].begin_add(others[index], waiting.remaining_s())

        def add_here() -> None:
            if mine is not None:
                self._part.add(mine, timeout_s)

        with self._turn_of(entry.worker):
            ask([partial(begin, index) for index in others], add_here)

    def _cut_add(self, entry: Entry) -> tuple[Entry | None, dict[int, Entry]]:
        """Cut an add: what is this host's, and what is other parts', by their index."""
        cut, rows, delta = self._cut, entry.rows, entry.delta
        others = [index for index in range(cut.num_parts) if index != cut.own]
        if rows is None:
            mine = entry._replace(delta=delta[cut.span(cut.own)])
            return mine, {i: entry._replace(delta=delta[cut.span(i)]) for i in others}
        if cut.is_own(rows):
            return entry, {}
        index = cut.only_part(rows)
        if index is not None:
            return None, {index: entry}
        order, pieces = cut.route(rows)

        def share(own: Tensor, places: Tensor) -> Entry:
            return entry._replace(rows=own, delta=delta[places])

        shares = {i: share(own, order[span]) for i, own, span in pieces}
        return shares.pop(cut.own, None), shares

    # --- rounds -----------------------------------------------------------------------------------

    def put(self, entry: Entry, timeout_s: float) -> None:
        """Log an add for its worker's round, on every host that has rows of it."""
        refuse_nonfinite(entry.delta, self.spec, "delta")
        rounds = self.here.rounds
        if self._remote is None:
            rounds.put(entry, timeout_s)
            return
        mine, others = self._cut_add(entry)
        parts = self.remote_parts(entry.worker)

        def begin(index: int) -> RemoteCall:
            return parts[index].begin_add(others[index], timeout_s, number)

        def put_here() -> None:
            if mine is not None:
                rounds.put(mine, timeout_s, number)

        with self._turn_of(entry.worker):
            number = rounds.clock_of(entry.worker) + 1
            ask([partial(begin, index) for index in others], put_here)

    def arrive(self, worker: int) -> int:
        """Say that ``worker`` has put down all of its round, and return it."""
        rounds, parts = self.here.rounds, list(self.remote_parts(worker).values())
        if not parts:
            return rounds.arrive(worker)
        with self._turn_of(worker):  # no thread of the worker puts anything down meanwhile
            number = rounds.arrive(worker)

        ask([partial(part.begin_arrive, number, _CALL_S) for part in parts])
        return number

    def finish(self, worker: int, number: int, timeout_s: float) -> None:
        """Wait until the round is in on every host; see :meth:`Rounds.finish`."""
        calls: list[RemoteCall] = []
        try:
            for part in self.remote_parts(worker).values():
                calls.append(part.begin_finish(number, timeout_s))
            try:
                self.here.rounds.finish(number, timeout_s)
            except PhalanxError:
                wait_for(calls)  # a silent host may be why others stay away
                raise
            wait_for(calls)
        finally:
            abandon(calls)

    def _turn_of(self, worker: int) -> threading.Lock:
        """Return what a worker's threads hold while they add to other hosts.

        Adds are numbered, and taken in the order of their numbers: one that comes late is taken for
        a repetition. Nor may the round that the worker is in change meanwhile.
        """
        return self._turns.setdefault(worker, threading.Lock())

    # --- all of it --------------------------------------------------------------------------------

    def copy_all(self, worker: int, timeout_s: float) -> list[Tensor]:
        """Return copies of the values and of each state; of a keys table the keys before them.

        Each part's are of one moment; keys ascend.
        """
        parts = self._all_parts(worker)
        if self.spec.has_keys:
            found = [part.copy_all(timeout_s) for part in parts]
            keys, *values = [torch.cat(pieces) for pieces in zip(*found, strict=True)]
            keys, order = keys.sort()
            return [keys, *(each[order] for each in values)]
        if len(parts) == 1:
            copies: list[Tensor] = parts[0].copy_all(timeout_s)
            return copies
        copies = []
        for index, part in enumerate(parts):  # one at a time: the whole may be large
            pieces = part.copy_all(timeout_s)
            copies = copies or [p.new_empty((self.spec.rows, p.shape[1])) for p in pieces]
            for copy, piece in zip(copies, pieces, strict=True):
                copy[self._cut.span(index)] = piece
        return copies

    def replace_all(self, parts: list[Tensor], worker: int, timeout_s: float) -> None:
        """Replace everything by what :meth:`copy_all` returned."""
        of_part: Callable[[int], Any] = self._cut.span  # Any: what a tensor may be indexed by
        if self.spec.has_keys:
            owners = torch.from_numpy(self._cut.owners(parts[0].numpy()).astype("int64"))
            of_part = owners.__eq__
        for index, part in enumerate(self._all_parts(worker)):
            part.replace_all([each[of_part(index)] for each in parts], timeout_s)

    def num_keys(self, worker: int) -> int:
        """Return how many keys are there."""
        return sum(part.num_keys(_CALL_S) for part in self._all_parts(worker))

    def keys(self, worker: int, timeout_s: float) -> Tensor:
        """Return the keys that are there, in ascending order."""
        return torch.cat([part.keys(timeout_s) for part in self._all_parts(worker)]).sort().values

    def num_undone(self, worker: int) -> int:
        """Return how many interrupted adds any worker undid, on all hosts."""
        others = self.remote_parts(worker).values()
        return self._part.num_undone + sum(part.num_undone(_CALL_S) for part in others)

    @property
    def nbytes(self) -> int:
        """How much memory this host's part takes, logs apart."""
        return self.here.memory.nbytes

    def close(self) -> None:
        """Let go of the memory, also where somebody keeps a handle of the table."""
        for each in (self.here, self):  # the parts refer to `here`, and would keep each other
            vars(each).clear()
