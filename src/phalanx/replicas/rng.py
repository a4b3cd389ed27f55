"""The random numbers of one microbatch, in `forward` and `backward`.

    RngPlan ──► ProcessRng seeds the generator of a process of one replica, or
            ──► MicrobatchRng sees every call of torch's functions from Python, and enters
                ──► RngMode around those that may draw: it sees every operator and gives it the
                    microbatch's generator

Seeing every operator costs a small transformer 40 % of its step, seeing every call a few percent.
A draw that neither sees, such as one inside a function of TorchScript, moves the process's
generator. The first run of a kind refuses that.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
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
from phalanx.replicas.rng_mode import RngMode

RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
_DRAWS = torch.Tag.nondeterministic_seeded
_PACKET, _OVERLOAD = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)
_WRITTEN_IN_C = (
    BuiltinFunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
_PLAIN_MODULES = {"torch.nn.functional", "torch.functional", "torch._tensor"}
_Needed = tuple[tuple[int, str, Any], ...]  # Any: of any argument
_DROPOUT: _Needed = ((1, "p", 0.5), (2, "training", True))
_ALPHA: _Needed = ((1, "p", 0.5), (2, "training", False))
# Of packed sequences, these are the number of layers and the dropout.
_RECURRENT: _Needed = ((5, "dropout", 0.0), (6, "train", True))
# Arguments that all must be true for a function to draw: where in a call they stand, by which name,
# and what holds if they are not given.
_CALLS_DRAW_ONLY_WITH: dict[Any, _Needed] = {
    F.dropout: _DROPOUT,
    F.dropout1d: _DROPOUT,
    F.dropout2d: _DROPOUT,
    F.dropout3d: _DROPOUT,
    F.alpha_dropout: _ALPHA,
    F.feature_alpha_dropout: _ALPHA,
    F.scaled_dot_product_attention: ((4, "dropout_p", 0.0),),
    **dict.fromkeys(RECURRENT, _RECURRENT),
    F.multi_head_attention_forward: ((10, "dropout_p", 0.0), (13, "training", True)),
}
# Of torch's functions that are written in Python, those that draw, or run a backward pass.
_DRAWING = {
    *_CALLS_DRAW_ONLY_WITH,
    F.rrelu,
    F.gumbel_softmax,
    F.fractional_max_pool2d,
    F.fractional_max_pool2d_with_indices,
    F.fractional_max_pool3d,
    F.fractional_max_pool3d_with_indices,
    Tensor.backward,
}


def derive_seed(*path: int) -> int:
    """Return a 63-bit seed that belongs to ``path``, such as (seed, step, microbatch)."""
    text = "/".join(map(str, path)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


# The microbatch that this thread is in. Containers inside the model draw from its numbers, and so
# does `preserve_rng`.
_in_use: ContextVar[MicrobatchRng | None] = ContextVar("microbatch", default=None)


def seed_of_process() -> int:
    """Return a seed that belongs to the present state of the process's own generator.

    In a replica (for a container inside of another), to that of its microbatch's generator.
    """
    rng = _in_use.get()
    state = torch.get_rng_state() if rng is None else rng.mode.state()
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()
    return derive_seed(int.from_bytes(digest, "big"))


def advance_process_generator() -> None:
    """Draw one number from the process's generator, as a model that draws would have done."""
    torch.rand(())


@dataclass(frozen=True)
class RngPlan:
    """The way in which a run gives its microbatches their numbers.

    Attributes:
        watched: The first run of its kind: a model that moves the process's generators is refused.
        throughout: Look at every operator, not at calls from Python.
        own: The process computes one microbatch at a time, and no other thread draws meanwhile.
        shared: Several replicas run on one accelerator.
    """

    watched: bool = False
    throughout: bool = False
    own: bool = False
    shared: bool = False

    def microbatch(self, *path: int) -> MicrobatchRng | ProcessRng:
        """Return the random numbers that belong to ``path``: (seed, step, microbatch)."""
        if self.own and not self.watched and not self.throughout:
            return ProcessRng(derive_seed(*path))
        return MicrobatchRng(path, self)


class ProcessRng:
    """Seed the process's generator for a microbatch, and put it back after each entry.

    The numbers are the same as with `RngMode`, and calls cost nothing. It is for a process that
    computes one microbatch at a time, where no other thread draws meanwhile.
    """

    used = False  # unknown, and of no interest where this is used

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: Tensor | None = None

    def __enter__(self) -> None:
        self._before = torch.get_rng_state()
        if self._state is None:
            torch.default_generator.manual_seed(self._seed)
        else:
            torch.set_rng_state(self._state)

    def __exit__(self, *_: object) -> None:
        self._state = torch.get_rng_state()
        torch.set_rng_state(self._before)


@dataclass(eq=False)
class MicrobatchRng(TorchFunctionMode):
    """Draw all torch random numbers of the body, in this thread, from the microbatch's generator.

    It is entered around the user's code, as often as that is called: the numbers continue where
    they stopped. torch's functions cost more inside.

    Args:
        path: What their seed belongs to; it is derived when something may draw.
        plan: Which operators and generators it looks at.

    Attributes:
        used: Whether anything was drawn.

    Raises:
        UnsupportedError: In a watched run, the generators of torch, NumPy or Python have moved; or
            see `RngMode`.
    """

    path: tuple[int, ...]
    plan: RngPlan
    used: bool = False
    _before: _States | None = None

    @cached_property
    def mode(self) -> RngMode:
        """The mode that gives numbers, made when something may draw."""
        return RngMode(derive_seed(*self.path))

    def __enter__(self) -> None:
        self._outer = _in_use.set(self)
        if self.plan.watched:
            self._before = generator_states()
        if self.plan.throughout:  # no calls are looked at: it would take a fused evaluation apart
            self.mode.__enter__()  # type: ignore[no-untyped-call]
        else:
            super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _in_use.reset(self._outer)
        self.used = "mode" in vars(self) and self.mode.used
        if self.plan.throughout:
            self.mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        else:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if self._before is not None and error is None:
            _refuse_moved(self._before, generator_states())

    # Any: this is torch's own signature for modes.
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not may_call_draw(func) or not _call_draws(func, args, kwargs):
            return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.device.type != "cpu" and _is_one_draw(func):
            with self.mode.lending(first.device):
                if func in RECURRENT:
                    return run_layer_by_layer(func, args)
                return func(*args, **kwargs)
        with self.mode:
            return func(*args, **kwargs)


def preserve_rng() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Let a checkpointed part draw the same numbers again when it is computed again.

    Give it as `torch.utils.checkpoint.checkpoint(…, use_reentrant=False, context_fn=preserve_rng)`.
    Outside of replicas it does nothing: there torch's own ``preserve_rng_state`` does it.

    Raises:
        UnsupportedError: Several replicas run on one accelerator.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> block = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
        >>> x = torch.ones(2, 3)
        >>> y = checkpoint(block, x, use_reentrant=False, context_fn=preserve_rng)
    """
    rng = _in_use.get()
    if rng is None:
        return contextlib.nullcontext(), contextlib.nullcontext()
    if rng.plan.shared:
        raise UnsupportedError(
            "`preserve_rng` must be used where each replica has its own accelerator, but "
            "several share one: checkpointing sets the generator that they share. Give each "
            "replica its own, or call `checkpoint` without it where the part draws nothing."
        )
    kept: list[Any] = []  # Any: states
    return _preserved(kept), _preserved(kept)


@contextlib.contextmanager
def _preserved(kept: list[Any]) -> Iterator[None]:
    """Keep the states that a part begins with; the second time, begin with those kept."""
    rng = _in_use.get()  # on the way back it may be another
    assert rng is not None
    mode = rng.mode
    before, again = mode.states(), bool(kept)
    if again:
        mode.set_states(kept[0])
    else:
        kept.append(before)
    mode.num_preserved += 1
    try:
        yield
    finally:
        mode.num_preserved -= 1
        if again:
            mode.set_states(before)


# Any: Python's and NumPy's own states.
_States = tuple[Any, ...]


def generator_states() -> _States:
    """Return the states of torch's, NumPy's and Python's generators, as a checkpoint holds them."""
    state: Any = np.random.get_state()
    name, words, *rest = state
    return torch.get_rng_state(), (name, words.tolist(), *rest), random.getstate()


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
            "A model must draw its random numbers with torch's functions, called from Python: they "
            f"have a generator for each microbatch. But {' and '.join(moved)} generator was seeded "
            "or drawn from while the model ran. Write `torch.rand(()).item()` for a number of "
            "Python's, and give `generator=torch.Generator().manual_seed(…)`, made where it is "
            "used, for numbers that are the same in every call. Where another thread of the "
            "program draws meanwhile, give that thread its own generator."
        )


def has_fused_evaluation(module: nn.Module) -> bool:
    """Tell whether torch evaluates a part of ``module`` in one kernel, unless a mode sees calls."""
    kinds = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
    return any(isinstance(each, kinds) for each in module.modules())


def run_layer_by_layer(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Call a function of `RECURRENT` once for each layer, with dropout between the calls.

    An accelerator's kernel for all layers draws from its own state, which carries over from call
    to call.

    Args:
        func: The function.
        args: As torch's modules give them: a padded batch, or packed data and its batch sizes;
            then states, weights, biases or not, layers, dropout, training, both directions or not.

    Returns:
        The outputs of the last layer, and the last states of all layers.
    """
    is_padded = isinstance(args[3], bool)
    values, *sizes = args[: 1 if is_padded else 2]
    states, weights, biases, layers, dropout, train, both, *rest = args[1 + len(sizes) :]
    is_lstm = not isinstance(states, torch.Tensor)
    per_layer = len(weights) // layers
    directions = 2 if both else 1
    last = []
    for layer in range(layers):
        if layer > 0:
            values = F.dropout(values, dropout, train)
        place = slice(layer * directions, (layer + 1) * directions)
        own = tuple([each[place] for each in states]) if is_lstm else states[place]
        own_weights = weights[layer * per_layer : (layer + 1) * per_layer]
        values, *ends = func(values, *sizes, own, own_weights, biases, 1, 0.0, train, both, *rest)
        last.append(ends)
    return (values, *[torch.cat(ends) for ends in zip(*last, strict=True)])


def _is_one_draw(func: Any) -> bool:
    """Tell whether a function draws where its first tensor is, and runs nothing of the user's."""
    return func in _CALLS_DRAW_ONLY_WITH or not isinstance(func, FunctionType)


def _call_draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a function that may draw does so with these arguments."""
    return all(
        args[position] if position < len(args) else kwargs.get(name, default)
        for position, name, default in _CALLS_DRAW_ONLY_WITH.get(func, ())
    )


@cache
def may_call_draw(func: Any) -> bool:  # Any, here and below: whatever torch lets modes override
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
    """Tell whether an operator of this name draws."""
    packet = getattr(torch.ops.aten, name, None)
    return isinstance(packet, _PACKET) and any(
        _DRAWS in getattr(packet, overload).tags for overload in packet.overloads()
    )
