"""Modules made by `torch.compile`, compiled once for all replicas.

Torch keeps compiled code with the code of the function that it was made from, for all modules that
run it. So replicas, whose shells share the compiler, find the code that the first of them has
compiled, if they do not all compile at the same moment.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.plan import flatten
from phalanx.torch_internals import COMPILED_FROM, COMPILER
from phalanx.types import Nested


def has_compiled(module: nn.Module) -> bool:
    """Tell whether `torch.compile` has made ``module``, a part of it, or a function that it holds.

    Example:
        >>> has_compiled(nn.Sequential(nn.Linear(3, 2)))
        False
    """
    if COMPILER not in sys.modules:
        return False
    return any(
        hasattr(value, COMPILED_FROM)
        for part in module.modules()
        for value in part.__dict__.values()
        if callable(value) and not isinstance(value, type)
    )


class CompileOnce:
    """Let replicas in threads compile one after the other, and run what is compiled together.

    Args:
        sources: What they are replicas of, one of them compiled; see :func:`has_compiled`.
    """

    def __init__(self, sources: Sequence[nn.Module]) -> None:
        self._sources = list(dict.fromkeys(sources))
        self._lock = threading.Lock()
        self._known: set[object] = set()

    @contextlib.contextmanager
    def running(self, phase: str, device: torch.device, values: Nested) -> Iterator[None]:
        """Run the body alone until one has been run on such values, and so was compiled.

        Args:
            phase: What is done with them.
        """
        parts = [part for source in self._sources for part in source.modules()]
        modes = tuple(part.training for part in parts)
        kind = (phase, device, torch.is_grad_enabled(), modes, _shapes(values))
        with contextlib.nullcontext() if kind in self._known else self._lock:
            yield
        self._known.add(kind)


def _shapes(values: Nested) -> tuple[Any, ...]:  # Any: shapes, and kinds of what has none
    leaves, _ = flatten(values)
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)
        for leaf in leaves
    )
