"""Numbers for tests of what is compiled, and of its like in torch."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64]


def drawn(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=draw).to(dtype)
    return torch.randint(-(1 << 30), 1 << 30, shape, generator=draw, dtype=dtype)
