"""A table whose rows lie on several hosts, as a worker of one of them uses it.

    rows      0 1 2 3 │ 4 5 6 7 │ 8 9 10      matrix: a range on each host
    host           0  │      1  │     2       keys: by the key, hashed

Each host's part is a table of its own there, of which all workers of the run are workers
(host_service.py). A call is cut by host; what is asked of other hosts is under way while this
host's part is done. So an add is whole or absent per host, as it is per shard, and a round is in on
a host when all workers have arrived there.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.cluster import PendingCall
from phalanx.errors import PhalanxError
from phalanx.ipc import Waiting
from phalanx.memory import MatrixRows, all_within
from phalanx.tables.deferred_adds import finish_all
from phalanx.tables.host_operations import part_of, part_starts
from phalanx.tables.keys import KeyStorage
from phalanx.tables.membership import Barrier
from phalanx.tables.part import Entry, checked
from phalanx.tables.remote_part import RemoteHost, RemotePart
from phalanx.tables.row_initializer import Uniform, mix
from phalanx.tables.sharded import Storage
from phalanx.tables.spec import TableSpec
from phalanx.tables.values import outside

__all__ = ["HostsOfRun", "SpreadBarrier", "SpreadStorage"]

_KEYS_SEED = np.int64(0x5DEECE66D)  # another than those of shards, which are drawn


class HostsOfRun(NamedTuple):
    """Where a process stands among the hosts of a run.

    Attributes:
        me: This host's number.
        num_hosts: How many there are.
        remotes_of: Returns the other hosts, by number, as a worker of this process reaches them.
        master: Returns the master, as a worker sees it.
    """

    me: int
    num_hosts: int
    remotes_of: Callable[[int], dict[int, RemoteHost]]
    master: Callable[[int], int]


class _Cut(NamedTuple):
    """What of a list of rows is on one host.

    Attributes:
        rows: Or keys.
        places: Where in the list they stood.
    """

    rows: Tensor
    places: Tensor


_Pending = tuple[RemotePart, PendingCall]
_Wanted = dict[int, tuple[Tensor | None, Tensor]]
"""By host, the rows of its part that are read, None for all, and where they go."""


class SpreadStorage:
    """All parts of a table, as the workers of one process use them.

    Args:
        spec: The table, of all hosts.
        local: This host's part.
        hosts: The hosts.
    """

    def __init__(self, spec: TableSpec, local: Storage | KeyStorage, hosts: HostsOfRun) -> None:
        self.spec = spec
        self.local = local
        self.rounds = SpreadRounds(self)
        self._hosts = hosts
        self._parts: dict[int, dict[int, RemotePart]] = {}  # by worker, then by host
        self._starts = part_starts(spec, hosts.num_hosts)
        self._bounds = self._starts[1:-1]

    def remote_parts(self, worker: int) -> dict[int, RemotePart]:
        """Return the parts on other hosts, by number, for a worker of this process."""
        parts = self._parts.get(worker)
        if parts is None:
            parts = self._parts[worker] = {
                host: RemotePart(remote, part_of(self.spec, host, self._hosts.num_hosts))
                for host, remote in self._hosts.remotes_of(worker).items()
            }
        return parts

    def forget(self, worker: int) -> None:
        """Let go of what a worker that has closed had; another may get its number."""
        self._parts.pop(worker, None)

    def _any_parts(self) -> dict[int, RemotePart]:
        """Return the parts as some worker reaches them, one that has not left if there is any."""
        by_worker = list(self._parts.values())  # none where all have closed
        here = (p for p in by_worker if not any(part.remote.has_left for part in p.values()))
        return next(here, by_worker[0] if by_worker else {})

    # --- the first value ----------------------------------------------------------------------

    def open(self, worker: int, init: Any, timeout_s: float) -> None:  # Any: as Sharded.open
        """Open every part as ``worker``; see :meth:`Sharded.open`."""
        waiting = Waiting(timeout_s)
        self.local.open(worker, self._init_of(init, self._hosts.me), timeout_s)
        fills = self._hosts.master(worker) == worker
        clocks = {
            host: part.open(self._init_of(init, host), fills, waiting.remaining_s())
            for host, part in self.remote_parts(worker).items()
        }
        if self.spec.staleness.is_bulk_synchronous:
            # A worker that comes later finds rounds that are in on one host and not on another.
            latest = max(self.local.rounds.clock_of(worker), *clocks.values())
            self.local.rounds.arrive_at(worker, latest)
            for host, part in self.remote_parts(worker).items():
                if clocks[host] < latest:
                    part.wait(part.begin_arrive(latest, waiting.remaining_s()))

    def _init_of(self, init: Tensor | Uniform, host: int) -> Tensor | Uniform:
        if isinstance(init, Uniform) or self.spec.has_keys or init.dim() == 0:
            return init
        return init[self._starts[host] : self._starts[host + 1]]

    # --- reading and changing -----------------------------------------------------------------

    def holder_of(self, rows: Tensor | None) -> SpreadStorage | Storage | KeyStorage:
        """Return the storage that has these rows: this host's own where that has them all.

        See :meth:`Sharded.holder_of`. So a call for own rows costs what it does on one host.
        """
        if rows is None:
            return self
        own = self.local.spec
        if self.spec.has_keys:
            return self if rows.numel() else self.local
        if all_within(rows, own.rows, own.first_row):
            return self.local
        if not all_within(rows, self.spec.rows):
            raise outside(rows, self.spec)
        return self

    def read(self, rows: Tensor | None, out: Tensor, worker: int, timeout_s: float) -> None:
        """Copy rows, checked, into ``out``; see :meth:`Sharded.read`."""
        if rows is None:
            hosts = range(self._hosts.num_hosts)
            wanted: _Wanted = {host: (None, self._span(out, host)) for host in hosts}
            self._read_parts(wanted, worker, timeout_s)
            return
        host = self._owner(rows)
        if host is not None and host != self._hosts.me:
            part, waiting = self.remote_parts(worker)[host], Waiting(timeout_s)
            part.remote.deferred.finish(timeout_s)
            part.wait(part.begin_read(rows, out, waiting.remaining_s()))
            return
        cuts = self._cut(rows)
        sorted_out, wanted, at = torch.empty_like(out), {}, 0
        for host, cut in cuts.items():
            wanted[host] = (cut.rows, sorted_out[at : at + len(cut.rows)])
            at += len(cut.rows)
        self._read_parts(wanted, worker, timeout_s)
        order = torch.cat([cut.places for cut in cuts.values()])
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device="cpu"))
        MatrixRows(sorted_out).take(back, out)

    def _read_parts(self, wanted: _Wanted, worker: int, timeout_s: float) -> None:
        """Read from each host; what is asked of others is under way while this one's is read."""
        mine = wanted.get(self._hosts.me)
        waiting = Waiting(timeout_s)
        parts = {h: part for h, part in self.remote_parts(worker).items() if h in wanted}
        _finish_adds(parts.values(), timeout_s)  # a worker reads what it has added

        def begin(host: int) -> _Pending:
            return parts[host], parts[host].begin_read(*wanted[host], waiting.remaining_s())

        def read_here() -> None:
            if mine is not None:
                self.local.read(*mine, worker, timeout_s)

        _ask(parts, begin, read_here)

    def _span(self, all_rows: Tensor, host: int) -> Tensor:
        return all_rows[self._starts[host] : self._starts[host + 1]]

    def add(self, entry: Entry, timeout_s: float) -> None:
        """Take one add, checked; see :meth:`Sharded.add`."""
        entries = self._entries(checked(entry))
        mine = entries.get(self._hosts.me)
        waiting, all_parts = Waiting(timeout_s), self.remote_parts(entry.worker)
        parts = {host: all_parts[host] for host in entries if host in all_parts}
        _finish_adds(parts.values(), timeout_s)  # a worker's adds are taken in their order

        def begin(host: int) -> _Pending:
            return parts[host], parts[host].begin_add([entries[host]], waiting.remaining_s())

        def add_here() -> None:
            if mine is not None:
                self.local.add(mine, timeout_s)

        _with_all(_adding(parts), lambda: _ask(parts, begin, add_here))

    def add_later(self, entry: Entry, timeout_s: float) -> None:
        """Take one add, of which only this host's part is in when this returns."""
        parts, waiting = self.remote_parts(entry.worker), Waiting(timeout_s)
        entries = self._entries(checked(entry))
        mine = entries.pop(self._hosts.me, None)
        for host in entries:  # first: an earlier add's error must not leave half of this one
            parts[host].remote.deferred.wait_for_room(waiting.remaining_s())
        if mine is not None:
            self.local.add(mine, timeout_s)
        for host, each in entries.items():
            # Copies: the caller may change what it gave as soon as this returns.
            rows = None if each.rows is None else each.rows.clone()
            kept = each._replace(delta=each.delta.clone(), rows=rows)
            parts[host].remote.deferred.put(parts[host], kept, timeout_s)

    def finish_adds(self, worker: int, timeout_s: float) -> None:
        """Wait until what ``worker`` has added is in on all hosts."""
        _finish_adds(self.remote_parts(worker).values(), timeout_s)

    def _entries(self, entry: Entry) -> dict[int, Entry]:
        """Cut an add by host, in the order of their numbers."""
        if entry.rows is None:
            return {
                host: entry._replace(delta=self._span(entry.delta, host))
                for host in range(self._hosts.num_hosts)
            }
        host = self._owner(entry.rows)
        if host is not None:
            return {host: entry}
        cuts = self._cut(entry.rows)
        return {
            host: entry._replace(rows=cut.rows, delta=entry.delta[cut.places])
            for host, cut in cuts.items()
        }

    def _owner(self, rows: Tensor) -> int | None:
        """Return the host that has all of these rows; None of several."""
        if not rows.numel():
            return self._hosts.me
        if self.spec.has_keys:
            return None
        host = bisect_right(self._bounds, rows[0].item())
        start, stop = self._starts[host : host + 2]
        return host if all_within(rows, stop - start, start) else None

    def _cut(self, rows: Tensor) -> dict[int, _Cut]:
        """Cut rows by host; those of one host stay in their order."""
        numbers = rows.numpy()
        owners = self._owners(numbers)
        cuts = {}
        for host in np.unique(owners).tolist():
            places = np.flatnonzero(owners == host)
            cuts[host] = _Cut(torch.from_numpy(numbers[places]), torch.from_numpy(places))
        return cuts

    def _owners(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.spec.has_keys:
            mixed = mix(rows ^ _KEYS_SEED) >> np.uint64(32)
            return (mixed % np.uint64(self._hosts.num_hosts)).astype(np.int64)
        return np.searchsorted(self._bounds, rows, side="right")

    # --- all of it ----------------------------------------------------------------------------

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        """Return copies of all parts, joined; each host's is of a moment of its own."""
        found = {self._hosts.me: self.local.copy_all(timeout_s)}
        for host, part in self._any_parts().items():
            found[host] = part.copy_all(timeout_s)
        joined = [torch.cat(each) for each in zip(*(found[h] for h in sorted(found)), strict=True)]
        if self.spec.has_keys:
            keys, order = joined[0].sort()
            joined = [keys, *(part[order] for part in joined[1:])]
        return joined

    def replace_all(self, parts: list[Tensor], timeout_s: float) -> None:
        """Replace everything; see :meth:`Storage.replace_all`."""
        hosts: dict[int, Storage | KeyStorage | RemotePart] = dict(self._any_parts())
        hosts[self._hosts.me] = self.local
        owners = torch.from_numpy(self._owners(parts[0].numpy())) if self.spec.has_keys else None
        for host in sorted(hosts):
            if owners is None:
                own = [self._span(part, host) for part in parts]
            else:
                own = [part[owners == host] for part in parts]
            hosts[host].replace_all(own, timeout_s)

    def num_keys(self) -> int:
        """Return how many keys are there."""
        return self._local_keys().num_keys() + sum(counts[1] for counts in self._counts())

    def keys(self, timeout_s: float) -> Tensor:
        """Return the keys that are there, in ascending order."""
        others = [part.keys(timeout_s) for part in self._any_parts().values()]
        return torch.cat([self._local_keys().keys(timeout_s), *others]).sort().values

    def _local_keys(self) -> KeyStorage:
        assert isinstance(self.local, KeyStorage)
        return self.local

    @property
    def num_undone(self) -> int:
        """How many interrupted adds were undone, by anybody, on all hosts."""
        return self.local.num_undone + sum(counts[0] for counts in self._counts())

    @property
    def nbytes(self) -> int:
        """How much memory this host's part takes, logs apart."""
        return self.local.nbytes

    def _counts(self) -> list[tuple[int, int, int]]:
        return [part.counts(_COUNTS_S) for part in self._any_parts().values()]

    def close(self) -> None:
        """Let go of this host's part."""
        self.local.close()


_COUNTS_S = 30.0


class _SpreadArrival(NamedTuple):
    local: Any  # the arrival at this host's round
    number: int
    worker: int


class SpreadRounds:
    """The rounds of a bulk-synchronous table: the same round on each host.

    Args:
        storage: The table.
    """

    def __init__(self, storage: SpreadStorage) -> None:
        self._storage = storage
        self._turns: dict[int, threading.Lock] = {}  # by worker

    def put(self, entry: Entry, timeout_s: float) -> None:
        """Put an add down for its worker's round, on every host that has rows of it."""
        storage, worker = self._storage, entry.worker
        rounds, all_parts = storage.local.rounds, storage.remote_parts(worker)
        entries = storage._entries(checked(entry))
        mine = entries.get(storage._hosts.me)
        parts = {host: all_parts[host] for host in entries if host in all_parts}

        def put() -> None:
            number = rounds.clock_of(worker) + 1

            def begin(host: int) -> _Pending:
                return parts[host], parts[host].begin_add([entries[host]], timeout_s, number)

            def put_here() -> None:
                if mine is not None:
                    rounds.put_into(mine, number, timeout_s)

            _ask(parts, begin, put_here)

        # In the order of their numbers: one that comes late is taken for a repetition.
        _with_all([self._turn_of(worker), *_adding(parts)], put)

    def arrive(self, worker: int) -> _SpreadArrival:
        """Say that ``worker`` has put down all of its round."""
        storage = self._storage
        parts = storage.remote_parts(worker)
        _finish_adds(parts.values(), _COUNTS_S)  # adds to other tables are in before a round ends
        with self._turn_of(worker):  # no thread of the worker puts anything down meanwhile
            local = storage.local.rounds.arrive(worker)
        _ask(
            parts,
            lambda host: (parts[host], parts[host].begin_arrive(local.number, _COUNTS_S)),
            None,
        )
        return _SpreadArrival(local, local.number, worker)

    def finish(self, arrival: _SpreadArrival, timeout_s: float) -> None:
        """Wait until the round is in on every host; see :meth:`Rounds.finish`."""
        parts = self._storage.remote_parts(arrival.worker)
        pendings: list[_Pending] = []
        try:
            for part in parts.values():
                pendings.append((part, part.begin_finish(arrival.number, timeout_s)))
            try:
                self._storage.local.rounds.finish(arrival.local, timeout_s)
            except PhalanxError:
                _wait_for(pendings)  # a silent host may be why others stay away
                raise
            _wait_for(pendings)
        finally:
            _abandon(pendings)

    def _turn_of(self, worker: int) -> threading.Lock:
        """Return what a worker's threads hold while the round that it is in must stay."""
        return self._turns.setdefault(worker, threading.Lock())


class SpreadBarrier:
    """The barriers of a run on several hosts: all workers come to those of the first one.

    Args:
        local: This host's, where it is the first.
        hosts: The hosts.
    """

    def __init__(self, local: Barrier, hosts: HostsOfRun) -> None:
        self._local = local
        self._hosts = hosts

    def wait(self, worker: int, name: str, timeout_s: float) -> int:
        """Come, wait for the others, and return the round; see :meth:`Barrier.wait`."""
        remotes = self._hosts.remotes_of(worker)
        # Before it comes: others count from there.
        finish_all((remote.deferred for remote in remotes.values()), timeout_s)
        if self._hosts.me == 0:
            return self._local.wait(worker, name, timeout_s)
        return remotes[0].wait_at_barrier(name, timeout_s)


def _adding(parts: Mapping[int, RemotePart]) -> list[threading.Lock]:
    """Return the locks of adds, in the order of hosts: two threads never hold them crosswise."""
    return [parts[host].adding for host in sorted(parts)]


def _finish_adds(parts: Iterable[RemotePart], timeout_s: float) -> None:
    finish_all((part.remote.deferred for part in parts), timeout_s)


def _ask(
    hosts: Iterable[int],
    begin: Callable[[int], _Pending],
    here: Callable[[], None] | None,
) -> None:
    """Begin a call on each host, do this host's part meanwhile, and wait for all answers.

    Where one cannot begin, or this host's part fails, the others are waited for all the same, and
    notes on the error say what became of them. A Ctrl-C waits, too; a second one does not.
    """
    pendings: list[_Pending] = []
    try:
        try:
            for host in hosts:
                pendings.append(begin(host))
            if here is not None:
                here()
        except BaseException as error:
            for part, pending in pendings:
                try:
                    part.wait(pending)
                    name = part.remote.name
                    error.add_note(f"{name} has done its part of {pending.title}.")
                except PhalanxError as other:
                    error.add_note(f"Also failed: {type(other).__name__}: {other}")
            raise
        _wait_for(pendings)
    finally:
        _abandon(pendings)


def _wait_for(pendings: Sequence[_Pending]) -> None:
    """Wait for all answers; the error of a host that does not answer comes before all others."""
    errors: list[tuple[bool, PhalanxError]] = []
    for part, pending in pendings:
        try:
            part.wait(pending)
        except PhalanxError as exc:
            errors.append((pending.answered, exc))
    if errors:
        raise min(errors, key=lambda each: each[0])[1]


def _abandon(pendings: Iterable[_Pending]) -> None:
    """Leave no call behind: the answer of one would come into memory that is the caller's again."""
    for part, pending in pendings:
        part.abandon(pending)


def _with_all(locks: Sequence[threading.Lock], call: Callable[[], None]) -> None:
    """Call while all locks are held.

    By recursion: between taking a lock and noting it, an `ExitStack` has moments at which a Ctrl-C
    leaves it held for good, and a `with` has none.
    """
    if not locks:
        call()
        return
    with locks[0]:
        _with_all(locks[1:], call)
