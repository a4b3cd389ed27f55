"""The random numbers of one microbatch: where `forward` and `backward` get them from.

    MicrobatchRng  ──► ProcessRng seeds the generator of a process of one replica; or else
                   ──► CallRng sees every call of torch's functions from Python; for those that may
                       draw it enters
                         ──► RngMode, which sees every operator and gives it the generator

Seeing every operator costs a small transformer 40 % of its step, seeing every call a few percent.
The first run of a kind is made under both. If something is drawn there that `CallRng` does not
foresee, such as inside a function of TorchScript, all later runs are made under `RngMode` alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from phalanx.errors import UnsupportedError
from phalanx.replicas.rng_mode import ProcessRng, RngMode, in_use, process_state
from phalanx.torch_internals import run_engine

__all__ = [
    "MicrobatchRng",
    "RngPlan",
    "RngUse",
    "advance_process_generator",
    "generator_states",
    "has_fused_evaluation",
    "run_backward",
    "set_generators",
]

_DRAWS = torch.Tag.nondeterministic_seeded
_PACKET, _OVERLOAD = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)
_WRITTEN_IN_C = (
    BuiltinFunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
_PLAIN_MODULES = {"torch.nn.functional", "torch.functional", "torch._tensor"}
_Told = tuple[tuple[int, str, Any], ...]  # Any: of any argument
_DROPOUT: _Told = ((1, "p", 0.5), (2, "training", True))
_ALPHA: _Told = ((1, "p", 0.5), (2, "training", False))
# Arguments that all must be true for a function to draw: where in a call they stand, by which name,
# and what holds if they are not given.
_TOLD: dict[Any, _Told] = {
    F.dropout: _DROPOUT,
    F.dropout1d: _DROPOUT,
    F.dropout2d: _DROPOUT,
    F.dropout3d: _DROPOUT,
    F.alpha_dropout: _ALPHA,
    F.feature_alpha_dropout: _ALPHA,
    F.scaled_dot_product_attention: ((4, "dropout_p", 0.0),),
    F.multi_head_attention_forward: ((10, "dropout_p", 0.0), (13, "training", True)),
}
# Of torch's functions that are written in Python, those that draw, or run a backward pass.
_DRAWING = {
    *_TOLD,
    F.rrelu,
    F.gumbel_softmax,
    F.fractional_max_pool2d,
    F.fractional_max_pool2d_with_indices,
    F.fractional_max_pool3d,
    F.fractional_max_pool3d_with_indices,
    Tensor.backward,
}


@dataclass(frozen=True)
class RngPlan:
    """How a run gives its microbatches their numbers.

    Attributes:
        watched: The first run of its kind: whoever moves the process's generators is refused.
        throughout: Look at every operator, not at calls from Python.
        own: The process computes one microbatch at a time, and nobody else draws in it meanwhile.
        shared: Devices on which several replicas run.
    """

    watched: bool = False
    throughout: bool = False
    own: bool = False
    shared: frozenset[torch.device] = frozenset()


@dataclass
class RngUse:
    """What was noticed, in any thread: whether anything was drawn, and whether unforeseen."""

    drew: bool = False
    hidden: bool = False


class MicrobatchRng:
    """Draw all torch random numbers of the body, in this thread, from a generator of its own.

    To be entered around the user's code, as often as that is called: the numbers go on where they
    stopped. Torch's functions cost more inside.

    Args:
        seed: Where the numbers start.

    Raises:
        UnsupportedError: In a watched run, the generators of torch, NumPy or Python have moved; or
            see `RngMode`.
    """

    def __init__(self, seed: int, plan: RngPlan, use: RngUse) -> None:
        self._use = use
        self._watched = plan.watched
        self._may_hide = plan.watched and not plan.throughout
        self._before: _States | None = None
        self._draws: RngMode | ProcessRng
        if plan.own and not plan.watched and not plan.throughout:
            self._draws = ProcessRng(seed)
            self._contexts: list[AbstractContextManager[object]] = [self._draws]
            return
        self._draws = draws = RngMode(seed, plan.shared)
        self._contexts = [draws] if plan.watched or plan.throughout else []
        # Not for a fused evaluation, which it would take apart in the first run alone.
        if not plan.throughout:
            self._contexts.append(CallRng(draws, is_entered=plan.watched))

    def __enter__(self) -> None:
        in_use.rngs.append(self._draws)
        if self._watched:
            self._before = generator_states()
        for context in self._contexts:
            context.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._draws.used:
            self._use.drew = True
        if self._draws.hidden and self._may_hide:
            self._use.hidden = True
        try:
            for context in reversed(self._contexts):
                context.__exit__(kind, error, trace)
        finally:
            in_use.rngs.pop()
        if self._before is not None and error is None:
            _refuse_moved(self._before, generator_states())


# Any: Python's and NumPy's own states.
_States = tuple[Any, ...]


def generator_states() -> _States:
    """Return the states of torch's, NumPy's and Python's generators, as a checkpoint holds them."""
    state: Any = np.random.get_state()
    name, words, *rest = state
    return process_state(), (name, words.tolist(), *rest), random.getstate()


def set_generators(states: _States) -> None:
    """Put the process's generators into ``states``."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def _refuse_moved(before: _States, after: _States) -> None:
    same = [torch.equal(before[0], after[0]), before[1] == after[1], before[2] == after[2]]
    names = ("torch's default", "NumPy's global", "Python's global")
    moved = [name for name, is_same in zip(names, same, strict=True) if not is_same]
    if moved:
        raise UnsupportedError(
            "A model must draw its random numbers with torch's functions, which have a generator "
            f"for each microbatch, but {' and '.join(moved)} generator was seeded or drawn from "
            "while the model ran. Write `torch.rand(()).item()` for a number of Python's, and give "
            "`generator=torch.Generator().manual_seed(…)`, made where it is used, for numbers that "
            "are the same in every call. Where another thread of the program draws meanwhile, give "
            "that thread a generator of its own."
        )


class CallRng(TorchFunctionMode):
    """Enter ``draws`` around every call of a torch function that may draw.

    Args:
        is_entered: ``draws`` is entered already, and only needs to know which draws are foreseen.
    """

    def __init__(self, draws: RngMode, *, is_entered: bool = False) -> None:
        super().__init__()
        self._draws = draws
        self._is_entered = is_entered

    # Any: this is torch's own signature for modes.
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        draws = _known.get(func)
        if draws is None:
            draws = _known[func] = may_draw(func)
        if not draws:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if not self._is_entered and func in _TOLD and not _is_told_to_draw(func, args, kwargs):
            return func(*args, **kwargs)
        with self._draws.foreseen() if self._is_entered else self._draws:
            return func(*args, **kwargs)


def _is_told_to_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return all(
        args[position] if position < len(args) else kwargs.get(name, default)
        for position, name, default in _TOLD[func]
    )


def run_backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], *, keep_graph: bool = False
) -> None:
    """Do what `torch.autograd.backward` does, under the caller's modes.

    Since torch 2.13 or so that function hands itself to the mode, inside of which no mode is on;
    this is what it calls then.
    """
    run_engine(
        tuple(outputs),
        tuple(gradients),
        keep_graph,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def advance_process_generator() -> None:
    """Move the generator of `seed_of_process` on, as a model that draws would have done."""
    torch.rand(())


def has_fused_evaluation(module: nn.Module) -> bool:
    """Tell whether torch evaluates a part of ``module`` in one kernel, unless a mode sees calls."""
    kinds = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
    return any(isinstance(each, kinds) for each in module.modules())


_known: dict[Any, bool] = {}  # Any, here and below: whatever torch lets modes override


def may_draw(func: Any) -> bool:
    """Tell whether a torch function may draw; what is unknown may.

    A function written in C goes by the tags of the operator of its name. One written in Python is
    quiet if it is torch's own and not in the table above.
    """
    if isinstance(func, _OVERLOAD):
        return _is_tagged(func)
    if isinstance(func, _PACKET):
        return any(_is_tagged(getattr(func, name)) for name in func.overloads())
    if isinstance(func, FunctionType):
        return func.__module__ not in _PLAIN_MODULES or func in _DRAWING
    return not isinstance(func, _WRITTEN_IN_C) or is_drawing_operator(func.__name__)


def _is_tagged(overload: Any) -> bool:
    return _DRAWS in overload.tags or overload.namespace not in ("aten", "prim", "prims")


def is_drawing_operator(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return isinstance(packet, _PACKET) and any(
        _DRAWS in getattr(packet, overload).tags for overload in packet.overloads()
    )
