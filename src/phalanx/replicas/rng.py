"""The random numbers of one microbatch: where `forward` and `backward` get them from.

    MicrobatchRng  ──► CallRng sees every call of torch's functions from Python; for those that may
                       draw it enters
                         ──► RngMode, which sees every operator and gives it the generator

Seeing every operator costs a small transformer 40 % of its step, seeing every call a few percent.
The first run of a kind is made under both. If something is drawn there that `CallRng` does not
foresee, such as inside a function of TorchScript, all later runs are made under `RngMode` alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from phalanx.replicas.rng_mode import RngMode, in_use
from phalanx.replicas.rng_watch import RngWatch
from phalanx.torch_internals import run_engine

__all__ = [
    "MicrobatchRng",
    "RngPlan",
    "RngUse",
    "advance_process_generator",
    "has_fused_evaluation",
    "run_backward",
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
_AUTOGRAD = {"autograd", "backward", "ops"}


@dataclass(frozen=True)
class RngPlan:
    """How a run gives its microbatches their numbers.

    Attributes:
        watched: The first run of its kind: what cannot be repeated is refused.
        throughout: Look at every operator, not at calls from Python.
        alone: No other thread of the program draws from global generators meanwhile, for all that
            is known.
        shared: Devices on which several replicas run.
    """

    watched: bool = False
    throughout: bool = False
    alone: bool = False
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
        kept: Where a watched run looks for generators of NumPy's.

    Raises:
        UnsupportedError: In a watched run, the body draws numbers that no formation can repeat; or
            see `RngMode`.
    """

    def __init__(
        self,
        seed: int,
        plan: RngPlan,
        use: RngUse,
        *,
        kept: Iterable[object] = (),
    ) -> None:
        self._draws = draws = RngMode(seed, plan.shared)
        self._use = use
        self._may_hide = plan.watched and not plan.throughout
        watch = RngWatch(alone=plan.alone, kept=kept) if plan.watched else None
        contexts: list[AbstractContextManager[object]] = []
        if watch is not None:
            contexts.append(watch)
        if plan.watched or plan.throughout:
            contexts.append(draws)
        # Not for a fused evaluation, which it would take apart in the first run alone.
        if not plan.throughout:
            contexts.append(CallRng(draws, watch))
        self._context = contexts[0] if len(contexts) == 1 else _Nested(contexts)

    def __enter__(self) -> None:
        in_use.rngs.append(self._draws)
        try:
            self._context.__enter__()
        except BaseException:
            in_use.rngs.pop()
            raise

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
            self._context.__exit__(kind, error, trace)
        finally:
            in_use.rngs.pop()


class _Nested:
    """Several contexts, the first one outermost; may be entered again."""

    def __init__(self, contexts: Sequence[AbstractContextManager[object]]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered = stack.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.__exit__(kind, error, trace)


class CallRng(TorchFunctionMode):
    """Enter ``draws`` around every call of a torch function that may draw.

    Args:
        watch: Told of generators that the model brings. ``draws`` is entered already then, and only
            told which draws are foreseen.
    """

    def __init__(self, draws: RngMode, watch: RngWatch | None = None) -> None:
        super().__init__()
        self._draws = draws
        self._watch = watch

    # Any: this is torch's own signature for modes.
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        may_draw = _known.get(func)
        if may_draw is None:
            may_draw = _known[func] = _may_draw(func)
        if not may_draw:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if self._watch is None:
            if func in _TOLD and not _is_told_to_draw(func, args, kwargs):
                return func(*args, **kwargs)
            with self._draws:
                return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            self._watch.check_generator(kwargs["generator"])
        with self._draws.foreseen():
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


def _may_draw(func: Any) -> bool:
    """Tell whether a torch function may draw; what is unknown may.

    A function written in C goes by the tags of the operator of its name. One written in Python is
    quiet if it is torch's own and names nothing that may draw, nor autograd.
    """
    if isinstance(func, _OVERLOAD):
        return _is_tagged(func)
    if isinstance(func, _PACKET):
        return any(_is_tagged(getattr(func, name)) for name in func.overloads())
    if isinstance(func, FunctionType):
        return _python_may_draw(func, set())
    return not isinstance(func, _WRITTEN_IN_C) or _is_drawing_operator(func.__name__)


def _is_tagged(overload: Any) -> bool:
    return _DRAWS in overload.tags or overload.namespace not in ("aten", "prim", "prims")


def _is_drawing_operator(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return isinstance(packet, _PACKET) and any(
        _DRAWS in getattr(packet, overload).tags for overload in packet.overloads()
    )


def _python_may_draw(func: FunctionType, seen: set[FunctionType]) -> bool:
    if func in seen:
        return False
    seen.add(func)
    if func.__module__ not in _PLAIN_MODULES:
        return True
    names = list(_names_in(func.__code__))
    if any(name in _AUTOGRAD or _is_drawing_operator(name) for name in names):
        return True
    called = [func.__globals__.get(name) for name in names]
    called += [cell.cell_contents for cell in func.__closure__ or ()]
    return any(
        _python_may_draw(each, seen)
        for each in called
        if isinstance(each, FunctionType) and each.__module__ in _PLAIN_MODULES
    )


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
