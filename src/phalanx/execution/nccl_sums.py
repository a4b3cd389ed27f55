"""Gradients added on each GPU, and then over all GPUs by NCCL, in an order of its own.

replicas on cuda:0 ──► sum on cuda:0 ─┐
replicas on cuda:1 ──► sum on cuda:1 ─┼─ `torch.cuda.nccl.reduce` ──► on the source's GPU
replicas on cuda:2 ──► sum on cuda:2 ─┘
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.distributed import nccl_is_here
from phalanx.errors import UnsupportedError
from phalanx.execution.partial_sums import Gradients, PartialSum, add_sums
from phalanx.plan import check_argument

__all__ = ["NcclSums", "check_reduce", "nccl_serves", "refuse_without_nccl"]

_REDUCTIONS = ("tree", "nccl")


class NcclSums:
    """The gradients of one run, by device.

    Args:
        parameters: Whose gradients are put, in this order.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._sums: dict[torch.device, PartialSum] = {}
        self._lock = threading.Lock()

    def put(self, device: torch.device, gradients: Gradients) -> None:
        """Add the gradients of a microbatch, which lie on ``device``, on the current stream."""
        with self._lock:
            before = self._sums.get(device)
            own = PartialSum(gradients, {})
            self._sums[device] = own if before is None else add_sums(before, own)

    def reduce(self) -> Gradients:
        """Return the sums over all devices, where the parameters lie, on the current streams."""
        found: Gradients = [None] * len(self._parameters)
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, parameter in enumerate(self._parameters):
            if any(each.gradients[place] is not None for each in self._sums.values()):
                kinds.setdefault((parameter.device, parameter.dtype), []).append(place)
        for (home, _), places in kinds.items():
            for place, total in zip(places, self._reduce_to(home, places), strict=True):
                found[place] = total
        return found

    def _reduce_to(self, home: torch.device, places: Sequence[int]) -> Sequence[Tensor]:
        sizes = [self._parameters[place].numel() for place in places]
        first = next(iter(self._sums)) if home.type == "cpu" else home  # NCCL's are GPUs
        devices = list(dict.fromkeys([first, *self._sums]))
        dtype = self._parameters[places[0]].dtype
        flats = []
        for device in devices:
            nothing: Gradients = [None] * len(self._parameters)
            own = self._sums[device].gradients if device in self._sums else nothing
            rows = [
                torch.zeros(size, dtype=dtype, device=device) if row is None else row
                for size, row in zip(sizes, (own[place] for place in places), strict=True)
            ]
            flats.append(torch.cat(rows))
        if len(devices) > 1:
            numbers = [torch.view_as_real(each) if each.is_complex() else each for each in flats]
            torch.cuda.nccl.reduce(numbers, root=0)
        total: tuple[Tensor, ...] = flats[0].to(home).split(sizes)
        return total


def nccl_serves(devices: Sequence[torch.device]) -> bool:
    """Tell whether NCCL can sum over these devices."""
    on_cuda = all(device.type == "cuda" for device in devices)
    return on_cuda and nccl_is_here()


# Any: whatever the user wrote.
def check_reduce(reduce: Any) -> None:
    """Refuse a way of summing gradients that is unknown.

    Raises:
        ConfigError: It is unknown.
    """
    fits = isinstance(reduce, str) and reduce in _REDUCTIONS
    check_argument(fits, "reduce", "be 'tree' or 'nccl'", reduce)


def refuse_without_nccl(devices: Sequence[torch.device], option: str) -> None:
    """Refuse devices that NCCL does not serve.

    Args:
        option: The option that asks for it, such as "nccl=True".

    Raises:
        UnsupportedError: There is one.
    """
    if not nccl_serves(devices):
        named = ", ".join(dict.fromkeys(map(str, devices)))
        raise UnsupportedError(
            f"Devices must be CUDA's for {option}, and torch must be built with NCCL, but the "
            f"devices are {named}. Leave {option} out."
        )
