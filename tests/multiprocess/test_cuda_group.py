"""Groups whose CUDA tensors go to NCCL, with stand-ins for both: no GPU is needed, or tried.

Tensors on `meta` are told to an inner group that only writes down its calls; and with the CPU in
the place of the GPU and gloo in that of NCCL, real calls go through torch's own inner group.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phalanx  # noqa: F401
from phalanx.distributed import backend, cuda_group
from phalanx.distributed.process_group import SharedGroup
from phalanx.errors import UnsupportedError
from tests.multiprocess.ranks import Ranks

MINUTE = datetime.timedelta(minutes=1)
HERE, THERE = torch.ones(2), torch.ones(2, device="meta")


class Recorder:
    """An inner group that does nothing, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.asked.append(name)


class OverRecorder(cuda_group.CudaGroup):
    _device_type = "meta"

    def _open(self, store, timeout):
        return Recorder()


class OverGloo(cuda_group.CudaGroup):
    _device_type = "cpu"

    def _open(self, store, timeout):
        gloo = dist.ProcessGroupGloo(store, self.rank(), self.size(), timeout)
        group = dist.ProcessGroup(store, self.rank(), self.size())
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        kind = dist.ProcessGroup.BackendType.GLOO
        group._register_backend(torch.device("cpu"), kind, gloo)
        return group


def played(kind: type[SharedGroup]) -> Any:
    """Let groups be made as on a host with NCCL, of another kind."""
    return mock.patch.multiple(backend, CudaGroup=kind, nccl_is_here=lambda: True)


@pytest.fixture
def group() -> Iterator[SharedGroup]:
    with played(OverRecorder):
        group = backend.make_group(dist.HashStore(), 0, 1, MINUTE)
    yield group
    group.shutdown()


def test_a_host_without_nccl_has_the_plain_group():
    with mock.patch.object(backend, "nccl_is_here", return_value=False):
        group = backend.make_group(dist.HashStore(), 0, 1, MINUTE)
    assert type(group) is SharedGroup
    group.shutdown()


def test_each_call_that_takes_tensors_goes_by_their_device():
    for name in cuda_group.CALLS:
        assert hasattr(dist.ProcessGroup, name), name  # the inner group has it, too
        assert getattr(cuda_group.CudaGroup, name).__name__ == name
    takers = {name for name in vars(SharedGroup) if hasattr(dist.ProcessGroup, name)}
    others = {"abort", "get_group_store", "rank", "set_timeout"}
    others |= {"shutdown", "size", "name", "_device_types", "_get_backend", "_has_hooks"}
    assert {n for n in takers if not n.startswith("__")} - others == set(cuda_group.CALLS)


def test_tensors_lists_and_lists_of_lists_are_told_to_the_inner_group(group):
    group.allreduce([THERE])
    group.broadcast([THERE], dist.BroadcastOptions())
    group.allgather([[THERE]], [THERE])
    group.scatter([THERE], [])
    group._allgather_base(output=THERE, input=THERE)
    asked = ["allreduce", "broadcast", "allgather", "scatter", "_allgather_base"]
    assert group._inner.asked == ["_set_group_name", *asked]


def test_tensors_on_the_cpu_stay_and_open_nothing(group):
    assert group.allreduce([HERE.clone()]).wait()
    assert group.barrier().wait()
    assert group._inner is None


def test_a_call_with_both_kinds_is_refused(group):
    with pytest.raises(UnsupportedError, match="on one kind of device, but are on cpu and meta"):
        group.allgather([[THERE]], [HERE])
    assert group._inner is None


def test_a_barrier_goes_where_its_options_say(group):
    group.barrier(SimpleNamespace(device=torch.device("meta")))
    assert group._inner.asked[-1] == "barrier"


def test_timeouts_and_the_end_are_told_to_both(group):
    group.allreduce([THERE])
    inner = group._inner
    group.setTimeout(MINUTE)
    group.abort()
    group.shutdown()
    assert inner.asked[-2:] == ["set_timeout", "abort"]
    assert group._closed


def test_our_group_is_left_even_if_the_inner_one_cannot_be(group):
    group.allreduce([THERE])
    group._inner.shutdown = mock.Mock(side_effect=RuntimeError("no"))
    with pytest.raises(RuntimeError, match="no"):
        group.shutdown()
    assert group._closed


def real_calls(rank: int) -> list[Any]:
    """Make each call of torch's over the inner group; ours would fail."""
    with played(OverGloo):
        group = dist.new_group(backend="phalanx")
    found: list[Any] = []
    with mock.patch.object(SharedGroup, "_run", side_effect=AssertionError("went the other way")):
        one = torch.full((2,), rank + 1.0)
        dist.all_reduce(one, group=group)
        found.append(one.tolist())
        both = [torch.empty(1), torch.empty(1)]
        dist.all_gather(both, torch.tensor([float(rank)]), group)
        found.append(torch.cat(both).tolist())
        flat = torch.empty(2)
        dist.all_gather_into_tensor(flat, torch.tensor([rank + 5.0]), group)
        found.append(flat.tolist())
        part = torch.empty(1)
        dist.reduce_scatter_tensor(part, torch.tensor([1.0, 2.0]), group=group)
        found.append(part.item() == 2.0 * (rank + 1))
        dist.all_to_all_single(flat, torch.tensor([10.0 * rank, 10.0 * rank + 1]), group=group)
        found.append(flat.tolist() == [rank, 10.0 + rank])
        dist.broadcast(one, 1, group, async_op=True).wait()
        if rank == 0:
            dist.send(one, 1, group)
        else:
            dist.recv(one, 0, group)
        dist.barrier(group)
        told: list[Any] = [None, None]
        dist.all_gather_object(told, rank, group)
        found.append(told)
        torch.manual_seed(0)
        net = DistributedDataParallel(nn.Linear(3, 1), process_group=group)
        net(torch.full((2, 3), rank + 1.0)).sum().backward()
        found.append(net.module.weight.grad.tolist())
    dist.destroy_process_group(group)
    return found


def test_torchs_own_calls_and_ddp_go_through_a_real_inner_group():
    with Ranks(2) as ranks:
        answers = ranks.run(real_calls)
    for answer in answers:
        assert answer == [[3, 3], [0, 1], [5, 6], True, True, [0, 1], [[3, 3, 3]]]
