"""A mode that gives every operator that draws the microbatch's generator.

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
from phalanx.torch_internals import (
    MADE_OF_OTHERS,
    TorchDispatchMode,
    is_made_of_others,
    uncompiled,
)

aten = torch.ops.aten
_CPU = torch.device("cpu")
_CHECKPOINT_FILE = torch.utils.checkpoint.__file__
_TORCH = os.path.dirname(torch.__file__)
# What lies between a function that the compiler shall leave alone and its caller.
_WRAPPERS = {
    os.path.join(_TORCH, "_compile.py"),
    os.path.join(_TORCH, "_dynamo", "eval_frame.py"),
}

_lending = threading.Lock()  # an accelerator's default generator has one borrower at a time


class RngMode(TorchDispatchMode):
    """Give every drawing operator of the calling thread a generator of this microbatch's own.

    Args:
        seed: Where this microbatch's numbers start.

    Attributes:
        used: Whether anything was drawn.
        num_preserved: How many checkpointed parts the thread is in that `preserve_rng` serves.

    Raises:
        UnsupportedError: From the operator, when it draws on the CPU but takes no generator, or
            when it draws under `torch.utils.checkpoint` without :func:`preserve_rng`: the second
            forward would draw other numbers.

    Example:
        >>> with RngMode(1):
        ...     first = torch.nn.functional.dropout(torch.ones(8), 0.5)
        >>> with RngMode(1):
        ...     again = torch.nn.functional.dropout(torch.ones(8), 0.5)
        >>> torch.equal(first, again)
        True

    Determinism: the same numbers on the same kind of device, in any thread of any process.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used = False
        self.num_preserved = 0
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def state(self) -> Tensor:
        """Return the state of this microbatch's generator on the CPU."""
        return self._generator(_CPU).get_state()

    def states(self) -> Any:
        """Return the states of all generators."""
        return self._seed, {device: g.get_state() for device, g in self._generators.items()}

    def set_states(self, states: Any) -> None:
        """Continue from states that :meth:`states` returned."""
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
        if not _may_draw(func) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        if device.type == "cpu":
            return self._draw(func, args, kwargs)
        with self.lending(device):
            return func(*args, **kwargs)

    @contextlib.contextmanager
    def lending(self, device: torch.device) -> Iterator[None]:
        """Let all operators on an accelerator in the body draw this microbatch's numbers.

        Fused kernels take no generator, so the device's default one is lent. Its state is read on
        the host as a kernel is launched: other threads wait for launches only. No other thread may
        set that generator meanwhile.
        """
        own = self._generator(device)
        default = torch.get_device_module(device).default_generators[device.index]
        begin = own.get_state()
        with _lending:
            before = default.get_state()
            default.set_state(begin)
            try:
                yield
            finally:
                end = default.get_state()
                default.set_state(before)
        own.set_state(end)
        if not torch.equal(begin, end):
            self._note_draw()

    def _note_draw(self) -> None:
        self.used = True
        _refuse_checkpointing(self.num_preserved)

    # Any: the operator's own arguments and results.
    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator that draws on the CPU."""
        generator = self._generator(_CPU)
        written_out, overload = _WRITTEN_OUT.get(func), _with_generator(func)
        if written_out is None and overload is None:
            _refuse_dropout(func, args, kwargs)
            return func(*args, **kwargs)
        self._note_draw()
        if written_out is not None:
            return written_out(generator, *args, **kwargs)
        return overload(*args, **{**kwargs, "generator": generator})

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _like(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def draw(generator: torch.Generator, like: Tensor, *bounds: int, **options: Any) -> Tensor:
        return fill(torch.empty_like(like, **options), *bounds, generator=generator)

    return draw


def _randint_like(values: Tensor, *bounds: int, generator: torch.Generator) -> Tensor:
    low, high = (0, *bounds) if len(bounds) == 1 else bounds
    return values.random_(low, high, generator=generator)


_WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    aten.rand_like.default: _like(Tensor.uniform_),
    aten.randn_like.default: _like(Tensor.normal_),
    aten.randint_like.default: _like(_randint_like),
    aten.randint_like.low_dtype: _like(_randint_like),
}


@functools.cache
def _is_made_of_others(func: Any) -> bool:
    return is_made_of_others(func.name())


@functools.cache
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _refuse_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an operator that takes no generator, unless it is attention without dropout."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "dropout_p" not in names or given.get("dropout_p"):
        raise UnsupportedError(
            f"Operator `{func}` must take a generator to draw reproducibly in a replica on the "
            "CPU, but takes none. Draw with another operator, such as `tensor.uniform_()`; with "
            "attention, train under `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`."
        )


@functools.cache
def _with_generator(func: Any) -> Any:
    """Return the overload of ``func`` that takes a generator, or None."""
    packet, own = func.overloadpacket, _types_by_name(func)
    for each in (getattr(packet, name) for name in packet.overloads()):
        if _types_by_name(each) == {**own, "generator": "Optional[Generator]"}:
            return each
    return None


def _types_by_name(func: Any) -> dict[str, str]:
    return {argument.name: str(argument.type) for argument in func._schema.arguments}


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
