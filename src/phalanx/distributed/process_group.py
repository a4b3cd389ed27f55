"""The process group that ``torch.distributed`` sees: its calls, as operations of a lane.

torch's own code calls it in two ways: from Python, by every name below, and from C++ (DDP's
reducer, the functional collectives), by the names that its trampolines look up.

Messages and sparse sums are gloo's. torch asks a group for its backend, and asks the backend the
same things; this group answers as its own.
"""

# torch's stubs know overloads of each call by type; ours tell the forms apart when called. And
# they do not know the constructor for groups written in Python.
# mypy: disable-error-code="override, assignment, call-arg"

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from phalanx.distributed.fingerprint import pack
from phalanx.distributed.lane import FORKED, Lane
from phalanx.distributed.network import LEFT, Network
from phalanx.distributed.reductions import ReduceKind, reduction_of
from phalanx.distributed.several_hosts import SeveralHosts
from phalanx.distributed.shared_memory import SharedMemory
from phalanx.distributed.tensors import (
    NOTHING,
    FlatTensor,
    as_bytes,
    check_count,
    check_fit,
    check_rank,
    cut_by_rank,
    cut_rows,
    flat_of,
    only,
    output_of,
)
from phalanx.distributed.work import SharedWork, Steps, uncompiled_methods
from phalanx.errors import ConfigError, StateError
from phalanx.torch_internals import inference_mode, is_profiled

__all__ = ["NAME", "SharedGroup"]

NAME = "phalanx"

_CPU = torch.device("cpu")
_MOST_KEPT, _LARGEST_KEPT_BYTES = 1024, 1024
_NO_TIME = datetime.timedelta(0)
_BARRIER = pack("barrier", torch.uint8)


# Any, below: options are torch's own classes, which have no common base and no types.
@uncompiled_methods
class SharedGroup(dist.ProcessGroup):
    """Ranks that talk through memory; made by ``init_process_group("phalanx")``.

    Args:
        memory: Of the ranks of this host.
        collectives: Over one host, or over several.
        networks: To all ranks, and between the first ranks of hosts.
        timeout_s: How long an operation may take, where the call does not say.
    """

    supports_splitting = False
    supports_time_estimate = False

    def __init__(
        self,
        memory: SharedMemory,
        collectives: SharedMemory | SeveralHosts,
        networks: Sequence[Network],
        timeout_s: float,
    ) -> None:
        super().__init__(collectives.rank, collectives.size)
        self._timeout_s = timeout_s
        self._group_name = "default"
        self._memory = memory
        self._collectives = collectives
        self._networks = networks
        self._network = networks[0]
        # C++ that is given a work from Python, as DDP's `join` gives its reducer one, holds no
        # more than its C++ half, which waits for ever once the Python half is gone.
        self._kept: deque[SharedWork] = deque(maxlen=_MOST_KEPT)
        pushes = memory.cores_per_rank < 2  # one for the caller, one for the lane's thread
        self.overlaps = not pushes or collectives.num_hosts > 1  # see Exchange
        self._lane = Lane(
            memory.pages,
            pushes=pushes,
            report=self._report,
        )
        for network in networks:
            network.fail = self._lane.fail
        self._closed = False

    def _report(self, error: BaseException) -> None:
        if self._collectives.num_hosts > 1:
            self._network.error_store.write(error)
        for network in self._networks:
            network.cut(broken=True)

    def _run(
        self, kind: str, filled: Sequence[FlatTensor], steps: Steps, result: Any, opts: Any
    ) -> SharedWork:
        """Begin an operation whose ``steps`` fill the data of some tensors."""
        self._refuse_if_closed(kind)
        title = f"{kind} of group {self._group_name!r}"
        lane, seconds = self._lane, self._seconds(opts)
        work = SharedWork(title, steps, filled, result, seconds, lane.drive, lane.wake_thread)
        wait = not getattr(opts, "asyncOp", True)
        # A record costs 1 µs where it is off.
        with profiler.record_function(f"{NAME}:{kind}") if is_profiled() else nullcontext():
            lane.start(work, wait=wait)
        if not wait and filled and max(flat.data.nbytes for flat in filled) <= _LARGEST_KEPT_BYTES:
            self._kept.append(work)
        return work

    def _refuse_if_closed(self, kind: str) -> None:
        if self._closed:
            raise StateError(
                f"Group {self._group_name!r} must be used before it is destroyed, but {kind} comes "
                "after. Make a new group."
            )

    def _seconds(self, opts: Any) -> float:
        """Return how long a call with these options may take."""
        timeout = getattr(opts, "timeout", None)
        if timeout is not None and timeout >= _NO_TIME:  # unset, it is negative
            return float(timeout.total_seconds())
        return self._timeout_s

    def _root(self, opts: Any) -> int:
        root = 0 if opts is None else int(opts.rootRank)
        check_rank(self._collectives.size, root, "root")
        return root

    # --- reducing ---------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> SharedWork:
        """Reduce each tensor over all ranks, in place."""
        if any(tensor.is_sparse for tensor in tensors):
            steps = self._reduce_sparse(only(tensors), opts)
            return self._run("all_reduce", [], steps, tensors, opts)
        flats = [output_of(tensor, "tensor") for tensor in tensors]
        each = [self._reduce("all_reduce", flat.data, opts) for flat in flats]
        return self._run("all_reduce", flats, chain(*each), tensors, opts)

    allreduce_coalesced = allreduce

    def _reduce(self, kind: str, flat: Tensor, opts: Any, root: int | None = None) -> Steps:
        reduction = reduction_of(opts, flat.dtype)
        code = pack(kind, flat.dtype, reduction=reduction.name, root=root)
        return self._reduce_flat(flat, reduction, code)

    def _reduce_flat(self, flat: Tensor, reduction: ReduceKind, code: int) -> Steps:
        """Reduce ``flat`` over all ranks, in place; by torch, on every rank, what C does not."""
        wide = reduction.widen(flat, self._collectives.num_hosts)
        if reduction.is_summed:
            yield from self._collectives.all_reduce(wide, code, flat.numel())
        else:
            parts = [torch.empty_like(wide) for _ in range(self._collectives.size)]
            into = [as_bytes(part) for part in parts]
            yield from self._collectives.all_gather(into, as_bytes(wide), code, flat.numel())
            wide.copy_(reduction.combine(parts))
        reduction.finish(wide, flat, self._collectives.size)

    def _reduce_sparse(self, tensor: Tensor, opts: Any) -> Steps:
        code = pack("all_reduce", tensor.dtype, reduction=reduction_of(opts, tensor.dtype).name)
        yield from self._agree(code, tensor.numel())
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
        with inference_mode(False):  # which the values of the sum would belong to
            call = self._network.collective(lambda gloo: gloo.allreduce([tensor], options))
        yield call

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> SharedWork:
        """Reduce over all ranks into the root's tensor."""
        root = self._root(opts)
        is_root = self._collectives.rank == root
        flat = (output_of if is_root else flat_of)(only(tensors), "tensor")
        data = flat.data if is_root else flat.data.clone()
        steps = self._reduce("reduce", data, opts, root)
        return self._run("reduce", [flat] if is_root else [], steps, [flat.tensor], opts)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> SharedWork:
        """Reduce over all ranks what each holds for this one."""
        flat = output_of(only(outputs), "output")
        parts = [flat_of(part, "input").data for part in only(inputs)]
        check_count(self._collectives.size, parts, "input_list")
        check_fit(flat.data, parts[self._collectives.rank], "output", "this rank's input")
        steps = self._scatter_reduced(flat.data, parts, reduction_of(opts, flat.data.dtype))
        return self._run("reduce_scatter", [flat], steps, [flat.tensor], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SharedWork:
        """Reduce over all ranks, and keep this rank's part of the result."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SharedWork:
        """Do what :meth:`reduce_scatter_single` does, with several tensors."""
        flats = [output_of(output, "output") for output in outputs]
        steps = []
        for flat, given in zip(flats, inputs, strict=True):
            whole = flat_of(given, "input").data
            parts = cut_by_rank(self._collectives.size, whole, flat.data, "input", "output")
            reduction = reduction_of(opts, flat.data.dtype)
            steps.append(self._scatter_reduced(flat.data, parts, reduction))
        return self._run("reduce_scatter", flats, chain(*steps), list(outputs), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_reduced(
        self, output: Tensor, parts: Sequence[Tensor], reduction: ReduceKind
    ) -> Steps:
        sizes = [part.numel() for part in parts]
        code = pack("reduce_scatter", output.dtype, reduction=reduction.name, sizes=sizes)
        if isinstance(self._collectives, SharedMemory) and reduction.is_summed:
            given = [reduction.widen(part, self._collectives.num_hosts) for part in parts]
            wide = reduction.widen(output, self._collectives.num_hosts)
            yield from self._collectives.reduce_scatter(wide, given, code, sum(sizes))
            reduction.finish(wide, output, self._collectives.size)
        else:
            whole = torch.cat(list(parts))
            yield from self._reduce_flat(whole, reduction, code)
            output.copy_(whole.split(sizes)[self._collectives.rank])

    # --- moving -----------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> SharedWork:
        """Give every rank the root's tensor."""
        root = self._root(opts)
        is_root = self._collectives.rank == root
        flat = (flat_of if is_root else output_of)(only(tensors), "tensor")
        code, data = pack("broadcast", flat.data.dtype, root=root), as_bytes(flat.data)
        given = data if is_root else NOTHING
        steps = self._collectives.all_gather(
            self._empty_parts(root, data), given, code, flat.data.numel()
        )
        return self._run("broadcast", [] if is_root else [flat], steps, [flat.tensor], opts)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> SharedWork:
        """Give every rank the tensors of all, as a list."""
        parts = list(only(outputs))
        return self._all_gather_lists([parts], [only(inputs)], parts, opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> SharedWork:
        """Do what :meth:`allgather` does, with several tensors."""
        lists = list(zip(*output_lists, strict=True))
        return self._all_gather_lists(lists, inputs, output_lists, opts)

    def _all_gather_lists(
        self, lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], result: Any, opts: Any
    ) -> SharedWork:
        filled, steps = [], []
        for outputs, given in zip(lists, inputs, strict=True):
            check_count(self._collectives.size, outputs, "tensor_list")
            flats = [output_of(output, "output") for output in outputs]
            filled += flats
            own = flat_of(given, "input").data
            steps.append(self._all_gather([flat.data for flat in flats], own))
        return self._run("all_gather", filled, chain(*steps), result, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SharedWork:
        """Give every rank the tensors of all, one after the other in one."""
        flat, own = output_of(output, "output"), flat_of(input, "input").data
        parts = cut_by_rank(self._collectives.size, flat.data, own, "output", "input")
        result = parts if input.dim() == 1 else [part.view(input.shape) for part in parts]
        return self._run("all_gather", [flat], self._all_gather(parts, own), result, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SharedWork:
        """Do what :meth:`all_gather_single` does, with several tensors."""
        flats = [output_of(output, "output") for output in outputs]
        steps = []
        for flat, given in zip(flats, inputs, strict=True):
            own = flat_of(given, "input").data
            parts = cut_by_rank(self._collectives.size, flat.data, own, "output", "input")
            steps.append(self._all_gather(parts, own))
        return self._run("all_gather", flats, chain(*steps), list(outputs), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, parts: list[Tensor], given: Tensor) -> Steps:
        check_fit(parts[self._collectives.rank], given, "output", "this rank's input")
        sizes = [part.numel() for part in parts]
        code = pack("all_gather", given.dtype, sizes=sizes)
        into = [as_bytes(part) for part in parts]
        return self._collectives.all_gather(into, as_bytes(given), code, sum(sizes))

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> SharedWork:
        """Give the root the tensors of all, as a list."""
        root, given = self._root(opts), flat_of(only(inputs), "tensor").data
        parts = list(only(outputs)) if self._collectives.rank == root else []
        taken = [output_of(part, "gather_list") for part in parts]
        if self._collectives.rank == root:
            check_count(self._collectives.size, parts, "gather_list")
        for one in taken:
            check_fit(one.data, given, "gather_list", "`tensor`")
        into = [one.data for one in taken] or self._empty_parts()
        code = pack("gather", given.dtype, root=root)
        steps = self._all_to_all(into, self._empty_parts(root, given), code, given.numel())
        return self._run("gather", taken, steps, parts, opts)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> SharedWork:
        """Give each rank its tensor of the root's list."""
        root, flat = self._root(opts), output_of(only(outputs), "tensor")
        parts = self._empty_parts()
        if self._collectives.rank == root:
            parts = [flat_of(part, "scatter_list").data for part in only(inputs)]
            check_count(self._collectives.size, parts, "scatter_list")
            for part in parts:
                check_fit(part, flat.data, "scatter_list", "`tensor`")
        code = pack("scatter", flat.data.dtype, root=root)
        steps = self._all_to_all(self._empty_parts(root, flat.data), parts, code, flat.data.numel())
        return self._run("scatter", [flat], steps, [flat.tensor], opts)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SharedWork:
        """Give each rank one tensor of every other."""
        check_count(self._collectives.size, outputs, "output_tensor_list")
        check_count(self._collectives.size, inputs, "input_tensor_list")
        taken = [output_of(output, "output_tensor_list") for output in outputs]
        given = [flat_of(part, "input_tensor_list").data for part in inputs]
        code = pack("all_to_all", given[0].dtype)
        steps = self._all_to_all([one.data for one in taken], given, code)
        return self._run("all_to_all", taken, steps, list(outputs), opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> SharedWork:
        """Give each rank a range of rows of every other."""
        size = self._collectives.size
        taken, given = output_of(output, "output"), flat_of(input, "input")
        into = cut_rows(size, output, taken.data, output_split_sizes, "output_split_sizes")
        parts = cut_rows(size, input, given.data, input_split_sizes, "input_split_sizes")
        steps = self._all_to_all(into, parts, pack("all_to_all", taken.data.dtype))
        return self._run("all_to_all", [taken], steps, [output], opts)

    alltoall_base = all_to_all_single

    def _empty_parts(self, rank: int = 0, part: Tensor = NOTHING) -> list[Tensor]:
        """Return an empty tensor for each rank, except for ``rank``: that gets ``part``."""
        parts = [NOTHING] * self._collectives.size
        parts[rank] = part
        return parts

    def _all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], code: int, count: int = 0
    ) -> Steps:
        taken, given = [as_bytes(one) for one in outputs], [as_bytes(one) for one in inputs]
        return self._collectives.all_to_all(taken, given, code, count)

    # --- barriers ---------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> SharedWork:
        """Wait until all ranks have come."""
        return self._run("barrier", [], self._agree(_BARRIER, 0), [], opts)

    def _agree(self, code: int, count: int) -> Steps:
        """Wait until all ranks have come to the same operation."""
        return self._collectives.all_gather(self._empty_parts(), NOTHING, code, count)

    # --- messages ---------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int) -> SharedWork:
        """Send to one rank."""
        check_rank(self._collectives.size, dstRank, "dstRank")
        flat = flat_of(only(tensors), "tensor")._replace(copied=False)  # nothing is written back
        return self._message("send", flat, dstRank, tag)

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int) -> SharedWork:
        """Receive from one rank."""
        check_rank(self._collectives.size, srcRank, "srcRank")
        return self._message("recv", output_of(only(tensors), "tensor"), srcRank, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> SharedWork:
        """Receive from the first rank that sends."""
        return self._message("recv", output_of(only(tensors), "tensor"), None, tag)

    def _message(self, kind: str, flat: FlatTensor, peer: int | None, tag: int) -> SharedWork:
        self._refuse_if_closed(kind)
        if self._lane.is_forked:
            raise StateError(FORKED)
        if tag < 0:
            raise ConfigError(f"`tag` must be 0 or more, but is {tag}.")
        return self._network.message(kind, flat, peer, tag, self._timeout_s)

    # --- what torch asks --------------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> dist.ProcessGroup:
        """Return this group, which serves every device, as torch asks for a group's backend."""
        del device
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Tell that this group hands out no memory."""
        del device
        return False

    def getBackendName(self) -> str:
        """Return ``phalanx``."""
        return NAME

    def getGroupName(self) -> str:
        """Return the group's name."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Take a name."""
        self._group_name = name

    def setTimeout(self, timeout: datetime.timedelta) -> None:
        """Let operations take so long from now on."""
        self._timeout_s = timeout.total_seconds()

    set_timeout = setTimeout
    _set_default_timeout = setTimeout

    # --- leaving ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the group. Operations under way fail; messages that were not taken are lost."""
        if not self._closed and not self._lane.is_forked:
            self._closed = True
            if self._collectives.num_hosts > 1 and self._lane.is_idle:
                self._network.error_store.say_reached(LEFT)
            self._lane.close()
            self._kept.clear()
            for network in self._networks:
                network.cut()
            self._memory.close()

    abort = shutdown

    def __repr__(self) -> str:
        hosts = f", {self._collectives.num_hosts} hosts" * (self._collectives.num_hosts > 1)
        return f"SharedGroup({self._group_name!r}, rank {self.rank()} of {self.size()}{hosts})"
