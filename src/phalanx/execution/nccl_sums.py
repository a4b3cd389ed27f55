"""Gradients added on each GPU, and then over all GPUs by NCCL, in an order of its own.

replicas on cuda:0 ──► sum on cuda:0 ─┐
replicas on cuda:1 ──► sum on cuda:1 ─┼─ `torch.cuda.nccl.reduce` ──► on the source's GPU
replicas on cuda:2 ──► sum on cuda:2 ─┘
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.execution.partial_sums import Gradients
from phalanx.replicas import FlatLayout, add_gradients, has_streams
from phalanx.torch_internals import foreach_copy

__all__ = ["NcclSums"]


class NcclSums:
    """The gradients of one run, by device.

    Args:
        parameters: Whose gradients are put, in this order.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._sums: dict[torch.device, Gradients] = {}
        self._lock = threading.Lock()

    def put(self, device: torch.device, gradients: Gradients) -> None:
        """Add the gradients of a microbatch, which lie on ``device``, on the current stream."""
        with self._lock:
            before = self._sums.get(device)
            self._sums[device] = gradients if before is None else add_gradients(before, gradients)

    def reduce(self) -> Gradients:
        """Return the sums over all devices, where the parameters lie, on the current streams."""
        found: Gradients = [None] * len(self._parameters)
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, parameter in enumerate(self._parameters):
            if any(sums[place] is not None for sums in self._sums.values()):
                kinds.setdefault((parameter.device, parameter.dtype), []).append(place)
        for (home, _), places in kinds.items():
            for place, total in zip(places, self._reduce_to(home, places), strict=True):
                found[place] = total
        return found

    def _reduce_to(self, home: torch.device, places: Sequence[int]) -> list[Tensor]:
        layout = FlatLayout([_row_like(self._parameters[place]) for place in places])
        first = home if has_streams(home) else next(iter(self._sums))  # not a CPU: NCCL's are GPUs
        devices = list(dict.fromkeys([first, *self._sums]))
        flats = [layout.zeros(device) for device in devices]
        for device, flat in zip(devices, flats, strict=True):
            own = self._sums.get(device, [None] * len(self._parameters))
            pairs = [
                (there, gradient)
                for place, there in zip(places, layout.places_in(flat), strict=True)
                if (gradient := own[place]) is not None
            ]
            if pairs:
                foreach_copy([there for there, _ in pairs], [gradient for _, gradient in pairs])
        if len(devices) > 1:
            numbers = [torch.view_as_real(each) if each.is_complex() else each for each in flats]
            torch.cuda.nccl.reduce(numbers, root=0)
        return layout.places_in(flats[0].to(home))


def _row_like(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.numel(), dtype=parameter.dtype, device="meta")
