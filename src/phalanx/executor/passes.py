"""One forward pass of a group: what went in, what came out, and in which mode.

Shape legend: B rows of the batch, padded ones included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.executor.binding import Share
from phalanx.executor.data import DataDesc
from phalanx.executor.outputs import Output

__all__ = ["Pass", "mode_of"]


@dataclass
class Pass:
    """What is known of the last forward pass.

    Attributes:
        shares: What each device was given.
        leaves: The data by device as the module got them; they hold gradients after backward.
        outputs: What came out.
        rows: How many counted.
        pads: Padded rows: of the batch, or of each device's.
        trains: Whether the module was in training mode.
        graph: Whether it can be gone back through.
    """

    shares: list[Share]
    leaves: list[dict[str, Tensor]]
    outputs: list[Output]
    rows: int
    pads: list[int]
    trains: bool
    graph: bool

    @property
    def pad(self) -> int:
        """Padded rows at the end of the whole batch; 0 if every device has its own."""
        return self.pads[0] if len(self.pads) == 1 else 0

    @property
    def sizes(self) -> list[int]:
        """Each device's rows."""
        return [share.rows for share in self.shares]

    # Any: a tensor, or a list of them by device.
    def input_gradient(self, desc: DataDesc, merge: bool) -> Any:
        """Return the gradient of one input, [B, ...] if merged, with zeros for padded rows."""
        grads = [_gradient(own.get(desc.name)) for own in self.leaves]
        if not merge:
            return grads
        found = [grad for grad in grads if grad is not None]
        if not found:
            return None
        moved = [each.to(found[0].device) for each in found]
        axis = desc.batch_axis
        if axis is None:
            return torch.stack(moved).sum(0)
        if len(self.pads) == 1:
            return torch.cat([*moved, _zeros(moved[0], axis, self.pads[0])], axis)
        pads = [pad for pad, grad in zip(self.pads, grads, strict=True) if grad is not None]
        pairs = zip(moved, pads, strict=True)
        return torch.cat(
            [each for grad, pad in pairs for each in (grad, _zeros(grad, axis, pad))], axis
        )


def _zeros(like: Tensor, axis: int, rows: int) -> Tensor:
    shape = list(like.shape)
    shape[axis] = rows
    return like.new_zeros(shape)


def _gradient(leaf: Tensor | None) -> Tensor | None:
    if leaf is None or not leaf.requires_grad:
        return None
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


@contextlib.contextmanager
def mode_of(module: nn.Module, trains: bool) -> Iterator[None]:
    """Train or evaluate in the body; a part that evaluates in a module that trains goes on so."""
    if module.training == trains:
        yield
        return
    before = [(each, each.training) for each in module.modules()]
    module.train(trains)
    try:
        yield
    finally:
        for each, training in before:
            each.training = training
