"""Functions that no other process can import, as what they are made of.

A worker process imports what has a name in a module. It does not import the script that runs, nor
cells of a notebook; and lambdas and inner functions have no name to be found by. Their code is sent
as Python itself stores it, with its file's name, so that tracebacks show the user's lines. The
global variables that it reads are those of the same module over there: see `Definitions`.
"""

from __future__ import annotations

import functools
import itertools
import marshal
import pkgutil
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

__all__ = [
    "MAIN",
    "codes_of",
    "has_number",
    "is_found",
    "is_importable",
    "is_of_module",
    "keep_number",
    "namespace_of",
    "number_of",
    "reduced_code",
    "reduced_function",
    "reduced_numbered",
    "variables_of",
]

MAIN = "__main__"

# The same number for the same function or class here and in worker processes.
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_by_number: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_next_number = itertools.count()
# Kept: the bytes of one code may differ from time to time, and what is packed is compared.
_stored: weakref.WeakKeyDictionary[types.CodeType, bytes] = weakref.WeakKeyDictionary()
# By name, the global variables of code that has no module to be imported.
_namespaces: dict[str, dict[str, Any]] = {}


def is_importable(obj: type | types.FunctionType) -> bool:
    """Tell whether another process finds ``obj`` by its name, if it is where it says."""
    return obj.__module__ != MAIN and "<" not in obj.__qualname__


def is_found(obj: type | types.FunctionType) -> bool:
    """Tell whether ``obj`` is where it says; the methods that `NamedTuple` makes are not."""
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def has_number(obj: type | types.FunctionType) -> bool:
    """Tell whether ``obj`` is one object in a worker; lambdas and inner functions come anew."""
    return isinstance(obj, type) or "<" not in obj.__qualname__


# -- numbers ---------------------------------------------------------


def number_of(obj: type | types.FunctionType) -> int | None:
    """Return the number of ``obj``, if it has one."""
    return _numbers.get(obj)


def keep_number(obj: type | types.FunctionType, number: int | None = None) -> int:
    """Give ``obj`` this number, or the next one."""
    number = next(_next_number) if number is None else number
    _numbers[obj], _by_number[number] = number, obj
    return number


# Any, from here on: what `__reduce_ex__` returns, and the user's objects.
def reduced_numbered(number: int) -> Any:
    """Return how what has this number is pickled for a process that has it, too."""
    return _numbered, (number,)


def _numbered(number: int) -> Any:
    return _by_number[number]


# -- functions -------------------------------------------------------


def reduced_function(function: types.FunctionType) -> Any:
    """Return how a function is pickled by value.

    Its annotations stay here: nothing that a model computes reads them, and they may hold anything.
    """
    code, closure = function.__code__, function.__closure__
    if code not in _stored:
        _stored[code] = marshal.dumps(code)
    made = _stored[code], _Namespace(namespace_of(function)), function.__name__, closure
    state = {
        "__qualname__": function.__qualname__,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
        "__defaults__": function.__defaults__,
        "__kwdefaults__": function.__kwdefaults__,
    }
    return _function, made, (state, vars(function)), None, None, _complete


def _function(
    code: bytes, namespace: dict[str, Any], name: str, closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    return types.FunctionType(marshal.loads(code), namespace, name, None, closure)


def _complete(function: types.FunctionType, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for name, value in state[0].items():
        setattr(function, name, value)
    vars(function).update(state[1])


def reduced_code(obj: Any) -> Any:
    """Return how other parts of code are pickled; `NotImplemented` for what is none."""
    if isinstance(obj, types.CellType):  # made empty: it may hold its own function
        return _empty_cell, (), _content(obj), None, None, _fill
    if isinstance(obj, types.ModuleType):
        return (_module, (obj.__name__,)) if _is_imported_by_name(obj) else NotImplemented
    if isinstance(obj, type(_cached)):
        return _cached_again, (obj.__wrapped__, obj.cache_parameters())
    return NotImplemented


def _empty_cell() -> types.CellType:
    return types.CellType()


def _content(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # a name that was not assigned yet
        return ()


def _fill(cell: types.CellType, content: tuple[Any, ...]) -> None:
    for value in content:
        cell.cell_contents = value


@functools.lru_cache
def _cached() -> None:
    """What its class is taken from."""


def _cached_again(function: Any, options: dict[str, Any]) -> Any:
    return functools.lru_cache(**options)(function)


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of functions and classes within."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from codes_of(each)


# -- where their global variables are --------------------------------


class _Namespace:
    """Stands for the global variables of this name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        return variables_of, (self._name,)


def namespace_of(function: types.FunctionType) -> str:
    """Return the name of the module whose global variables ``function`` reads.

    Of those that are in no module, such as a doctest's, it is a name that no module has.
    """
    found = function.__globals__
    name = str(found.get("__name__"))
    module = sys.modules.get(name)
    if name != MAIN and (module is None or vars(module) is not found):
        name = f"{name} {id(found)}"
        _namespaces[name] = found  # held: the id alone would come back
    return name


def variables_of(name: str) -> dict[str, Any]:
    """Return the global variables that :func:`namespace_of` has named so."""
    if name == MAIN:
        return vars(sys.modules[MAIN])
    if is_of_module(name):
        return vars(_module(name))
    return _namespaces.setdefault(name, {"__name__": name.partition(" ")[0]})


def is_of_module(namespace: str) -> bool:
    """Tell whether these are the variables of a module that others import."""
    return namespace != MAIN and " " not in namespace


def _is_imported_by_name(module: types.ModuleType) -> bool:
    name = module.__name__
    if sys.modules.get(name) is module:
        return True
    try:  # such as `torch.ops.aten`, an attribute of a module
        return _module(name) is module
    except (ImportError, AttributeError, ValueError):
        return False


def _module(name: str) -> types.ModuleType:
    found: types.ModuleType = pkgutil.resolve_name(name)
    return found
