"""The collectives of a group whose ranks are on several hosts.

Data for all alike crosses the network once per host, between the hosts' first ranks:

    all_reduce    ranks 0 1 2 │ 3 4      each host adds up in rank order
                      ▼       │  ▼
                      0 <──────> 3       the first ranks add up each a part, in the order of hosts
                      ▼       │  ▼
                  0 1 2       │ 3 4      each host spreads the result

so all ranks get the same bits, in every run; the sum of hosts (0 1 2) and (3 4) is
((r0 + r1) + r2) + (r3 + r4).

Data that differs from rank to rank (gather, scatter, all_to_all) goes straight there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.distributed.error_store import ErrorStore
from phalanx.distributed.fingerprint import has_unequal_parts
from phalanx.distributed.hosts import Hosts
from phalanx.distributed.network import Network
from phalanx.distributed.shared_memory import SharedMemory
from phalanx.distributed.status_pages import Fingerprint
from phalanx.distributed.work import Steps
from phalanx.plan import equal_sizes

__all__ = ["SeveralHosts"]

_PIECE_BYTES = 4 << 20
_SMALL_BYTES = 64 << 10
_REPORT_S = 2.0  # within which the first rank of a host reports what other hosts do wrong


class SeveralHosts:
    """The collectives over ``memory`` on each host, and the network between.

    Args:
        memory: Of the ranks of this host.
        network: To all ranks.
        hosts: The ranks of each host.
        rank: Ours, in the group.
        error_store: Where the first error of the group stands.

    Attributes:
        rank: Ours, in the group; this and the others as in `OneHost`.
    """

    takes_halves = False

    def __init__(
        self,
        memory: SharedMemory,
        network: Network,
        hosts: Hosts,
        rank: int,
        error_store: ErrorStore,
    ) -> None:
        self.rank, self.size = rank, hosts.size
        self.num_hosts = len(hosts.ranks)
        self._memory = memory
        self._network = network
        self._hosts = hosts
        self._host = hosts.host_of(rank)
        self._leads = rank == hosts.leaders[self._host]
        if not self._leads:  # the first rank is to report its error before
            memory.grace_s = _REPORT_S
        self._leaders = [leader for leader in hosts.leaders if leader != rank]
        self._others = [other for other in range(hosts.size) if other != rank]
        self._error_store = error_store
        self._number = 0

    def report(self, error: BaseException) -> None:
        """Let the other hosts know of an error that breaks the group."""
        self._error_store.write(error)

    # --- for all alike ----------------------------------------------------------------------------

    def agree(self, what: int, count: int) -> Steps:
        """Wait until all ranks have come to the same operation."""
        fingerprint = self._next(what, count)
        yield self._memory.agree(what, count)
        if self._leads:
            nothing = dict.fromkeys(self._leaders, torch.empty(0, dtype=torch.uint8))
            yield self._network.swap(nothing, nothing, fingerprint)
        yield self._memory.agree(what, count)

    def all_reduce(self, flat: Tensor, what: int, count: int) -> Steps:
        """Add up ``flat`` over the ranks, in place; all get bitwise identical sums."""
        fingerprint = self._next(what, count)
        for piece in _pieces(len(flat), _PIECE_BYTES // flat.itemsize):
            part = flat[piece]
            yield self._memory.all_reduce(part, what, count)
            if self._leads:
                yield from self._add_hosts(part, _first(fingerprint, piece))
            yield self._memory.broadcast(_bytes(part), 0, what, count)

    def _add_hosts(self, flat: Tensor, fingerprint: Fingerprint | None) -> Steps:
        """Add up what the hosts' first ranks hold, in the order of hosts."""
        if flat.numel() * flat.itemsize <= _SMALL_BYTES:
            theirs = {leader: torch.empty_like(flat) for leader in self._leaders}
            yield self._network.swap(dict.fromkeys(theirs, flat), theirs, fingerprint)
            flat.copy_(self._sum(flat, theirs))
            return
        parts = flat.split(equal_sizes(len(flat), self.num_hosts))
        mine = parts[self._host]
        theirs = {leader: torch.empty_like(mine) for leader in self._leaders}
        part_by_rank = dict(zip(self._hosts.leaders, parts, strict=True))
        del part_by_rank[self.rank]
        yield self._network.swap(part_by_rank, theirs, fingerprint)
        mine.copy_(self._sum(mine, theirs))
        yield self._network.swap(dict.fromkeys(theirs, mine), part_by_rank, None)

    def _sum(self, mine: Tensor, theirs: dict[int, Tensor]) -> Tensor:
        first, *others = (theirs.get(leader, mine) for leader in self._hosts.leaders)
        total = first.clone()
        for other in others:
            total += other
        return total

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], what: int, count: int
    ) -> Steps:
        """Add up over the ranks what each holds for this one, into ``output``."""
        whole = torch.cat(list(inputs))
        yield from self.all_reduce(whole, what, count)
        output.copy_(whole.split([len(part) for part in inputs])[self.rank])

    def broadcast(self, data: Tensor, root: int, what: int, count: int) -> Steps:
        """Give every rank the bytes of ``root``."""
        fingerprint = self._next(what, count)
        home = self._hosts.host_of(root)
        at_home = self._host == home
        for piece in _pieces(len(data), _PIECE_BYTES):
            part = data[piece]
            if at_home:
                here = self._hosts.ranks[home].index(root)
                yield self._memory.broadcast(part, here, what, count)
            if self._leads:
                sent = dict.fromkeys(self._leaders, part) if at_home else {}
                received = {} if at_home else {self._hosts.leaders[home]: part}
                yield self._network.swap(sent, received, _first(fingerprint, piece))
            if not at_home:
                yield self._memory.broadcast(part, 0, what, count)

    def all_gather(self, outputs: Sequence[Tensor], given: Tensor, what: int, count: int) -> Steps:
        """Give every rank the bytes of all, which may differ in length."""
        fingerprint = self._next(what, count)
        ranks = self._hosts.ranks
        if has_unequal_parts(what):  # the first ranks compare what they cut, and no others
            yield self._memory.agree(what, count)
        for piece in _pieces(max(map(len, outputs)), max(1, _PIECE_BYTES // self.size)):
            into = [outputs[rank][piece] for on_host in ranks for rank in on_host]
            packed = torch.empty(sum(map(len, into)), dtype=torch.uint8)
            slots = packed.split([len(one) for one in into])
            sizes = [sum(len(outputs[rank][piece]) for rank in on_host) for on_host in ranks]
            by_host = packed.split(sizes)
            before = sum(len(on_host) for on_host in ranks[: self._host])
            own = slots[before : before + len(ranks[self._host])]
            yield self._memory.all_gather(own, given[piece], what, count)
            if self._leads:
                sent = dict.fromkeys(self._leaders, by_host[self._host])
                received = dict(zip(self._hosts.leaders, by_host, strict=True))
                del received[self.rank]
                yield self._network.swap(sent, received, _first(fingerprint, piece))
            yield self._memory.broadcast(packed, 0, what, count)
            for one, slot in zip(into, slots, strict=True):
                one.copy_(slot)

    # --- another for each -------------------------------------------------------------------------

    def swap(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], what: int, count: int
    ) -> Steps:
        """Give each rank other bytes; lengths may all differ."""
        fingerprint = self._next(what, count)
        outputs[self.rank].copy_(inputs[self.rank])
        sent = {rank: inputs[rank] for rank in self._others}
        received = {rank: outputs[rank] for rank in self._others}
        yield self._network.swap(sent, received, fingerprint)

    def _next(self, what: int, count: int) -> Fingerprint:
        self._number += 1
        return Fingerprint(self._number, what, count)


def _pieces(num_elements: int, per_piece: int) -> Iterator[slice]:
    """Cut a range into pieces; nothing is one empty piece, so that every operation has one."""
    for start in range(0, max(1, num_elements), per_piece):
        yield slice(start, min(start + per_piece, num_elements))


def _first(fingerprint: Fingerprint, piece: slice) -> Fingerprint | None:
    return fingerprint if piece.start == 0 else None


def _bytes(flat: Tensor) -> Tensor:
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)
