"""Collectives between ranks that have test devices: as with NCCL, each runs on its own stream.

Whoever uses a result without `wait()`, or changes what is still being sent, races. gloo carries it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.device import accelerator

__all__ = ["NAME", "register"]

NAME = "late"


def register() -> None:
    """Make torch know the test device, and the backend "late" that serves it."""
    accelerator.register()
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, LateGroup, devices=["dev"])


class LateWork(dist.Work):
    """A collective on a stream, which holds its tensors until somebody waits for it."""

    def __init__(self, stream: torch.Stream, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._event = stream.record_event()
        self._device = tensors[0].device
        self._tensors = list(tensors)

    def wait(self, timeout: object = None) -> bool:
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        self._tensors.clear()
        return True


class LateGroup(dist.ProcessGroup):
    """The calls that ranks of Phalanx make."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta
    ) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    @property
    def _device_types(self) -> list[torch.device]:
        """What torch knows of a group whose backend is written in C++."""
        return [torch.device("dev")]

    def _run(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        call: Callable[[list[Tensor], list[Tensor]], dist.Work],
    ) -> LateWork:
        device = outputs[0].device
        stream = torch.Stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            found = [torch.empty_like(each, device="cpu") for each in outputs]
            call(found, [each.cpu() for each in inputs]).wait()
            for output, each in zip(outputs, found, strict=True):
                output.copy_(each)
        return LateWork(stream, [*outputs, *inputs])

    # Any: torch's options.
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> LateWork:
        def call(found: list[Tensor], given: list[Tensor]) -> dist.Work:
            found[0].copy_(given[0])
            return self._gloo.broadcast(found, opts or dist.BroadcastOptions())

        return self._run(tensors, tensors, call)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> LateWork:
        def call(found: list[Tensor], given: list[Tensor]) -> dist.Work:
            found[0].copy_(given[0])
            return self._gloo.allreduce(found, opts or dist.AllreduceOptions())

        return self._run(tensors, tensors, call)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> LateWork:
        return self._run(
            outputs[0], inputs, lambda found, given: self._gloo.allgather([found], given)
        )

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> LateWork:
        parts = list(output.view(self.size(), *own.shape).unbind())
        return self.allgather([parts], [own], opts)

    def all_to_all_single(
        self, output: Tensor, own: Tensor, sizes: list[int], own_sizes: list[int], opts: Any = None
    ) -> LateWork:
        return self._run(
            [output],
            [own],
            lambda found, given: self._gloo.alltoall_base(found[0], given[0], sizes, own_sizes),
        )

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    alltoall_base = all_to_all_single
