"""The process group of ranks on several hosts."""

# As in process_group.py: torch's stubs know overloads of each call by type.
# mypy: disable-error-code="override"

from __future__ import annotations

import datetime
from collections.abc import Hashable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from phalanx.distributed.call_forms import check_rank, only
from phalanx.distributed.collective_buffers import CollectiveBuffers, Need, Steps
from phalanx.distributed.engine import COLLECTIVES
from phalanx.distributed.hierarchical import Hierarchical
from phalanx.distributed.process_group import GroupMaker, SharedGroup
from phalanx.distributed.tensors import FlatTensor, flat_of, output_of
from phalanx.distributed.transport import Gloo
from phalanx.distributed.uncompiled_methods import uncompiled_methods
from phalanx.distributed.work import SharedWork

__all__ = ["HierarchicalGroup"]


# Any, below: as in process_group.py.
@uncompiled_methods
class HierarchicalGroup(SharedGroup):
    """Ranks of several hosts: through memory within each, over gloo between.

    Messages go over gloo, from rank to rank. As gloo does, a send waits for its receiver.

    Args:
        buffers: The memory of the ranks of this host.
        collectives: Those of several hosts.
        store: Where the ranks have met.
        timeout_s: How long an operation may take, where the call does not say.
        make_part: What makes a group of some of the ranks.
    """

    def __init__(
        self,
        buffers: CollectiveBuffers,
        collectives: Hierarchical,
        store: Store,
        timeout_s: float,
        make_part: GroupMaker,
    ) -> None:
        super().__init__(buffers, collectives, store, timeout_s, make_part)
        self._hierarchical = collectives
        self._gloo: Gloo | None = None

    def _run(
        self,
        kind: str,
        steps: Steps,
        result: Any,
        opts: Any = None,
        lane: Hashable = COLLECTIVES,
        needs: Need | None = None,
    ) -> SharedWork:
        limited = self._hierarchical.limited(steps, self._seconds(opts))
        return super()._run(kind, limited, result, opts, lane, needs)

    def _opened_gloo(self) -> Gloo:
        if self._gloo is None:
            connect = self._hierarchical.connect
            self._gloo = connect("messages", self.rank(), self.size(), self._timeout_s, lazy=True)
        return self._gloo

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int) -> dist.Work:
        """Send to one rank."""
        check_rank(self.size(), dstRank, "dstRank")
        self._num_operations += 1
        flat = flat_of(only(tensors), "tensor")
        work = self._opened_gloo().send([flat.data], dstRank, tag)
        return _Message(self._hierarchical, work, flat, dstRank, self._timeout_s)

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int) -> dist.Work:
        """Receive from one rank."""
        check_rank(self.size(), srcRank, "srcRank")
        self._num_operations += 1
        flat = output_of(only(tensors), "tensor")
        work = self._opened_gloo().recv([flat.data], srcRank, tag)
        return _Message(self._hierarchical, work, flat, srcRank, self._timeout_s, received=True)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """Receive from the first rank that sends."""
        flat = output_of(only(tensors), "tensor")
        work = self._opened_gloo().recv_anysource([flat.data], tag)
        return _Message(self._hierarchical, work, flat, None, self._timeout_s, received=True)

    def shutdown(self) -> None:
        """Leave the group; what is under way then fails."""
        super().shutdown()
        if self._gloo is not None and not self._engine.forked:
            self._gloo.shutdown()
            self._gloo = None

    abort = shutdown

    def __repr__(self) -> str:
        return f"HierarchicalGroup({self._group_name!r}, rank {self.rank()} of {self.size()})"


@uncompiled_methods
class _Message(dist.Work):
    """A message under way over gloo."""

    def __init__(
        self,
        collectives: Hierarchical,
        work: dist.Work,
        flat: FlatTensor,
        other: int | None,
        timeout_s: float,
        *,
        received: bool = False,
    ) -> None:
        super().__init__()
        self._error_store = collectives.error_store
        self._work = work
        self._flat = flat
        self._other = other
        self._timeout_s = timeout_s
        self._received = received
        self._ended = False

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Block until the message has gone, or come; raise if it cannot."""
        if not self._ended:
            seconds = timeout.total_seconds() or self._timeout_s
            with self._error_store.naming(self._other, seconds):
                self._work.wait(datetime.timedelta(seconds=seconds))
            self._ended = True
            if self._received:
                self._flat.write_back()
        return True

    def synchronize(self) -> None:
        """Do what :meth:`wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell whether somebody has waited for it, and it has gone or come."""
        return self._ended

    is_success = is_completed

    def result(self) -> list[Tensor]:
        """Return the tensor that is sent or filled."""
        return [self._flat.tensor]

    def source_rank(self) -> int:
        """Return the sender of what a receive has taken."""
        return self._work._source_rank()

    _source_rank = source_rank
