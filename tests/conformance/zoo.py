"""One module for all that is asked of groups on worker processes, so that few have to be started.

It reads what it is given: images go through the convolution and batch norm, rows of numbers do not;
dropout follows its `p`; a label makes a loss, a state comes back as the next one. Three buffers go
by three rules, and one of them is seen in the outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.ipc import fail_point

RULES = {"added": "sum", "last": "first"}  # and "mean" for batch norm
CLASSES = 4


class _Passed(torch.autograd.Function):
    """The identity, whose backward pass comes by a point, and fails if told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        fail_point("inside backward")
        if ctx.fails:
            raise ArithmeticError("as told, on the way back")
        return grad, None


class Zoo(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(2, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.first = nn.Linear(5, 7)
        self.drop = nn.Dropout(dropout)
        self.middle = nn.Linear(7, 7)
        self.last_layer = nn.Linear(7, CLASSES)
        self.fails = ""  # where: "forward" or "backward"
        self.register_buffer("added", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("big", torch.linspace(0, 1, 5000))

    def forward(
        self,
        data: Tensor,
        mask: Tensor | None = None,
        h: Tensor | None = None,
        label: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Any:
        if data.dim() == 4:
            data = F.relu(self.norm(self.conv(data))).mean((2, 3))
        if self.training:
            self.added += data.shape[0]
            self.last = data.detach()[:1, :3].sum(0)
        if mask is not None:
            data = data * mask
        hidden = self.drop(torch.tanh(self.first(data)))
        hidden = hidden * (1 + 0.01 * self.added) + self.big[-1]
        fail_point("inside forward")
        if self.fails == "forward":
            raise ArithmeticError("as told")
        hidden = torch.tanh(self.middle(self.middle(hidden)))
        hidden = _Passed.apply(hidden, self.fails == "backward")
        if h is not None:
            hidden = hidden + h
        scores = self.last_layer(hidden)
        if h is not None:
            return scores, hidden
        if label is None:
            return scores
        losses = F.cross_entropy(scores, label, reduction="none")
        if weights is None:
            return losses.mean(), scores
        return (losses * weights).sum() / weights.sum(), scores
