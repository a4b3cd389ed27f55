"""A module pinned to one device of a machine, or run where it is on a machine without that device.

    inputs, anywhere ── to(device) ── module ── to(output device) ── outputs

Both moves are ordinary autograd operations: each gradient returns to where its input came from.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from phalanx.errors import ConfigError
from phalanx.parallel.wrapper import Wrapper
from phalanx.plan import check_argument, flatten
from phalanx.replicas import num_devices
from phalanx.torch_internals import pytree
from phalanx.types import Device, Nested

_EVERYWHERE = ("cpu", "meta")
_CPU = torch.device("cpu")


class OnDevice(Wrapper):
    """Run ``module`` on ``device``, wherever its inputs come from and the model around it is.

    Nested inputs are moved there, nested outputs to ``output_device``, leaf by leaf; what is no
    tensor passes unchanged. Gradients return to the device of each input. Wrapped modules may hold
    wrapped modules; each keeps its own device. Names of parameters and keys of `state_dict()` are
    those of the unwrapped module, and its attributes can be read here.

    Pinned means: `to()`, `cuda()` and the like, of a model around it or of itself, change the dtype
    but not the device. Move ``.module`` to take it elsewhere: it runs where its parameters are, as
    it does when loaded with ``map_location``, until the model around it is next moved.

    On a machine without ``device`` the module runs where it is, and moves with the model around it.
    So a model made for several GPUs runs on one, or on none, with one warning per object. (To load
    a file with tensors on GPUs there, call ``torch.load(…, map_location="cpu")``.)

    Args:
        module: It is moved, in place, by its `to()`; parameters that it shares stay shared.
        device: The device on which it runs.
        output_device: The device of its outputs; default: ``device``.

    Raises:
        ConfigError: It is no module, or a device's name is unknown.

    Determinism: that of the module; moving changes no bit.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), OnDevice(nn.Linear(4, 2), "meta"))
        >>> net[1].weight.device, list(net.state_dict())
        (device(type='meta'), ['0.weight', '0.bias', '1.weight', '1.bias'])
        >>> _ = net.to("cpu", torch.float64)
        >>> net[1].weight.device, net[1].weight.dtype
        (device(type='meta'), torch.float64)
        >>> OnDevice(nn.Tanh(), "cpu")(torch.zeros(2)).tolist()
        [0.0, 0.0]

    Source: torch/nn's ``nn.GPU``; unlike it, shared parameters stay shared, and wrapping a wrapped
    module works.
    """

    device: torch.device
    output_device: torch.device | None

    def __init__(
        self, module: nn.Module, device: Device, output_device: Device | None = None
    ) -> None:
        super().__init__()
        check_argument(isinstance(module, nn.Module), "module", "be an `nn.Module`", module)
        self.device = _named("device", device)
        self.output_device = (
            None if output_device is None else _named("output_device", output_device)
        )
        self.module = module
        self._look_around()
        if self._here:
            module.to(self.device)

    # Any: the module's own signature.
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its device."""
        home = self._home()
        args, kwargs = _moved((args, kwargs), home)
        with _current(home):
            outputs = self.module(*args, **kwargs)
        return _moved(outputs, self.output_device if self._output_here else home)

    def extra_repr(self) -> str:
        told, home = str(self.device), self._home()
        if self.output_device is not None:
            told += f" → {self.output_device}"
        return told if home in (None, self.device) else f"{told}, runs on {home}"

    # Any: what nn.Module's own state holds.
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Look around, for this may be another machine than the one that it was stored on."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._look_around()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn`` to all tensors inside; where it would move them, take over the dtype only.

        A model around this one calls it in `to()`, `cuda()`, `float()`, ….
        """
        own = keeping(fn, self.device) if self._here else fn
        super()._apply(own, recurse)  # type: ignore[no-untyped-call]
        return self

    def _home(self) -> torch.device | None:
        """Return where the module is; without tensors, where it shall be, or None for anywhere."""
        found = self.device if self._here else None
        own = list(_own_modules(self.module))
        tables = [each._parameters for each in own] + [each._buffers for each in own]
        tensors = (tensor for table in tables for tensor in table.values() if tensor is not None)
        return next((tensor.device for tensor in tensors), found)

    def _look_around(self) -> None:
        """Find out which of the two devices this machine has, and tell the user of missing ones."""
        self._here = _exists(self.device)
        self._output_here = self.output_device is not None and _exists(self.output_device)
        missing = [] if self._here else [f"runs where it is, not on {self.device}"]
        if self.output_device is not None and not self._output_here:
            missing.append(f"leaves its outputs where it runs, not on {self.output_device}")
        if missing:
            kind = type(self.module).__name__
            warnings.warn(
                f"`OnDevice({kind})` {' and '.join(missing)}: this machine has no such device.",
                stacklevel=3,
            )


def keeping(fn: Callable[[Tensor], Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return ``fn`` without its moves to other devices: tensors are kept on, or go to, ``device``.

    Whether it moves is asked with an empty tensor: the module may be pinned because it fits nowhere
    else. Nothing can be copied out of "meta", so tensors there are asked for by one on the CPU.
    """

    def kept(tensor: Tensor) -> Tensor:
        here = _CPU if tensor.is_meta else tensor.device
        probe = fn(torch.empty(0, dtype=tensor.dtype, device=here))
        moves = probe.device != here or tensor.is_meta
        return tensor.to(device, probe.dtype) if moves else fn(tensor)

    return kept


def _named(name: str, device: Device) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"`{name}` must be a name such as 'cpu' or 'cuda:0', but is {device!r}."
        ) from error
    if found.type in _EVERYWHERE:
        return torch.device(found.type)
    return torch.device(found.type, found.index or 0)  # as tensors name it, whatever is current


def _exists(device: torch.device) -> bool:
    if device.type in _EVERYWHERE:
        return True
    return (device.index or 0) < num_devices(device.type)


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module`` and all inside, except where another wrapper has its own device."""
    if not isinstance(module, OnDevice):
        yield module
        for child in module.children():
            yield from _own_modules(child)


def _moved(value: Nested, device: torch.device | None) -> Nested:
    if device is None:
        return value
    flatten(value)  # teaches torch's pytree the dataclasses inside

    # Any: a leaf of the user's own inputs.
    def moved(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf.to(device)  # type: ignore[arg-type]  # annotated as one overload of several
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    # Torch takes a packed sequence for a tuple of tensors, but its sizes must stay on the CPU.
    return pytree.tree_map(moved, value, is_leaf=lambda leaf: isinstance(leaf, PackedSequence))


def _current(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    """Make ``device`` the current one of its kind, and put the caller's back."""
    if device is None or device.type in _EVERYWHERE:
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)
