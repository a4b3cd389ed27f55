"""What torch keeps per process: switches that decide about bits, the same in every worker.

Threads share them; a process that was started anew has the defaults, whatever its parent has set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.backends import cuda, mha, mkldnn, opt_einsum

from phalanx.torch_internals import NUMERIC_SWITCHES

__all__ = ["adopt_settings", "read_settings"]


def read_settings() -> tuple[Any, ...]:  # Any: one value for each setting
    """Return this process's settings; None stands for one that this torch has not."""
    return tuple([read() for read, _ in _SETTINGS])


def adopt_settings(wanted: tuple[Any, ...]) -> None:
    """Make this process's settings those that another one has read."""
    for (read, write), value in zip(_SETTINGS, wanted, strict=True):
        if value is not None and read() != value:
            write(value)


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by operator, as below, and has no one name
        return None


def _flushes_denormals() -> bool:
    return 0.5 * sys.float_info.min == 0.0


def _precision_of(operator: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return how the precision of one of oneDNN's operators is read and set, since torch 2.9."""
    backend = getattr(mkldnn, operator, None)
    return (
        lambda: getattr(backend, "fp32_precision", None),
        lambda value: setattr(backend, "fp32_precision", value),
    )


# Any: each value is of its own setting's type.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_flushes_denormals, torch.set_flush_denormal),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_matmul_precision, torch.set_float32_matmul_precision),
    *(_precision_of(operator) for operator in ("matmul", "conv", "rnn")),
    *NUMERIC_SWITCHES,
    (lambda: opt_einsum.enabled, lambda value: opt_einsum.set_flags(_enabled=value)),
    (lambda: opt_einsum.strategy, lambda value: opt_einsum.set_flags(_strategy=value)),
    (mha.get_fastpath_enabled, mha.set_fastpath_enabled),
    # Named after CUDA, they choose among the CPU's kernels of attention, too.
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
)
