"""What travels between an executor and its worker processes: pickled, with the tensors set aside.

This is the pickle of `multiprocessing`, between a process and the children that it has started
itself; it crosses no host and reads no file (SECURITY.md). Tensors go as bytes, or as a place in
memory that both sides see; never through torch's own sharing, which would move their storage.
"""

from __future__ import annotations

import io
import pickle
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from phalanx.errors import ConfigError, PhalanxError
from phalanx.replicas.code_by_value import (
    is_importable,
    number_of,
    reduced_code,
    reduced_function,
    reduced_numbered,
)
from phalanx.replicas.hooks import HOOKS_OF_STATE

__all__ = [
    "CodeTeller",
    "Form",
    "alignment_of",
    "bytes_of",
    "copied",
    "copy_of",
    "is_plain",
    "load",
    "pack",
    "pack_data",
    "picklable_or_named",
    "reduced",
    "span_bytes",
]

_ALIGN_BYTES = 64  # kernels may choose by alignment, so a copy lies as its original lay

# Any: whatever the user's code makes; tokens are tuples that the two sides agree on.
Aside = Callable[[Any], Any]


class CodeTeller(Protocol):
    """Sees to it that those who read what is packed have the code that it refers to."""

    def number(self, obj: type | types.FunctionType) -> int | None:
        """Return the number that it has over there; None to send it by value."""


class _Packer(pickle.Pickler):
    """Ask about objects that are not plain values or containers: a call for each would cost more.

    An object that is set aside is met once; where it comes again, it is the same one over there.
    """

    def __init__(self, file: io.BytesIO, aside: Aside, teller: CodeTeller | None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._aside = aside
        self._number = number_of if teller is None else teller.number

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)):
            if is_importable(obj):
                return NotImplemented
            number = self._number(obj)
            if number is not None:
                return reduced_numbered(number)
            return NotImplemented if isinstance(obj, type) else reduced_function(obj)
        token = self._aside(obj)
        return reduced(obj) if token is None else (_found, token)


# Any: what `__reduce_ex__` returns.
def reduced(obj: Any) -> Any:
    """Return how ``obj``, neither class nor function, is pickled; NotImplemented for as usual."""
    if isinstance(obj, types.MethodType):
        return _reduced_method(obj)
    if isinstance(obj, Tensor) and is_plain(obj):
        return _restored, _taken_apart(obj)
    if isinstance(obj, nn.Module):
        return _reduced_module(obj)
    return reduced_code(obj)


def _nothing(_: Any) -> None:
    return None


class _Finding(threading.local):
    """Whom the thread that unpickles asks about tokens."""

    find: Aside = staticmethod(_nothing)


_finding = _Finding()


def _found(*token: Any) -> Any:
    return _finding.find(token)


def pack(value: Any, aside: Aside = _nothing, teller: CodeTeller | None = None) -> bytes:
    """Pickle ``value``; what ``aside`` returns for an object stands for it, unless it is None.

    It is not asked about plain values, lists, tuples, dicts, sets, classes and functions. Those
    that cannot be imported are what ``teller`` has told; without one, what was told here.
    """
    file = io.BytesIO()
    _Packer(file, aside, teller).dump(value)
    return file.getvalue()


def load(data: bytes, find: Aside = _nothing) -> Any:
    """Undo :func:`pack`; ``find`` returns the object for a token that ``aside`` gave."""
    before = _finding.find
    _finding.find = find
    try:
        return pickle.loads(data)
    finally:
        _finding.find = before


# -- tensors as bytes ------------------------------------------------


@dataclass(frozen=True)
class Form:
    """How a tensor lies in its memory.

    Attributes:
        alignment: Of its first byte, modulo 64.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int


def span_bytes(tensor: Tensor) -> int:
    """Return how many bytes ``tensor`` spans."""
    if tensor.numel() == 0:
        return 0
    last = sum([(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)])
    return (last + 1) * tensor.itemsize


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory that ``tensor`` spans."""
    count = span_bytes(tensor) // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,)).view(torch.uint8)


def alignment_of(tensor: Tensor) -> int:
    """Return where its first byte lies, modulo 64; of one between two elements' places, before."""
    offset = tensor.data_ptr() % _ALIGN_BYTES if tensor.numel() else 0
    return offset - offset % tensor.itemsize


def copy_of(content: Tensor, form: Form) -> Tensor:
    """Return the tensor of this form, in memory of its own, aligned as the original."""
    room = torch.empty(content.numel() + _ALIGN_BYTES, dtype=torch.uint8)
    start = (form.alignment - room.data_ptr()) % _ALIGN_BYTES
    own = room[start : start + content.numel()].copy_(content).view(form.dtype)
    return own.as_strided(form.shape, form.strides, own.storage_offset())


def copied(tensor: Tensor) -> Tensor:
    """Return a copy that lies as ``tensor`` does, where that is plain; else any copy."""
    if not is_plain(tensor) or not tensor.numel():
        return tensor.clone()
    form = Form(tensor.dtype, tuple(tensor.shape), tensor.stride(), alignment_of(tensor))
    return copy_of(bytes_of(tensor), form)


def _taken_apart(tensor: Tensor) -> tuple[bytes, Form]:
    shape, strides = tuple(tensor.shape), tensor.stride()
    form = Form(tensor.dtype, shape, strides, alignment_of(tensor))
    return bytes_of(tensor).numpy().tobytes(), form


def _restored(content: bytes, form: Form) -> Tensor:
    if not content:
        return torch.empty_strided(form.shape, form.strides, dtype=form.dtype)
    return copy_of(torch.frombuffer(bytearray(content), dtype=torch.uint8), form)


def is_plain(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is nothing but numbers in the memory of a CPU."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


# -- methods ---------------------------------------------------------


# Any: what `__reduce_ex__` returns.
def _reduced_method(method: types.MethodType) -> Any:
    """Return how a bound method is pickled: pickle's own way finds it by its name in the class.

    One that was put into its object would not be there, or be another one.
    """
    owner, name = method.__self__, method.__func__.__name__
    if isinstance(owner, type) or getattr(type(owner), name, None) is method.__func__:
        return NotImplemented
    return _bound, (method.__func__, owner)


def _bound(function: Callable[..., Any], owner: object) -> types.MethodType:
    return types.MethodType(function, owner)


# -- modules ---------------------------------------------------------


# Any: what `__reduce_ex__` returns.
def _reduced_module(module: nn.Module) -> Any:
    """Return how a module is pickled: without hooks on its state dict, which no worker runs.

    They may be inner functions, as those of `weight_norm` are.
    """
    if parametrize.is_parametrized(module):
        return _reduced_parametrized(module)
    if not any(module.__dict__.get(kind) for kind in HOOKS_OF_STATE):
        return NotImplemented
    reduced: Any = module.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if not isinstance(reduced, tuple) or len(reduced) < 3:
        return reduced
    return (*reduced[:2], _without_hooks(reduced[2]), *reduced[3:])


def _reduced_parametrized(module: nn.Module) -> Any:
    """Return how one with parametrizations is pickled: torch makes it a class that it cannot send.

    Over there another such class is made, by a parametrization that does nothing; the state, in
    which the real ones are, takes its place.
    """
    kind: Any = parametrize.type_before_parametrizations(module)
    parametrizations = module.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    names = tuple(parametrizations)
    return _parametrized, (kind, names), _without_hooks(kind.__getstate__(module))


def _parametrized(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.empty(1)))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
    return module


def _without_hooks(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {key: type(value)() if key in HOOKS_OF_STATE else value for key, value in state.items()}


# -- what cannot be sent ---------------------------------------------


# Any: the user's data.
def pack_data(data: Any, aside: Aside = _nothing, teller: CodeTeller | None = None) -> bytes:
    """Do as :func:`pack` for what batches hold.

    Raises:
        ConfigError: Something in it cannot be pickled.
        OutOfSpace: There is no room for what ``aside`` sets aside.
    """
    try:
        return pack(data, aside, teller)
    except PhalanxError:
        raise
    except Exception as error:  # whatever the user's objects raise when pickled
        raise ConfigError(
            "What a batch holds must be picklable to be sent to worker processes, but is "
            f"not: {error}. Give tensors and plain values, or use executor='threads'."
        ) from None


def picklable_or_named(module: nn.Module, error: Exception) -> ConfigError:
    """Return the error that names which attribute of ``module`` cannot be pickled."""
    if isinstance(error, ConfigError):
        return error
    for path, child in module.named_modules():
        for key, value in vars(child).items():
            if key in ("_parameters", "_modules"):
                continue
            try:
                pack(value, lambda obj: ("parameter",) if isinstance(obj, nn.Module) else None)
            except Exception as cause:  # whatever the user's objects raise
                name = f"{path}.{key}" if path else key
                return ConfigError(
                    f"Attribute `{name}` of `module` must be picklable to be sent to worker "
                    f"processes, but is {type(value).__name__!r}: {cause}. Make such objects in "
                    "`forward`, or use executor='threads'."
                )
    return ConfigError(
        f"`module`, `loss` and `forward` must be picklable to be sent to worker processes, but are "
        f"not: {error}. Make what cannot be pickled where it is used, or use executor='threads'."
    )
