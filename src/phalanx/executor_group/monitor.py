"""Statistics of what flows through a model, taken inside of every replica.

    tic ──── forward, backward, update ──── toc
     │        │  hooks measure outputs       │
     │        │  and inputs, in the          └─ parameters and buffers are measured;
     │        │  replicas' threads              everything is put in order
     └─ active in every `interval`-th batch

Hooks are registered on the user's own module; replicas share its dictionaries of hooks, so that
they run there as well. A hook knows its replica by the name of its thread.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx.errors import ConfigError
from phalanx.executor_group.scala_names import takes_scala_names
from phalanx.parallel import DataParallel
from phalanx.plan import check_function, flatten, leaf_paths, read_count
from phalanx.replicas import current_replica
from phalanx.types import Nested

__all__ = ["Monitor", "Record", "norm_by_size"]

Statistic = Callable[[Tensor], Tensor | float]


class Record(NamedTuple):
    """One value of one tensor in one batch.

    Attributes:
        step: The batch, from 1.
        name: Such as ``"body.0.output"`` or ``"body.0.weight"``. Nested inputs and outputs have
            their path behind it, and what a replica saw ends with its number: ``"0.output@1"``.
        value: The statistic of the tensor.
    """

    step: int
    name: str
    value: float


def norm_by_size(values: Tensor) -> Tensor:
    """Return MXNet's default statistic: the 2-norm over the root of the number of elements."""
    result: Tensor = torch.linalg.vector_norm(values) / max(1, values.numel()) ** 0.5
    return result


class _Seen(NamedTuple):
    """One tensor, measured; its number is read later, so that no device is waited for."""

    replica: int | None
    name: str
    value: Tensor | float


class Monitor:
    """Note a statistic of outputs, and at the end of a batch of parameters and buffers, by name.

    Nothing is computed but between :meth:`tic` and :meth:`toc` of every ``interval``-th batch, and
    nothing is hooked but between :meth:`install` and :meth:`remove`. What the model computes stays
    the same to the bit (but in eval mode without gradients torch's transformer layers leave their
    fast path, which rounds otherwise, where any module inside has a hook).

    Args:
        interval: Batches from one that is watched to the next.
        stat_func: tensor -> number, for floating tensors of at least 32 bits (others are converted
            to float32); called in replicas' threads. Default: the 2-norm over the root of the
            number of elements. Tensors without elements are left out.
        pattern: Regular expression for names, matched from their start.
        sort: By name; default: replica by replica, in the order of the forward.
        monitor_all: Whether inputs of modules are noted, too.

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

    @takes_scala_names
    def __init__(
        self,
        interval: int = 1,
        stat_func: Statistic | None = None,
        pattern: str = ".*",
        sort: bool = False,
        monitor_all: bool = False,
    ) -> None:
        self._interval = read_count("interval", interval, 1, "batch")
        if stat_func is not None:
            check_function("stat_func", stat_func)
        self._statistic = norm_by_size if stat_func is None else stat_func
        try:
            self._pattern = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"`pattern` must be a regular expression, but is {pattern!r}: {error}."
            ) from error
        self._sort = sort
        self._monitor_all = monitor_all
        self._installed: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self._lock = threading.Lock()
        self._step = 0
        self._active = False
        self._seen: list[_Seen] = []

    def __repr__(self) -> str:
        return (
            f"Monitor({len(self._installed)} modules, interval={self._interval}, step {self._step})"
        )

    # Any: a module, or what has one.
    def install(self, target: Any) -> None:
        """Watch a module: by itself, or the one in a `DataParallel`, an executor group, a trainer.

        Several may be installed, each of them once; their names stand side by side.

        Raises:
            ConfigError: ``target`` neither is nor has a module.
        """
        module = _module_of(target)
        if not any(module is each for each in self._installed):
            self._installed.append(module)
            self._handles += _hook(module, self._monitor_all, self._note)

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

    def toc(self) -> list[Record]:
        """End a batch, and return what was seen; nothing when it was not watched.

        Raises:
            ConfigError: The statistic is no number.
        """
        active, self._active = self._active, False
        if not active:
            return []
        seen = sorted(self._seen, key=lambda each: -1 if each.replica is None else each.replica)
        for module in self._installed:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                seen += self._measured(name, tensor)
        if self._sort:
            seen.sort(key=lambda each: each.name)
        return [
            Record(
                self._step,
                each.name if each.replica is None else f"{each.name}@{each.replica}",
                float(each.value),
            )
            for each in seen
        ]

    def toc_print(self) -> None:
        """End a batch, and print what was seen, a line for each."""
        for step, name, value in self.toc():
            print(f"Batch: {step:7d} {name:30s} {value:.6g}")  # noqa: T201 (what it is for)

    tocPrint = toc_print

    def _note(self, name: str, value: Nested) -> None:
        """Measure the tensors of ``value``; in any thread."""
        if not self._active:
            return
        leaves, _ = flatten(value)
        for path, leaf in zip(leaf_paths(value), leaves, strict=True):
            if isinstance(leaf, Tensor):
                seen = list(self._measured(f"{name}.{path}" if path else name, leaf))
                with self._lock:
                    self._seen += seen

    def _measured(self, name: str, tensor: Tensor) -> Iterator[_Seen]:
        if not tensor.numel() or not self._pattern.match(name):
            return
        with torch.no_grad():
            value = self._statistic(_widened(tensor.detach()))
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ConfigError(
                "`stat_func` must return one number, but returned a tensor of shape "
                f"{tuple(value.shape)} for `{name}`."
            )
        yield _Seen(current_replica(), name, value)


def _widened(values: Tensor) -> Tensor:
    if values.is_sparse:
        values = values.coalesce().values()
    if values.dtype in (torch.float64, torch.complex128):
        return values
    return values.to(torch.complex64 if values.is_complex() else torch.float32)


# Any: a module, or what has one.
def _module_of(target: Any) -> nn.Module:
    module = target
    if isinstance(target, DataParallel) or not isinstance(target, nn.Module):
        module = getattr(target, "module", None)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            "`target` must be an `nn.Module`, or have one as its `module`, but is "
            f"{type(target).__name__!r}."
        )
    return module


def _hook(
    root: nn.Module, with_inputs: bool, note: Callable[[str, Nested], None]
) -> list[RemovableHandle]:
    """Register plain functions: copies of a module share them, where a method would be copied."""
    handles: list[RemovableHandle] = []
    for name, child in root.named_modules():
        prefix = f"{name}." if name else ""
        if with_inputs:
            hook = _before(f"{prefix}input", note)
            handles.append(child.register_forward_pre_hook(hook, with_kwargs=True))
        handles.append(child.register_forward_hook(_after(f"{prefix}output", note)))
    return handles


# Any: whatever the module takes and returns.
def _before(name: str, note: Callable[[str, Nested], None]) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        whole = {**{str(place): each for place, each in enumerate(args)}, **kwargs}
        note(name, args[0] if len(args) == 1 and not kwargs else whole)

    return hook


def _after(name: str, note: Callable[[str, Nested], None]) -> Callable[..., None]:
    def hook(_: nn.Module, __: tuple[Any, ...], output: Nested) -> None:
        note(name, output)

    return hook
