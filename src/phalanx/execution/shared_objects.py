"""What runs refer to beside the module, such as the loss, as worker processes follow it.

Workers have it from the start, and under a token in each run. Before a run it is looked at here:
when anything in it is no longer as it was sent, all of it is sent anew, and workers take that in
the place of what they had. What belongs to the module stands for the worker's own.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.execution.mailbox import Mailbox, collect
from phalanx.ipc import aligned
from phalanx.memory import SharedMemoryPool, TensorHandle
from phalanx.replicas import (
    CodeTeller,
    FunctionState,
    GlobalValues,
    PackedGlobals,
    WatchedObjects,
    adopt_globals,
    bytes_of,
    can_be_copied,
    can_be_followed,
    is_plain,
    load,
    pack,
    picklable_or_named,
    span_bytes,
    state_of_function,
)
from phalanx.torch_internals import make_subclass

__all__ = ["PackedObjects", "SharedObjects", "unpack_objects"]

_SMALL_BYTES = 1 << 13  # up to here torch compares faster, beyond it NumPy
_WORDS = (torch.int64, torch.int32, torch.int16)


@dataclass(frozen=True)
class PackedObjects:
    """The objects as they were at one moment.

    Attributes:
        version: Counts them, from 0.
        blob: All of them, pickled; large tensors are places in the pool.
        values: Those of global variables that their code reads, where other code came in.
    """

    version: int
    blob: bytes
    values: PackedGlobals


@dataclass(frozen=True)
class _Moment:
    """The objects when they were packed, and what they are compared with since."""

    packed: PackedObjects
    watched: WatchedObjects
    contents: list[_Contents]


class SharedObjects:
    """The objects in this process.

    Args:
        source: The module; what belongs to it is not looked at.
        objects: What runs refer to. What they reach may change, and they do not.
        pool: Where large tensors lie on their way.
        teller: Tells workers of code that they cannot import.

    Raises:
        ConfigError: They cannot be sent.
    """

    def __init__(
        self,
        source: nn.Module,
        objects: Sequence[object],
        pool: SharedMemoryPool,
        teller: CodeTeller,
    ) -> None:
        self._source = source
        self._objects = list(objects)
        self._pool = pool
        self._teller = teller
        self._mailbox = Mailbox(pool)
        self._first: dict[types.FunctionType, FunctionState] = {}
        self._globals = GlobalValues([source, *objects], teller)
        self._now = self._pack(0, {})

    @property
    def packed(self) -> PackedObjects:
        """The objects as a worker needs them now."""
        return self._now.packed

    @property
    def globals_at_first(self) -> PackedGlobals:
        """The values of global variables that a worker begins with."""
        return self._globals.at_first

    def changed_globals(self) -> PackedGlobals:
        """Return those that are no longer as they were at first."""
        return self._globals.changes()

    def look(self) -> None:
        """See whether anything has changed, and pack it all if so.

        Raises:
            ConfigError: It cannot be sent as it is now.
        """
        before = self._now
        if before.watched.are_still() and all(map(_Contents.are_still, before.contents)):
            return
        values, version = before.packed.values, before.packed.version + 1
        now = self._pack(version, values)
        if not now.watched.code <= before.watched.code:  # code that nobody has looked through
            changed = self._globals.changes()
            self._globals = GlobalValues([self._source, *self._objects], self._teller)
            values = {**changed, **self._globals.at_first}
            now = replace(now, packed=replace(now.packed, values=values))
        self._now = now  # all at once: whoever is interrupted before packs it again

    def _pack(self, version: int, values: PackedGlobals) -> _Moment:
        known, teller = dict(_parts_of(self._source)), self._teller  # `watched` is not to hold us

        def inline(obj: Any) -> Any:
            return known.get(id(obj))

        def packed_or_none(obj: Any) -> bytes | None:
            try:
                return pack(obj, inline, teller)
            except Exception:  # whatever the user's objects raise when pickled
                return None

        watched = WatchedObjects(self._objects, known, packed_or_none)
        self._mailbox.clear()
        self._mailbox.reserve(sum([aligned(span_bytes(each)) for each in watched.tensors]))
        places: dict[tuple[int, int], TensorHandle] = {}

        def aside(obj: Any) -> Any:
            token = known.get(id(obj))
            if token is not None or not isinstance(obj, Tensor) or not can_be_copied(obj):
                return token
            if not is_plain(obj) or vars(obj):
                return ("held", type(obj), obj.detach(), obj.requires_grad, dict(vars(obj)))
            token = self._mailbox.put(obj)
            if token is not None:
                _, place, size, _ = token
                places[obj.data_ptr(), size] = place
            return token

        states = self._states(watched.functions, inline)
        try:
            blob = pack((self._objects, states), aside, self._teller)
        except Exception as error:  # whatever the user's objects raise when pickled
            raise picklable_or_named(self._source, error) from None
        contents = [_Contents(each, self._sent(each, places)) for each in watched.tensors]
        return _Moment(PackedObjects(version, blob, values), watched, contents)

    def _sent(self, tensor: Tensor, places: dict[tuple[int, int], TensorHandle]) -> Tensor:
        """Return the bytes of ``tensor`` that were sent."""
        size = span_bytes(tensor)
        place = places.get((tensor.data_ptr(), size))
        if place is None:
            return bytes_of(tensor).clone()
        return self._pool.at(
            TensorHandle(place.region, place.offset_bytes, torch.uint8, (size,), (1,))
        )

    # Any: the objects of the user's own functions.
    def _states(
        self, functions: Sequence[types.FunctionType], aside: Any
    ) -> list[tuple[types.FunctionType, FunctionState]]:
        """Return what functions have beside their code.

        What is neither plain nor a tensor or module stays what the worker's own import makes of it,
        until it is replaced here.
        """
        found: list[tuple[types.FunctionType, FunctionState]] = []
        for function in functions:
            state, sent = state_of_function(function), FunctionState()
            first = self._first.get(function, state)
            self._first[function] = {**state, **first}
            for place in first:
                if place not in state:
                    raise _refused(function, place)
            for place, value in state.items():
                is_new = first.get(place, self) is not value
                if not (is_new or place[0] == "attribute" or _is_followed(value)):
                    continue
                if self._can_be_sent((function, value), aside):
                    sent[place] = value
                elif is_new:
                    raise _refused(function, place)
            if sent:
                found.append((function, sent))
        return found

    def _can_be_sent(self, value: Any, aside: Any) -> bool:
        try:
            pack(value, aside, self._teller)
        except Exception:  # whatever the user's objects raise when pickled
            return False
        return True


def _refused(function: types.FunctionType, place: tuple[str, Any]) -> ConfigError:
    kind, key = place
    return ConfigError(
        f"The {kind} {key!r} of `{function.__qualname__}` must be one that worker processes can be "
        "sent, as it has changed since they were started, but is gone, cannot be pickled, or "
        "belongs to a function that cannot be imported by its name. Keep it in an attribute of "
        "an object, or use executor='threads'."
    )


def _is_followed(value: object) -> bool:
    return isinstance(value, (Tensor, nn.Module)) or can_be_followed(value)


class _Contents:
    """The bytes of one tensor, beside those that were sent."""

    def __init__(self, tensor: Tensor, sent: Tensor) -> None:
        self._tensor = tensor
        self._form = _form_of(tensor)
        now = bytes_of(tensor)
        words = next((each for each in _WORDS if _fits(now, each) and _fits(sent, each)), None)
        if words is not None:
            now, sent = now.view(words), sent.view(words)
        self._are_equal: Callable[[], bool] = partial(torch.equal, now, sent)
        if now.nbytes > _SMALL_BYTES:
            self._are_equal = partial(np.array_equal, now.numpy(), sent.numpy())

    def are_still(self) -> bool:
        """Compare all: writes through `.data`, NumPy or another executor raise no version."""
        return _form_of(self._tensor) == self._form and self._are_equal()


def _fits(content: Tensor, words: torch.dtype) -> bool:
    return content.numel() % words.itemsize == 0 == content.storage_offset() % words.itemsize


def _form_of(tensor: Tensor) -> tuple[Any, ...]:  # Any: address, dtype, shape, strides
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _parts_of(source: nn.Module) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield what belongs to the module, by id, as the token for the worker's own."""
    for index, parameter in enumerate(source.parameters()):
        yield id(parameter), ("parameter", index)
    for index, module in enumerate(source.modules()):
        yield id(module), ("module", index)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield id(buffer), ("buffer", index, key)


def unpack_objects(
    packed: PackedObjects, module: nn.Module, pool: SharedMemoryPool
) -> list[Any]:  # Any: what runs refer to
    """Return the objects, in a worker whose module is ``module``."""
    modules, parameters = list(module.modules()), list(module.parameters())

    def find(token: Any) -> Any:
        match token:
            case ("mail", *rest):
                return collect(pool, *rest)
            case ("parameter", index):
                return parameters[index]
            case ("module", index):
                return modules[index]
            case ("buffer", index, key):
                return modules[index]._buffers[key]
        _, kind, content, trained, attributes = token
        made = content if kind is Tensor else make_subclass(kind, content, trained)
        made.requires_grad_(trained)
        made.__dict__.update(attributes)
        return made

    objects, states = load(packed.blob, find)
    for function, state in states:
        _restore_state(function, state)
    adopt_globals(packed.values, [module, *objects])
    return list(objects)


def _restore_state(function: types.FunctionType, state: FunctionState) -> None:
    cells, defaults = function.__closure__ or (), list(function.__defaults__ or ())
    keywords = function.__kwdefaults__ or {}
    for (kind, key), value in state.items():
        match kind:
            case "variable":
                cells[key].cell_contents = value
            case "default":
                defaults[key:] = [value, *defaults[key + 1 :]]
            case "keyword":
                keywords[key] = value
            case _:
                setattr(function, key, value)
    if defaults:
        function.__defaults__ = tuple(defaults)
