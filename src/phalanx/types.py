"""The few type names that all rooms share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# A batch, a model's inputs or its outputs are whatever the user's code passes around: nested
# containers of tensors and other values. Only `plan.leaves` looks inside, leaf by leaf; hence
# `Any`.
Nested = Any

Device = torch.device | str
Devices = int | str | Sequence[Device]

# Loss of one microbatch: (outputs, targets) -> scalar tensor, a mean over what it counts.
LossFn = Callable[[Nested, Nested], torch.Tensor]
# What a microbatch's mean loss stands for: number of samples, tokens, or a sum of sample weights.
WeightFn = Callable[[Nested], float]
# (module, microbatch) -> loss, (loss, outputs), or (loss, outputs, targets).
ForwardFn = Callable[[torch.nn.Module, Nested], Any]

__all__ = ["Device", "Devices", "ForwardFn", "LossFn", "Nested", "WeightFn"]
