"""The collectives of a group whose ranks are on several hosts.

Data for all alike crosses the network once per host, between the hosts' first ranks:

    all_reduce    ranks 0 1 2 │ 3 4      each host adds up in rank order
                      ▼       │  ▼
                      0 <──────> 3       the first ranks add up each a part, in the order of hosts
                      ▼       │  ▼
                  0 1 2       │ 3 4      each host spreads the result

so the sum is bitwise identical on all ranks and in every run; the sum of hosts (0 1 2) and (3 4) is
((r0 + r1) + r2) + (r3 + r4).

Data that differs from rank to rank (gather, scatter, all_to_all) goes straight there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.distributed import Work

from phalanx.distributed.fingerprint import Fingerprint
from phalanx.distributed.network import Gloo, Network
from phalanx.distributed.shared_memory import SharedMemory
from phalanx.distributed.tensors import NOTHING, as_bytes
from phalanx.distributed.work import Steps
from phalanx.plan import equal_sizes

__all__ = ["SeveralHosts"]

_REPORT_S = 2.0  # within which the first rank of a host reports what other hosts do wrong


class SeveralHosts:
    """The collectives over ``memory`` on each host, and the networks between.

    ``network`` reaches all ranks, ``leaders`` the first ranks of the hosts, in these alone;
    ``hosts`` are the ranks of each host.
    """

    def __init__(
        self,
        memory: SharedMemory,
        network: Network,
        leaders: Network | None,
        hosts: Sequence[Sequence[int]],
    ) -> None:
        self.rank, self.size = network.rank, len(network.ranks)
        self.num_hosts = len(hosts)
        self._memory = memory
        self._network = network
        self._leaders = leaders
        self._hosts = hosts
        self._host = next(host for host, ranks in enumerate(hosts) if network.rank in ranks)
        if leaders is None:  # the first rank is to report its error before
            memory.grace_s = _REPORT_S
        self._number = 0

    # --- for all alike ----------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, code: int, count: int) -> Steps:
        """Add up ``flat`` over the ranks, in place; all get bitwise identical sums."""
        yield from self._memory.all_reduce(flat, code, count)
        sizes = equal_sizes(len(flat), self.num_hosts)
        mine = [sizes[self._host]] * self.num_hosts
        parts = flat.new_empty(sum(mine))
        yield from self._between(code, count, _all_to_all(parts, mine, flat, sizes))
        if self._leaders is not None:
            totals = reduce(torch.add, parts.split(mine)).repeat(self.num_hosts)
            yield self._leaders.collective(_all_to_all(flat, sizes, totals, mine))
        yield from self._spread(as_bytes(flat), code, count)

    def all_gather(self, outputs: Sequence[Tensor], given: Tensor, code: int, count: int) -> Steps:
        """Give every rank the bytes of all, which may differ in length."""
        lengths = [sum(len(outputs[rank]) for rank in ranks) for ranks in self._hosts]
        whole = torch.empty(sum(lengths), dtype=torch.uint8)
        in_order = [outputs[rank] for ranks in self._hosts for rank in ranks]
        slots = whole.split([len(output) for output in in_order])
        first = sum(map(len, self._hosts[: self._host]))
        mine = slots[first : first + len(self._hosts[self._host])]
        yield from self._memory.all_gather(mine, given, code, count)
        calls = [_broadcast(one, host) for host, one in enumerate(whole.split(lengths)) if len(one)]
        yield from self._between(code, count, *calls)
        yield from self._spread(whole, code, count)
        for output, slot in zip(in_order, slots, strict=True):
            output.copy_(slot)

    def _spread(self, data: Tensor, code: int, count: int) -> Steps:
        """Give the other ranks of this host the bytes of its first one."""
        taken = [data, *[NOTHING] * (self._memory.size - 1)]
        given = data if self._memory.rank == 0 else NOTHING
        return self._memory.all_gather(taken, given, code, count)

    def _between(self, code: int, count: int, *calls: Callable[[Gloo], Work]) -> Steps:
        """Compare the operation with the others' as the first rank of a host, then do it."""
        fingerprint = self._next(code, count)
        if self._leaders is not None:
            nothing = [0] * self.num_hosts
            yield from self._leaders.compare(fingerprint, nothing, nothing)
            for call in calls:
                yield self._leaders.collective(call)

    # --- another for each -------------------------------------------------------------------------

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], code: int, count: int
    ) -> Steps:
        """Give each rank other bytes; lengths may all differ."""
        given, taken = [len(one) for one in inputs], [len(one) for one in outputs]
        yield from self._network.compare(self._next(code, count), given, taken)
        sent, received = torch.cat(list(inputs)), torch.empty(sum(taken), dtype=torch.uint8)
        yield self._network.collective(_all_to_all(received, taken, sent, given))
        for output, part in zip(outputs, received.split(taken), strict=True):
            output.copy_(part)

    def _next(self, code: int, count: int) -> Fingerprint:
        self._number += 1
        return Fingerprint(self._number, code, count)


def _all_to_all(
    received: Tensor, taken: Sequence[int], sent: Tensor, given: Sequence[int]
) -> Callable[[Gloo], Work]:
    return lambda gloo: gloo.alltoall_base(received, sent, [*taken], [*given])


def _broadcast(data: Tensor, host: int) -> Callable[[Gloo], Work]:
    return lambda gloo: gloo.broadcast(data, host)
