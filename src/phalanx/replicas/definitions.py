"""What worker processes are told of code that they cannot import: the script's, a notebook's.

    this process                                       a worker
    class Net of `__main__` is met while packing  ──►  made again, under the same number
    global variables that its functions read      ──►  set in the worker's own `__main__`
    everything else says: number 7                ──►  that class

Each class and each function that has a name is told once, so it is one object over there, and what
comes back is of the class that is here. Lambdas and inner functions go with what holds them.
cloudpickle takes classes apart; it is not given functions, whose variables it would copy.
"""

from __future__ import annotations

import dis
import io
import pickle
import sys
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import cloudpickle
from torch import nn

from phalanx.errors import ConfigError, PhalanxError
from phalanx.replicas.code_by_value import (
    MAIN,
    codes_of,
    has_number,
    is_found,
    is_importable,
    is_of_module,
    keep_number,
    namespace_of,
    number_of,
    reduced_function,
    reduced_numbered,
    variables_of,
)
from phalanx.replicas.packing import reduced

__all__ = ["Definitions", "add_definitions", "why_missing"]

_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_GIVEN = ("__builtins__", "__name__")  # every namespace has its own


class Definitions:
    """What the workers of one executor are to be told, in this order.

    Args:
        module: The one that is trained. Workers have their own copy of it, so global variables
            that hold it, or a part of it, are not sent.

    Attributes:
        packed: For :func:`add_definitions`; nothing but appended to.
    """

    def __init__(self, module: nn.Module) -> None:
        self.packed: list[bytes] = []
        self._trained = {id(each) for each in (*module.modules(), *module.parameters())}
        self._told: set[int] = set()
        self._names: set[tuple[str, str]] = set()
        self._imported: set[str] = set()
        self._waiting: deque[types.FunctionType] = deque()
        self._lock = threading.RLock()  # the thread of each worker packs

    def number(self, obj: type | types.FunctionType) -> int | None:
        """Tell what ``obj`` is, and return its number; None for a function without a name.

        Raises:
            ConfigError: It cannot be sent.
        """
        number = number_of(obj)
        if number in self._told:
            return number
        with self._lock:
            if isinstance(obj, type) or has_number(obj):
                return self._tell(obj)
            self._tell_names([obj])
            return None

    def _tell(self, obj: type | types.FunctionType) -> int:
        number = number_of(obj)
        if number is not None and number in self._told:  # by another thread, meanwhile
            return number
        if isinstance(obj, type):  # made before it, with what code of theirs reads when it is made
            for base in (*reversed(obj.__mro__[1:]), type(obj)):
                if not is_importable(base):
                    self.number(base)
        pickler = _ByValue(self)
        try:
            content = pickler.dumps(None, obj)
        except PhalanxError:
            raise
        except Exception as error:  # whatever the user's objects raise when pickled
            kind = "Class" if isinstance(obj, type) else "Function"
            raise ConfigError(
                f"{kind} `{obj.__qualname__}` must be picklable to be sent to worker processes, as "
                f"they do not import {_place_of(obj)}, but is not: {error}. Move it to a file of "
                "its own, such as `model.py`, and import it from there, or use executor='threads'."
            ) from None
        self._keep(content, pickler)
        number = number_of(obj)
        assert number is not None
        return number

    def _keep(self, content: bytes, pickler: _ByValue) -> None:
        self.packed.append(content)
        self._told.update(pickler.numbers)
        self._tell_names(pickler.functions)

    def _tell_names(self, functions: Iterable[types.FunctionType]) -> None:
        """Tell the global variables that these functions read, and what those refer to."""
        self._waiting += functions
        while self._waiting:
            function = self._waiting.popleft()
            namespace, variables = namespace_of(function), function.__globals__
            if is_of_module(namespace):
                continue  # imported over there, with all its variables
            for name in _names_read(function.__code__):
                key = namespace, name
                if name not in variables or name in _GIVEN:
                    continue
                value = variables[name]
                if key not in self._names:
                    self._names.add(key)
                    self._tell_variable(key, value)
                if isinstance(value, types.ModuleType):
                    self._tell_submodules(value, function.__code__)

    def _tell_variable(self, key: tuple[str, str], value: object) -> None:
        try:
            if isinstance(value, (type, types.FunctionType)) and not is_importable(value):
                self.number(value)
            pickler = _ByValue(self)
            content = pickler.dumps(key, value)
        except Exception as error:  # as above; an error only where the variable is read
            self.packed.append(pickle.dumps((*key, str(error))))
        else:
            self._keep(content, pickler)

    def _tell_submodules(self, module: types.ModuleType, code: types.CodeType) -> None:
        """Let workers import what ``code`` reads as an attribute of a package, as `a.b` of `a`."""
        words = {word for each in codes_of(code) for word in each.co_names}
        start = f"{module.__name__}."
        for name, found in list(sys.modules.items()):
            if (
                name.startswith(start)
                and name not in self._imported
                and words.issuperset(name[len(start) :].split("."))
            ):
                self._imported.add(name)
                self.packed.append(_ByValue(self).dumps(None, found))

    def reduced(self, obj: Any) -> Any:  # Any: as in `reduced`
        """Do as `reduced`; what is trained is not sent along with code.

        Raises:
            PicklingError: ``obj`` belongs to it.
        """
        if id(obj) in self._trained:
            raise pickle.PicklingError(
                "it holds a part of the module that is trained, of which each worker has a copy of "
                "its own; use the module that `forward` is given"
            )
        return reduced(obj)

    def was_told(self, number: int) -> bool:
        """Tell whether workers know what has this number."""
        return number in self._told


class _ByValue(cloudpickle.CloudPickler):  # type: ignore[misc]  # it has no annotations
    """Take apart what workers do not know yet.

    Attributes:
        functions: Those among it.
        numbers: Of what has been given one.
    """

    def __init__(self, definitions: Definitions) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=pickle.HIGHEST_PROTOCOL)
        self._definitions = definitions
        self._named: list[type | types.FunctionType] = []
        self.functions: list[types.FunctionType] = []
        self.numbers: list[int] = []

    def dumps(self, variable: tuple[str, str] | None, value: object) -> bytes:
        """Return ``value``, and the name of the variable that holds it, for `add_definitions`."""
        self.dump(variable)
        self.dump(value)
        pairs = []
        for each in self._named:
            number = number_of(each)
            pairs.append((keep_number(each) if number is None else number, each))
        self.numbers = [number for number, _ in pairs]
        self.dump(pairs)  # which refers to what stands before
        return self._file.getvalue()

    # Any: what `__reduce_ex__` returns, and the user's objects.
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (type, types.FunctionType)):
            found = self._definitions.reduced(obj)
            return super().reducer_override(obj) if found is NotImplemented else found
        if is_importable(obj) and is_found(obj):
            return super().reducer_override(obj) if isinstance(obj, type) else NotImplemented
        number = number_of(obj)
        if number is not None and self._definitions.was_told(number):
            return reduced_numbered(number)
        if has_number(obj):
            self._named.append(obj)
        if isinstance(obj, type):
            return super().reducer_override(obj)
        self.functions.append(obj)
        return reduced_function(obj)


def _place_of(obj: type | types.FunctionType) -> str:
    return "the script or notebook that runs" if obj.__module__ == MAIN else "what functions make"


def _names_read(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the global variables that ``code`` reads, and code within."""
    for each in codes_of(code):
        for instruction in dis.get_instructions(each):
            if instruction.opname in _READS:
                yield instruction.argval


# -- in a worker -----------------------------------------------------

_kept: list[object] = []
_missing: dict[str, str] = {}


def add_definitions(packed: Iterable[bytes]) -> None:
    """Make what `Definitions.packed` tells of."""
    for content in packed:
        unpickler = pickle.Unpickler(io.BytesIO(content))
        match unpickler.load():
            case (_, name, reason):
                _missing[name] = reason
            case variable:
                _add(variable, unpickler)


def _add(variable: tuple[str, str] | None, unpickler: pickle.Unpickler) -> None:
    try:
        value = unpickler.load()
    except Exception as error:  # whatever the user's objects raise when unpickled
        if variable is None:
            raise
        _missing[variable[1]] = str(error)
        return
    for number, obj in unpickler.load():
        keep_number(obj, number)
        _kept.append(obj)
    if variable is not None:
        namespace, name = variable
        variables_of(namespace)[name] = value


def why_missing(name: str) -> str | None:
    """Return why a worker lacks the global variable ``name``, where the script has it."""
    return _missing.get(name)
