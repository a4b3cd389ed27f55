"""MXNet's monitor: a statistic of what flows through a model, taken inside of every replica.

tic ──── forward, backward, update ──── toc
 │        │  hooks measure outputs in    └─ parameters and buffers are measured
 │        └─ the replicas' threads
 └─ active in every `interval`-th batch
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx.parallel import DataParallel
from phalanx.plan import check_function, flatten, leaf_paths, read_count
from phalanx.replicas import current_replica
from phalanx.types import Nested


def _norm_by_size(values: Tensor) -> Tensor:
    """Return MXNet's default statistic: the 2-norm over the root of the number of elements."""
    result: Tensor = torch.linalg.vector_norm(values) / max(1, values.numel()) ** 0.5
    return result


class Monitor:
    """Note a statistic of outputs, and at the end of a batch of parameters and buffers, by name.

    Nothing is computed but between :meth:`tic` and :meth:`toc` of every ``interval``-th batch, and
    nothing is hooked but between :meth:`install` and :meth:`remove`. What the model computes stays
    bitwise identical (but in eval mode without gradients torch's transformer layers leave their
    fast path, which rounds otherwise, where any module inside has a hook).

    Args:
        interval: Batches from one that is watched to the next.
        stat_func: tensor -> number, for floating tensors of at least 32 bits (others are converted
            to float32); called in replicas' threads. Default: the 2-norm over the root of the
            number of elements. Tensors without elements are left out.
        pattern: Regular expression for names, matched from their start.
        sort: By name; default: replica by replica, in the order of the forward.

    Raises:
        ConfigError: An argument cannot work.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> monitor = Monitor(1, stat_func=lambda values: values.abs().max(), pattern="0")
        >>> monitor.install(net)
        >>> monitor.tic()
        >>> output = net(torch.ones(3, 2))
        >>> [(step, name) for step, name, value in monitor.toc()]
        [(1, '0.output'), (1, '0.weight'), (1, '0.bias')]
        >>> monitor.remove()

    Source: MXNet's ``mx.mon.Monitor`` and ``Monitor.scala``, whose names did not say the device.
    """

    def __init__(
        self,
        interval: int = 1,
        stat_func: Callable[[Tensor], Tensor | float] | None = None,
        pattern: str = ".*",
        sort: bool = False,
    ) -> None:
        self._interval = read_count("interval", interval, 1, "batch")
        self._statistic = stat_func or _norm_by_size
        check_function("stat_func", self._statistic)
        self._pattern = re.compile(pattern)
        self._sort = sort
        self._installed: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self._step = 0
        self._active = False
        # (replica, name, statistic), whose number is read later: no device is waited for. Replicas'
        # threads append, which is atomic.
        self._seen: list[tuple[int | None, str, Tensor | float]] = []

    def install(self, target: nn.Module) -> None:
        """Watch a module, or the one in a `DataParallel`; several may be, each of them once."""
        module = target.module if isinstance(target, DataParallel) else target
        if any(module is each for each in self._installed):
            return
        self._installed.append(module)
        for name, child in module.named_modules():
            hook = self._hook(f"{name}.output" if name else "output")
            self._handles.append(child.register_forward_hook(hook))

    def remove(self) -> None:
        """Take all hooks away; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._installed = [], []
        self._active, self._seen = False, []

    def tic(self) -> None:
        """Begin a batch: the first, and every `interval`-th after it, is watched."""
        self._active, self._seen = self._step % self._interval == 0, []
        self._step += 1

    def toc(self) -> list[tuple[int, str, float]]:
        """End a batch, and return (step, name, statistic); nothing when it was not watched.

        The step counts from 1. Names are such as ``"body.0.output"`` or ``"body.0.weight"``; nested
        outputs have their path behind it, and a replica's end with its number: ``"0.output@1"``.
        """
        active, self._active = self._active, False
        if not active:
            return []
        # In a replica's thread hooks come in the order of the forward.
        self._seen.sort(key=lambda each: -1 if each[0] is None else each[0])
        for module in self._installed:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                self._measure(name, tensor)
        if self._sort:
            self._seen.sort(key=lambda each: each[1])
        return [
            (self._step, name if replica is None else f"{name}@{replica}", float(value))
            for replica, name, value in self._seen
        ]

    def toc_print(self) -> None:
        """End a batch, and print a line for each statistic."""
        for step, name, value in self.toc():
            print(f"Batch: {step:7d} {name:30s} {value:.6g}")  # noqa: T201 (MXNet's way to show)

    tocPrint = toc_print

    # Any: whatever the module returns.
    def _hook(self, name: str) -> Callable[[nn.Module, Any, Nested], None]:
        def hook(_: nn.Module, __: Any, output: Nested) -> None:
            if not self._active:
                return
            for path, leaf in zip(leaf_paths(output), flatten(output)[0], strict=True):
                if isinstance(leaf, Tensor):
                    self._measure(f"{name}.{path}" if path else name, leaf)

        return hook

    def _measure(self, name: str, tensor: Tensor) -> None:
        """Note the statistic of one tensor; in any thread."""
        if not tensor.numel() or not self._pattern.match(name):
            return
        with torch.no_grad():
            wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
            value = self._statistic(wide)
        self._seen.append((current_replica(), name, value))
