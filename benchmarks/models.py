"""The models that are measured, each with a made-up batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.cli.models import GPT, cnn, draw_parameters, mlp

__all__ = ["bench_cnn", "bench_gpt", "bench_mlp"]

Batch = tuple[Tensor, Tensor]


def bench_mlp(*, seed: int = 0) -> tuple[nn.Module, Batch]:
    """Build the MLP that is measured, 784-1024-1024-10, and a batch of 128 made-up images."""
    inputs, targets = _made_up_images((128, 784), seed)
    return draw_parameters(mlp((784,), (1024, 1024), 10), seed=seed), (inputs, targets)


def bench_cnn(*, seed: int = 0) -> tuple[nn.Module, Batch]:
    """Build the CNN that is measured (3x32x32, batch norm) and a batch of 64 made-up images."""
    inputs, targets = _made_up_images((64, 3, 32, 32), seed)
    model = draw_parameters(cnn((3, 32, 32), (32, 64), 256, 10), seed=seed)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, (inputs.to(memory_format=torch.channels_last), targets)


def bench_gpt(*, seed: int = 0) -> tuple[nn.Module, Batch]:
    """Build the transformer that is measured (4 layers, width 256) and 16x64 made-up tokens."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(vocab=1000, context=64, width=256, layers=4, heads=4, dropout=0.0)
    inputs, targets = torch.randint(0, 1000, (2, 16, 64), generator=generator)
    return draw_parameters(model, seed=seed), (inputs, targets)


def _made_up_images(shape: tuple[int, ...], seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    # Whole numbers over a power of two: exact, where `randn` differs between machines.
    inputs = torch.randint(-128, 128, shape, generator=generator).float().div_(64)
    return inputs, torch.randint(0, 10, shape[:1], generator=generator)
