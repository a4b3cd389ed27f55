"""All names of torch that we use and that are not public.

A new torch may rename any of it without notice. Each was tried on the versions in `TRIED_ON`, by
tests/unit/test_torch_internals.py; run that first with another one, and add it here. Attributes of
tensors and modules that everybody reads (`_version`, `_parameters`, `_backward_hooks`) stay where
they are read.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "COMPILED_FROM",
    "COMPILER",
    "GLOBAL_STEP_HOOKS",
    "MADE_OF_OTHERS",
    "TRIED_ON",
    "TorchDispatchMode",
    "backward_id",
    "call_after_backward",
    "foreach_add",
    "foreach_copy",
    "foreach_div",
    "foreach_mul",
    "gloo_options",
    "has_workers",
    "inference_mode",
    "is_made_of_others",
    "is_profiled",
    "keeps_graph",
    "make_subclass",
    "pytree",
    "run_backward",
    "uncompiled",
]

P = ParamSpec("P")
T = TypeVar("T")

TRIED_ON = ("2.8", "2.11", "2.13")

# Any below: torch's stubs do not know these functions, or not their types.

GLOBAL_STEP_HOOKS: tuple[Any, Any] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
"""The hooks, before and after, that are called around the steps of all optimizers."""

foreach_add: Callable[..., Any] = torch._foreach_add_
"""Add the tensors of one list to those of another, in one call."""

foreach_div: Callable[..., Any] = torch._foreach_div_
"""Divide the tensors of a list by numbers, in one call."""

foreach_mul: Callable[..., Any] = torch._foreach_mul_
"""Multiply the tensors of a list by one number, in one call."""

foreach_copy: Callable[..., Any] = torch._foreach_copy_
"""Copy the tensors of one list to those of another, in one call."""

keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Tell whether the backward pass that runs was given ``retain_graph=True``."""

MADE_OF_OTHERS: Any = torch._C.DispatchKey.CompositeImplicitAutograd
"""The dispatch key of operators that are written in terms of others."""

inference_mode: Callable[[bool], Any] = torch._C._InferenceMode
"""Enter or leave inference mode as a context; `torch.inference_mode` takes three times as long."""

make_subclass: Callable[..., Any] = torch.Tensor._make_subclass
"""Return a tensor of a subclass (parameters), in the memory of another one."""

COMPILER = "torch._dynamo"
"""Its module: slow to import, and a process that has not imported it compiles nothing."""

COMPILED_FROM = "_torchdynamo_orig_callable"
"""The attribute that the compiler gives to whatever it has compiled."""


def run_backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], *, keep_graph: bool = False
) -> None:
    """Do what `torch.autograd.backward` does, under the caller's modes.

    Since torch 2.13 or so that function hands itself to the mode, inside of which no mode is on;
    this is what it calls then.
    """
    torch.autograd.graph._engine_run_backward(
        tuple(outputs),
        tuple(gradients),
        keep_graph,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def backward_id() -> int:
    """Return the number of the backward pass that this thread works for, or -1."""
    return torch._C._current_graph_task_id()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` called when the backward pass that runs has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_profiled() -> bool:
    """Tell whether torch's profiler runs."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def is_made_of_others(operator: str) -> bool:
    """Tell whether an operator is written in terms of others, such as dropout or a GRU.

    Not `OpOverload.decompose`: it prefers formulas in Python, and that of a GRU forgets the
    dropout.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, MADE_OF_OTHERS)


def has_workers(loader: object) -> bool:
    """Tell whether a `DataLoader` has persistent workers that it has started."""
    return getattr(loader, "_iterator", None) is not None


def gloo_options(process_group: Any) -> Any:
    """Return new options of the class `ProcessGroupGloo`."""
    return process_group._Options()


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Keep ``function``, and all that it calls, from being compiled within `torch.compile`.

    Workers run in other threads, where the compiler cannot follow; collectives wait for other
    processes; and operators, not the model, call what draws random numbers. Torch's own decorator
    would import the compiler, which takes a second or two, in every process that uses us.
    """
    left_alone: list[Callable[P, T]] = []

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        compiler: Any = sys.modules.get(COMPILER)
        if not hasattr(compiler, "disable"):  # not imported, or another thread imports it
            return function(*args, **kwargs)
        if not left_alone:
            left_alone.append(compiler.disable(function))
            # Or it would compile this very function, once for each operator that is called by it.
            compiler.eval_frame.skip_code(run.__code__)
        return left_alone[0](*args, **kwargs)

    return functools.wraps(function)(run)
