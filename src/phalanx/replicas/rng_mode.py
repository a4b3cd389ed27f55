"""A mode in which every operator that draws is given a generator of the microbatch's own.

The CPU's default generator is one for all threads, so what a replica draws from it depends on what
the others draw meanwhile. A mode sees every operator, which is slow; `phalanx.replicas.rng` says
where it is entered.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import UnsupportedError
from phalanx.replicas.compiling import uncompiled
from phalanx.torch_internals import MADE_OF_OTHERS, TorchDispatchMode, is_made_of_others

aten = torch.ops.aten
_CHECKPOINT_FILE = torch.utils.checkpoint.__file__
_TORCH = os.path.dirname(torch.__file__)
# What lies between a function that the compiler shall leave alone and its caller.
_WRAPPERS = {
    os.path.join(_TORCH, "_compile.py"),
    os.path.join(_TORCH, "_dynamo", "eval_frame.py"),
}


_lending = threading.Lock()  # an accelerator's default generator has one borrower at a time


@contextlib.contextmanager
def _drawing_from(own: torch.Generator) -> Iterator[None]:
    """Let operators draw from ``own`` that would draw from its accelerator's default generator.

    Fused kernels take no generator. The state is read on the host as the kernel is launched, so
    that other threads wait for launches only. Nobody else may set that generator meanwhile.
    """
    default = torch.get_device_module(own.device).default_generators[own.device.index]
    with _lending:
        before = default.get_state()
        default.set_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(default.get_state())
            default.set_state(before)


class RngMode(TorchDispatchMode):
    """Give every drawing operator of the calling thread a generator of this microbatch's own.

    Args:
        seed: Where this microbatch's numbers start.
        shared: Accelerators on which other threads run replicas, too.
        goes_back: Whether a backward pass follows. Reentrant checkpointing hides it inside.

    Attributes:
        used: Whether anything was drawn.
        num_preserved: How many checkpointed parts the thread is in that `preserve_rng` serves.

    Raises:
        UnsupportedError: From the operator, when it draws on the CPU but takes no generator, or
            when it draws under `torch.utils.checkpoint` without :func:`preserve_rng`, or on a
            shared accelerator: the second forward would draw other numbers.

    Example:
        >>> with RngMode(1):
        ...     first = torch.nn.functional.dropout(torch.ones(8), 0.5)
        >>> with RngMode(1):
        ...     again = torch.nn.functional.dropout(torch.ones(8), 0.5)
        >>> torch.equal(first, again)
        True

    Determinism: the same numbers on the same kind of device, in any thread of any process.
    """

    def __init__(
        self,
        seed: int,
        shared: frozenset[torch.device] = frozenset(),
        *,
        goes_back: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shared = shared
        self.used = False
        self.num_preserved = 0
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._goes_back = goes_back

    def state(self) -> Tensor:
        """Return the state of this microbatch's generator on the CPU."""
        return self._generator(torch.device("cpu")).get_state()

    def states(self) -> Any:
        """Return the states of all generators."""
        return self._seed, {device: g.get_state() for device, g in self._generators.items()}

    def set_states(self, states: Any) -> None:
        """Go on from what :meth:`states` returned, of these or of others."""
        self._seed, by_device = states
        self._generators = {device: torch.Generator(device) for device in by_device}
        for device, state in by_device.items():
            self._generators[device].set_state(state)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler for every mode; :func:`uncompiled` does the same.

        Torch asks as it makes the class (those before 2.9 or so do not, nor import it).
        """
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile what runs in the mode; it comes here from the compiled code, too.

        Otherwise its compiler would leave such functions alone, and remember that of their code:
        they would run uncompiled ever after, also elsewhere.
        """
        return True

    # Any: this is torch's own signature for modes.
    @uncompiled
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and _is_made_of_others(func):
            with self:  # elsewhere torch takes it apart before it comes here
                return func._op_dk(MADE_OF_OTHERS, *args, **kwargs)
        if _op_draws(func, args, kwargs):
            return self._draw(func, args, kwargs)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def lending(self, device: torch.device) -> Iterator[None]:
        """Let whatever draws on an accelerator in the body draw this microbatch's numbers."""
        self._note_draw()
        if self.num_preserved and device in self._shared:
            raise _shared_under_checkpointing(device)
        with _drawing_from(self._generator(device)):
            yield

    def _note_draw(self) -> None:
        self.used = True
        if self._goes_back or torch.is_grad_enabled():  # else no part is computed again
            _refuse_checkpointing(self.num_preserved)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = _device_of(args, kwargs)
        if device.type != "cpu":
            with self.lending(device):
                return func(*args, **kwargs)
        self._note_draw()
        if func in _WRITTEN_OUT:
            return _WRITTEN_OUT[func](self._generator(device), *args, **kwargs)
        overload = _with_generator(func)
        if overload is None:
            way_out = "Train under `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`."
            raise UnsupportedError(
                f"Operator `{func}` must take a generator to draw reproducibly in a replica on the "
                f"CPU, but takes none. {way_out if func in _ATTENTION else _WAY_OUT}"
            )
        return overload(*args, **{**kwargs, "generator": self._generator(device)})

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _dropout(
    generator: torch.Generator, values: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return values.clone(), torch.ones_like(values, dtype=torch.bool)
    kept = torch.empty_like(values, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return values * kept * scale, kept


def _like(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def draw(generator: torch.Generator, like: Tensor, *bounds: int, **options: Any) -> Tensor:
        return fill(torch.empty_like(like, **options), *bounds, generator=generator)

    return draw


def _randint_like(values: Tensor, *bounds: int, generator: torch.Generator) -> Tensor:
    low, high = (0, *bounds) if len(bounds) == 1 else bounds
    return values.random_(low, high, generator=generator)


_WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _dropout,
    aten.rand_like.default: _like(Tensor.uniform_),
    aten.randn_like.default: _like(Tensor.normal_),
    aten.randint_like.default: _like(_randint_like),
    aten.randint_like.low_dtype: _like(_randint_like),
}


def _named(*names: str) -> Iterator[Any]:
    """Yield these operators, as far as this torch has them."""
    return (getattr(aten, name).default for name in names if hasattr(aten, name))


# These carry the tag, but draw only where all of these arguments are true.
_ATTENTION: dict[Any, tuple[str, ...]] = dict.fromkeys(
    _named(
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
    ("dropout_p",),
)
_RECURRENT: dict[Any, tuple[str, ...]] = dict.fromkeys(
    _named("_cudnn_rnn", "_cudnn_init_dropout_state", "miopen_rnn"), ("dropout", "train")
)
_OPERATORS_DRAW_ONLY_WITH = _ATTENTION | _RECURRENT
# These carry the tag, too, but get what the forward pass has drawn.
_TAKE_WHAT_WAS_DRAWN = set(
    _named(
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention_backward",
    )
)
_WAY_OUT = "Draw with another operator, such as `tensor.uniform_()` or `tensor.normal_()`."


@functools.cache
def _is_made_of_others(func: Any) -> bool:
    return is_made_of_others(func.name())


@functools.cache
def _op_may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags and func not in _TAKE_WHAT_WAS_DRAWN


def _op_draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether this call draws from a default generator."""
    if not _op_may_draw(func) or kwargs.get("generator") is not None:  # the model brings its own
        return False
    names = _OPERATORS_DRAW_ONLY_WITH.get(func, ())
    return all(_argument(func, args, kwargs, name) for name in names)


@functools.cache
def _with_generator(func: Any) -> Any:
    """Return the overload of ``func`` that takes a generator, or None."""
    packet = func.overloadpacket
    overloads = [getattr(packet, name) for name in packet.overloads()]
    matching = (each for each in overloads if _arguments(each) == _arguments(func))
    return next(filter(_takes_generator, matching), None)


def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def _arguments(func: Any) -> list[tuple[str, str]]:
    """Return names and types of all arguments but the generator."""
    arguments = [(each.name, str(each.type)) for each in func._schema.arguments]
    return [each for each in arguments if each[0] != "generator"]


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return where an operator draws: with its first tensor, or where it makes one."""
    known = next(
        (each for each in (*args[:1], kwargs.get("out")) if isinstance(each, Tensor)), None
    )
    if known is not None:
        return known.device
    device = torch.device(kwargs.get("device") or "cpu")
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    if name in kwargs:
        return kwargs[name]
    position = [argument.name for argument in func._schema.arguments].index(name)
    return args[position] if position < len(args) else 0.0


def _shared_under_checkpointing(device: torch.device) -> UnsupportedError:
    return UnsupportedError(
        "A model must not draw random numbers (dropout) inside `torch.utils.checkpoint` where "
        f"several replicas share {device}, but does: checkpointing sets the generator that they "
        "share. Give each replica a device of its own."
    )


def _refuse_checkpointing(num_preserved: int) -> None:
    """Refuse to draw inside more checkpointed parts than are preserved."""
    frame, inside = sys._getframe(1), False
    while frame is not None:
        if frame.f_code.co_filename not in _WRAPPERS:
            before, inside = inside, frame.f_code.co_filename == _CHECKPOINT_FILE
            num_preserved -= inside and not before
        if num_preserved < 0:
            raise UnsupportedError(
                "A model must not draw random numbers (dropout) inside `torch.utils.checkpoint` "
                "in a replica, but does: the second forward would draw other numbers and the "
                "gradient would be wrong. Call checkpoint(…, use_reentrant=False, "
                "context_fn=phalanx.preserve_rng), or move the dropout out of the checkpointed "
                "part. A model of Hugging Face takes both by activation_checkpointing_enable("
                "{'use_reentrant': False, 'context_fn': phalanx.preserve_rng}), before "
                "transformers 5.24 by gradient_checkpointing_enable(…)."
            )
        frame = frame.f_back  # type: ignore[assignment]
