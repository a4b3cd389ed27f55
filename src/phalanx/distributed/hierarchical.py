"""The collectives of a group whose ranks are on several hosts.

Data for all alike crosses the network once per host, between the hosts' first ranks:

    all_reduce    ranks 0 1 2 │ 3 4      each host reduces in rank order, its first rank has it
                      ▼       │  ▼
                      0 <──────> 3       the first ranks reduce each a part, in the order of hosts
                      ▼       │  ▼
                  0 1 2       │ 3 4      each host spreads the result

so all ranks get the same bits, in every run; the sum of hosts (0 1 2) and (3 4) is
((r0 + r1) + r2) + (r3 + r4). float16 and bfloat16 travel as float32 and are rounded once.

Data that differs from rank to rank (gather, scatter, all_to_all) goes straight there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from phalanx.distributed.collective_buffers import CollectiveBuffers, Steps
from phalanx.distributed.engine import REMOTE_GRACE_S
from phalanx.distributed.error_store import ErrorStore
from phalanx.distributed.fingerprint import has_unequal_parts, pack
from phalanx.distributed.hosts import Hosts
from phalanx.distributed.intra_host import IntraHost, pieces
from phalanx.distributed.ops import ReduceOperation
from phalanx.distributed.status_pages import Fingerprint
from phalanx.distributed.tensors import as_bytes
from phalanx.distributed.transport import Gloo, Transport, gloo_between
from phalanx.plan import equal_sizes

__all__ = ["Hierarchical"]

_PIECE_BYTES = 4 << 20
_SMALL_BYTES = 64 << 10


class Hierarchical:
    """The collectives over ``buffers`` on each host, and the network between.

    Args:
        buffers: Of the ranks of this host.
        hosts: The ranks of each host.
        rank: Ours, in the group.
        store: Where the group has met, for it alone.
        timeout_s: How long a connection may take.
        interfaces: Of the network; none for the one that has the host's name.

    Attributes:
        rank: Ours, in the group.
        size: How many ranks it has.
        num_hosts: On how many hosts they are.
        grace_s: How much longer than asked this rank waits for those of its host: they may wait
            for other hosts, and are to report their error first.
        messages: The network for messages.
    """

    def __init__(
        self,
        buffers: CollectiveBuffers,
        hosts: Hosts,
        rank: int,
        store: Store,
        timeout_s: float,
        interfaces: Sequence[str],
    ) -> None:
        self.rank = rank
        self.size = hosts.size
        self.num_hosts = len(hosts.ranks)
        self._error_store = ErrorStore(store, rank, hosts.size)
        self._here = IntraHost(buffers)
        self._wake = buffers.pipes.wake_this_rank
        self._hosts = hosts
        self._store = store
        self._interfaces = interfaces
        self._host = hosts.host_of(rank)
        self._leads = rank == hosts.leaders[self._host]
        self.grace_s = 0.0 if self._leads else 2 * REMOTE_GRACE_S
        self._number = 0
        leaders = hosts.leaders
        self._leaders = self._transport("leaders", self._host, leaders, timeout_s, lazy=False)
        self._all = self._transport("all", rank, range(hosts.size), timeout_s, lazy=True)
        self.messages = self._transport("messages", rank, range(hosts.size), timeout_s, lazy=True)
        self._transports = self._leaders, self._all, self.messages
        if self._leads:
            self._leaders.open()  # all at once, so that a lost member is noticed at once

    def _transport(
        self, name: str, member: int, names: Sequence[int], timeout_s: float, *, lazy: bool
    ) -> Transport:
        def connect() -> Gloo:
            store = PrefixStore(f"gloo/{name}/", self._store)
            return gloo_between(store, member, len(names), timeout_s, self._interfaces, lazy=lazy)

        return Transport(
            connect,
            member,
            names,
            timeout_s,
            self._error_store,
            self._wake,
            PrefixStore(f"open/{name}/", self._store) if lazy else None,
        )

    def report(self, error: BaseException) -> None:
        """Let the other hosts know of an error that breaks the group."""
        self._error_store.write(error)
        for transport in self._transports:
            transport.cut(broken=True)

    def close(self) -> None:
        """End the connections."""
        for transport in self._transports:
            transport.close()

    # --- for all alike ----------------------------------------------------------------------------

    def barrier(self) -> Steps:
        """Wait until all ranks have come."""
        fingerprint = self._fingerprint("barrier", torch.uint8, 0)
        yield from self._on_this_host(self._here.barrier())
        if self._leads:
            nothing = dict.fromkeys(self._leaders.others, torch.empty(0, dtype=torch.uint8))
            yield from self._leaders.swap(nothing, nothing, fingerprint)
        yield from self._on_this_host(self._here.barrier())

    def all_reduce(self, flat: Tensor, reduction: ReduceOperation) -> Steps:
        """Reduce ``flat`` over the ranks, in place and with the same bits on all of them."""
        fingerprint = self._fingerprint("all_reduce", flat.dtype, len(flat), reduction.number)
        yield from self._reduce_to_all(flat, flat, reduction, fingerprint)

    def reduce(self, flat: Tensor, reduction: ReduceOperation, root: int) -> Steps:
        """Reduce ``flat`` over the ranks into that of ``root``; the others keep theirs."""
        fingerprint = self._fingerprint("reduce", flat.dtype, len(flat), reduction.number, root)
        into = flat if self.rank == root else torch.empty_like(flat)
        yield from self._reduce_to_all(flat, into, reduction, fingerprint)

    def _reduce_to_all(
        self, flat: Tensor, into: Tensor, reduction: ReduceOperation, fingerprint: Fingerprint
    ) -> Steps:
        stage = reduction.stage
        for piece in pieces(len(flat), _PIECE_BYTES // flat.itemsize):
            part, result = flat[piece], into[piece]
            total = stage.of(part) if into is flat else stage.of(part.clone())
            yield from self._on_this_host(self._here.reduce(total, stage, 0))
            if self._leads:
                yield from self._reduce_hosts(total, stage, _first(fingerprint, piece))
                reduction.finish(total, self.size, result)
            yield from self._on_this_host(self._here.broadcast(result, 0))

    def _reduce_hosts(
        self, flat: Tensor, stage: ReduceOperation, fingerprint: Fingerprint | None
    ) -> Steps:
        """Reduce what the hosts' first ranks hold, in the order of hosts."""
        transport = self._leaders
        if flat.numel() * flat.itemsize <= _SMALL_BYTES:
            theirs = {host: torch.empty_like(flat) for host in transport.others}
            yield from transport.swap(dict.fromkeys(theirs, flat), theirs, fingerprint)
            flat.copy_(self._in_host_order(flat, theirs, stage))
            return
        parts = flat.split(equal_sizes(len(flat), len(self._hosts.ranks)))
        mine = parts[self._host]
        theirs = {host: torch.empty_like(mine) for host in transport.others}
        part_by_host = {host: parts[host] for host in theirs}
        yield from transport.swap(part_by_host, theirs, fingerprint)
        mine.copy_(self._in_host_order(mine, theirs, stage))
        yield from transport.swap(dict.fromkeys(theirs, mine), part_by_host, None)

    def _in_host_order(
        self, mine: Tensor, theirs: dict[int, Tensor], stage: ReduceOperation
    ) -> Tensor:
        sources = [theirs.get(host, mine) for host in range(len(self._hosts.ranks))]
        result = torch.empty_like(mine)
        stage(sources, result)
        return result

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], reduction: ReduceOperation
    ) -> Steps:
        """Reduce over the ranks what each holds for this one, into ``output``."""
        lengths = [len(part) for part in inputs]
        what = "reduce_scatter", output.dtype, sum(lengths), reduction.number
        fingerprint = self._fingerprint(*what, sizes=lengths)
        yield from self._agree_on_parts(fingerprint)
        stage, ranks = reduction.stage, self._hosts.ranks
        for piece in pieces(max(lengths), max(1, _PIECE_BYTES // output.itemsize // self.size)):
            cuts = [inputs[rank][piece] for on_host in ranks for rank in on_host]
            total = stage.of(torch.cat(cuts))
            sizes = [sum(len(inputs[rank][piece]) for rank in on_host) for on_host in ranks]
            by_host = total.split(sizes)
            yield from self._on_this_host(self._here.reduce(total, stage, 0))
            share = output.new_empty(sizes[self._host])
            if self._leads:
                mine = by_host[self._host]
                theirs = {host: torch.empty_like(mine) for host in self._leaders.others}
                sent = {host: by_host[host] for host in theirs}
                yield from self._leaders.swap(sent, theirs, _first(fingerprint, piece))
                mine.copy_(self._in_host_order(mine, theirs, stage))
                reduction.finish(mine, self.size, share)
            yield from self._on_this_host(self._here.broadcast(share, 0))
            shares = share.split([len(inputs[rank][piece]) for rank in ranks[self._host]])
            output[piece].copy_(shares[self._here.rank])

    def broadcast(self, flat: Tensor, root: int) -> Steps:
        """Give every rank the bytes of ``root``."""
        fingerprint = self._fingerprint("broadcast", flat.dtype, len(flat), root=root)
        home, transport, data = self._hosts.host_of(root), self._leaders, as_bytes(flat)
        for piece in pieces(len(data), _PIECE_BYTES):
            part = data[piece]
            if self._host == home:
                here = self._hosts.ranks[home].index(root)
                yield from self._on_this_host(self._here.broadcast(part, here))
            if self._leads:
                sent = dict.fromkeys(transport.others, part) if self._host == home else {}
                received = {} if self._host == home else {home: part}
                yield from transport.swap(sent, received, _first(fingerprint, piece))
            if self._host != home:
                yield from self._on_this_host(self._here.broadcast(part, 0))

    def all_gather(self, outputs: Sequence[Tensor], flat: Tensor) -> Steps:
        """Give every rank the tensors of all, which may differ in length."""
        lengths = [len(output) for output in outputs]
        fingerprint = self._fingerprint("all_gather", flat.dtype, sum(lengths), sizes=lengths)
        yield from self._agree_on_parts(fingerprint)
        data, results = as_bytes(flat), [as_bytes(output) for output in outputs]
        ranks, transport = self._hosts.ranks, self._leaders
        longest = max(len(result) for result in results)
        for piece in pieces(longest, max(1, _PIECE_BYTES // self.size)):
            into = [results[rank][piece] for on_host in ranks for rank in on_host]
            packed = torch.empty(sum(map(len, into)), dtype=torch.uint8)
            slots = packed.split([len(one) for one in into])
            sizes = [sum(len(results[rank][piece]) for rank in on_host) for on_host in ranks]
            by_host = packed.split(sizes)
            before = sum(len(on_host) for on_host in ranks[: self._host])
            own = slots[before : before + len(ranks[self._host])]
            yield from self._here.all_gather(own, data[piece])
            if self._leads:
                sent = dict.fromkeys(transport.others, by_host[self._host])
                received = {host: by_host[host] for host in transport.others}
                yield from transport.swap(sent, received, _first(fingerprint, piece))
            yield from self._on_this_host(self._here.broadcast(packed, 0))
            for one, slot in zip(into, slots, strict=True):
                one.copy_(slot)

    # --- another for each -------------------------------------------------------------------------

    def gather(self, outputs: Sequence[Tensor], flat: Tensor, root: int) -> Steps:
        """Give ``root`` the tensors of all, which have one length; others have no ``outputs``."""
        fingerprint = self._fingerprint("gather", flat.dtype, len(flat), root=root)
        data, results = as_bytes(flat), [as_bytes(output) for output in outputs]
        if self.rank == root:
            results[root].copy_(data)
            sent, received = {}, {rank: results[rank] for rank in self._all.others}
        else:
            sent, received = {root: data}, {}
        yield from self._all.swap(sent, received, fingerprint)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> Steps:
        """Give each rank its tensor of ``root``'s; others have no ``inputs``."""
        fingerprint = self._fingerprint("scatter", output.dtype, len(output), root=root)
        result, parts = as_bytes(output), [as_bytes(part) for part in inputs]
        if self.rank == root:
            result.copy_(parts[root])
            sent, received = {rank: parts[rank] for rank in self._all.others}, {}
        else:
            sent, received = {}, {root: result}
        yield from self._all.swap(sent, received, fingerprint)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        """Give each rank one tensor of every other; lengths may all differ."""
        fingerprint = self._fingerprint("all_to_all", outputs[0].dtype, 0)
        outputs[self.rank].copy_(inputs[self.rank])
        sent = {rank: as_bytes(inputs[rank]) for rank in self._all.others}
        received = {rank: as_bytes(outputs[rank]) for rank in self._all.others}
        yield from self._all.swap(sent, received, fingerprint)

    # ----------------------------------------------------------------------------------------------

    def _on_this_host(self, steps: Steps) -> Steps:
        """Run ``steps`` among the ranks of this host, if there are more than this one."""
        if self._here.size > 1:
            yield from steps

    def _agree_on_parts(self, fingerprint: Fingerprint) -> Steps:
        """See that the ranks of this host cut alike: the leaders compare for themselves alone."""
        _, what, count = fingerprint
        if has_unequal_parts(what):
            yield from self._on_this_host(self._here.agree(what, count))

    def _fingerprint(
        self,
        kind: str,
        dtype: torch.dtype,
        count: int,
        reduction: int = 0,
        root: int | None = None,
        sizes: Sequence[int] = (),
    ) -> Fingerprint:
        self._number += 1
        what = pack(kind, dtype, reduction=reduction, root=root, sizes=sizes)
        return Fingerprint(self._number, what, count)


def _first(fingerprint: Fingerprint, piece: slice) -> Fingerprint | None:
    return fingerprint if piece.start == 0 else None
