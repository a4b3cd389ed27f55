"""What travels between an executor and its worker processes: pickled, with the tensors set aside.

This is the pickle of `multiprocessing`, between a process and the children that it has started
itself; it crosses no host and reads no file (SECURITY.md). Tensors go as bytes, or as a place in
memory that both sides see; never through torch's own sharing, which would move their storage.
"""

from __future__ import annotations

import inspect
import io
import pickle
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from phalanx.errors import ConfigError, PhalanxError
from phalanx.replicas.hooks import HOOKS_OF_STATE

__all__ = [
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
    "span_bytes",
]

_ALIGN_BYTES = 64  # kernels may choose by alignment, so a copy lies as its original lay

# Any: whatever the user's code makes; tokens are tuples that the two sides agree on.
Aside = Callable[[Any], Any]


class _Packer(pickle.Pickler):
    """Ask about objects that are not plain values or containers: a call for each would cost more.

    An object that is set aside is met once; where it comes again, it is the same one over there.
    """

    def __init__(self, file: io.BytesIO, aside: Aside) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._aside = aside

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)):
            _refuse_interactive(obj)
            return NotImplemented if isinstance(obj, type) else _reduced_inner(obj)
        if isinstance(obj, types.MethodType):
            return _reduced_method(obj)
        token = self._aside(obj)
        if token is not None:
            return _found, token
        if isinstance(obj, Tensor) and is_plain(obj):
            return _restored, _taken_apart(obj)
        if isinstance(obj, nn.Module):
            return _reduced_module(obj)
        return NotImplemented


def _nothing(_: Any) -> None:
    return None


class _Finding(threading.local):
    """Whom the thread that unpickles asks about tokens."""

    find: Aside = staticmethod(_nothing)


_finding = _Finding()


def _found(*token: Any) -> Any:
    return _finding.find(token)


def pack(value: Any, aside: Aside = _nothing) -> bytes:
    """Pickle ``value``; what ``aside`` returns for an object stands for it, unless it is None.

    It is not asked about plain values, lists, tuples, dicts, sets, classes and functions.
    """
    file = io.BytesIO()
    _Packer(file, aside).dump(value)
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


# -- inner functions -------------------------------------------------


# Any: what `__reduce_ex__` returns.
def _reduced_inner(function: types.FunctionType) -> Any:
    """Return how a function is pickled that another one has made, and that captures nothing.

    By the other one's name, and its place among what that one makes: no code is sent. A function
    that captures variables would have its own ones over there, so pickle refuses it, and lambdas,
    which have no name.
    """
    outer_name, inner, name = function.__qualname__.rpartition(".<locals>.")
    if not inner or function.__closure__ or name == "<lambda>":
        return NotImplemented
    outer: Any = sys.modules.get(function.__module__)
    for each in outer_name.partition(".<locals>.")[0].split("."):
        outer = getattr(outer, each, None)
    codes = _inner_codes(outer, function.__code__.co_qualname)
    if function.__code__ not in codes or function.__globals__ is not _globals_of(outer):
        return NotImplemented
    place, defaults = codes.index(function.__code__), function.__defaults__
    told = outer, function.__code__.co_qualname, place, defaults, function.__kwdefaults__
    return _made_again, told, dict(function.__dict__) or None


def _inner_codes(outer: Any, qualified: str) -> list[types.CodeType]:
    """Return the code of all inner functions of this name, in their order."""
    if not isinstance(outer, types.FunctionType):
        return []
    found: list[types.CodeType] = []
    waiting = [inspect.unwrap(outer).__code__]
    while waiting:
        inner = [each for each in waiting.pop().co_consts if isinstance(each, types.CodeType)]
        found += [each for each in inner if each.co_qualname == qualified]
        waiting += inner
    return found


def _globals_of(outer: types.FunctionType) -> dict[str, Any]:
    unwrapped: types.FunctionType = inspect.unwrap(outer)  # past a decorator of another module
    return unwrapped.__globals__


# Any: values of the user's functions.
def _made_again(
    outer: types.FunctionType,
    qualified: str,
    place: int,
    defaults: tuple[Any, ...] | None,
    keywords: dict[str, Any] | None,
) -> types.FunctionType:
    code = _inner_codes(outer, qualified)[place]
    function = types.FunctionType(code, _globals_of(outer), code.co_name, defaults)
    function.__qualname__, function.__kwdefaults__ = qualified, keywords
    return function


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
def pack_data(data: Any, aside: Aside = _nothing) -> bytes:
    """Do as :func:`pack` for what batches hold.

    Raises:
        ConfigError: Something in it cannot be pickled.
        OutOfSpace: There is no room for what ``aside`` sets aside.
    """
    try:
        return pack(data, aside)
    except PhalanxError:
        raise
    except Exception as error:  # whatever the user's objects raise when pickled
        raise ConfigError(
            "What a batch holds must be picklable to be sent to worker processes (for "
            f"shard_loading=True its data set and `collate_fn`), but is not: {error}. Give tensors "
            "and plain values, define functions at the top of a module, or use executor='threads'."
        ) from error


def _refuse_interactive(obj: type | types.FunctionType) -> None:
    main = sys.modules.get("__main__")
    if obj.__module__ != "__main__" or main is None or _can_be_imported_again(main):
        return
    raise ConfigError(
        f"`{obj.__qualname__}` must be importable by worker processes, but is defined in a "
        "notebook or at a prompt. Move it to a file of its own, such as `model.py`, and import it "
        "from there, or use executor='threads'."
    )


def _can_be_imported_again(main: types.ModuleType) -> bool:
    return (
        getattr(main, "__spec__", None) is not None or getattr(main, "__file__", None) is not None
    )


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
                    f"processes, but is {type(value).__name__!r}: {cause}. Define functions at the "
                    "top of a module, make other objects in `forward`, or use executor='threads'."
                )
    return ConfigError(
        f"`module`, `loss` and `forward` must be picklable to be sent to worker processes, but are "
        f"not: {error}. Define functions at the top of a module (no lambda, no inner function that "
        "captures variables), or use executor='threads'."
    )
