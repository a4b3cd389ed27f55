"""Global variables and class attributes that a model's code reads, the same in worker processes.

So are attributes of the functions it calls, and their defaults that can change inside.

A worker process imports modules anew. So what was set in them since, from a command line say, would
have its old value in workers; and what the script itself has set, that of its start. The code of
the module, the loss and `forward` is looked through for what it reads; plain values go to the
workers when they start, and again when they have changed; those of installed packages only when
they start.

Followed are numbers, texts, paths and the like, small tensors and arrays, functions and classes,
containers, namespaces, dataclasses and plain objects of them. A plain object is one that pickle
takes by its attributes alone. Left alone is what the code itself assigns (a counter, a cache that
is filled once), which is each process's own, and whatever belongs to torch, NumPy, Python's library
or this package.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import dis
import enum
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.replicas.code_by_value import MAIN, codes_of
from phalanx.replicas.packing import CodeTeller, is_plain, load, pack
from phalanx.replicas.tensor_version import TensorVersion

__all__ = [
    "GlobalValues",
    "PackedGlobals",
    "adopt_globals",
    "can_be_followed",
    "is_atom",
    "is_foreign",
]

# (module, qualified name of the class or function or "", name of the variable) -> the value,
# pickled, or nothing where there is none any more.
PackedGlobals = Mapping[tuple[str, str, str], bytes]
# (module, qualified name of a class or function, or "" for the module's globals).
_Home = tuple[str, str]

_FOREIGN = frozenset({"torch", "numpy", "phalanx", "builtins", *sys.stdlib_module_names})
_MOST_OBJECTS = 5000  # looked through; a model of a large library reaches no more that matter
_MOST_MEMBERS = 1000  # a larger container holds data, not options
_MOST_IN_ALL = 10_000  # of a container and those within it
_MOST_DEPTH = 6
_MOST_TENSOR_BYTES = 1 << 16
_SCALARS = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, enum.Enum, np.generic),
    *(PurePath, range),
)
_IMPORTED = (types.FunctionType, types.BuiltinFunctionType, type)
_SEQUENCES = (list, tuple, set, frozenset, torch.Size)
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_MORE_MAPPINGS = (collections.OrderedDict, collections.defaultdict, collections.Counter)
_OF_PICKLE = ("__reduce__", "__reduce_ex__", "__getstate__")
_STORES = tuple(dis.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL") if name in dis.opmap)


class GlobalValues:
    """The values in this process, and which of them have changed since the workers began.

    Args:
        roots: The module, and what else the workers call.
        teller: Tells workers of code that they cannot import.

    Attributes:
        at_first: What a worker begins with.
    """

    def __init__(self, roots: Sequence[object], teller: CodeTeller | None = None) -> None:
        self._roots = roots
        self._teller = teller
        self._changed: dict[tuple[str, str, str], bytes] = {}
        self._look_through()

    def _look_through(self) -> None:
        """Note what is read by the code as it is now."""
        teller, code = self._teller, _Code(self._roots)
        self._followed: list[_Followed] = []
        first: dict[tuple[str, str, str], bytes] = {}
        # Thousands of names, of which no step's code changes any: looked at once.
        installed = {module for module, _ in code.homes if _is_installed(module)}
        for home, name in code.names():
            value = _look_up(code.homes[home], name)
            packed = _packed(value, teller)
            # A worker's own import has the latter; what it was told of a script may be old.
            is_told = home[0] == MAIN or not _is_at_home(value, home, name)
            if packed is not None and is_told:
                first[*home, name] = packed
            if (packed is not None or value is _NOTHING) and home[0] not in installed:
                self._followed.append(_Followed((*home, name), code.homes[home], value, teller))
        self.at_first: PackedGlobals = first

    def changes(self) -> PackedGlobals:
        """Return all that is not as it was at first; nothing most of the time."""
        changed = [each for each in self._followed if each.has_changed()]
        for each in changed:
            packed = _ABSENT if each.value is _NOTHING else _packed(each.value, self._teller)
            if packed is not None:
                self._changed[each.key] = packed
        if any(isinstance(each.value, _IMPORTED) for each in changed):
            before = self.at_first
            self._look_through()  # other code may read other variables
            self._changed |= {k: v for k, v in self.at_first.items() if before.get(k) != v}
        return dict(self._changed)


def adopt_globals(values: PackedGlobals, roots: Sequence[object]) -> None:
    """Give the code of ``roots``, in a worker, the values that its parent has."""
    if not values:
        return
    homes = _Code(roots).homes
    for (module, qualified, name), packed in values.items():
        home = homes.get((module, qualified))
        if home is not None and _packed(_look_up(home, name)) != packed:
            _put(home, name, packed)
    unknown = {key: packed for key, packed in values.items() if key[:2] not in homes}
    if len(unknown) < len(values):  # code that has come just now may read them
        adopt_globals(unknown, roots)


_NOTHING = object()
_ABSENT = b""


class _Followed:
    """One variable, and what it was when it was looked at last."""

    # Any: a variable of the user's code, and where it is.
    def __init__(
        self, key: tuple[str, str, str], home: Any, value: Any, teller: CodeTeller | None
    ) -> None:
        self.key = key
        self._teller = teller
        self._home = home
        self._note(value)

    def _note(self, value: Any) -> None:
        self.value = value
        self._seen = TensorVersion(value) if isinstance(value, Tensor) else None
        self._is_compared = _is_plain(value, _members)
        # A comparison costs less than pickling, but arrays and most objects have none.
        self._is_pickled = not self._is_compared and _is_plain(value, _members_of_any)
        self._copy = self._copied(value)

    def _copied(self, value: Any) -> Any:
        if self._is_compared:
            return copy.deepcopy(value)
        return _pickled(value, self._teller) if self._is_pickled else None

    def _is_as_copied(self, value: Any) -> bool:
        if self._is_compared:
            return bool(value == self._copy)
        return not self._is_pickled or _pickled(value, self._teller) == self._copy

    def has_changed(self) -> bool:
        now = _look_up(self._home, self.key[2])
        if now is self.value:
            if self._seen is not None:
                same = self._seen.is_still(now)
            else:
                same = self._is_as_copied(now)
            if same:
                return False
        self._note(now)
        return True


# Any, from here on: variables of the user's code.
def _look_up(home: Any, name: str) -> Any:
    if isinstance(home, types.FunctionType):
        return getattr(home, name, _NOTHING)  # `__defaults__` is not among its `vars`
    return (vars(home) if isinstance(home, type) else home).get(name, _NOTHING)


def _put(home: Any, name: str, packed: bytes) -> None:
    if packed == _ABSENT:
        if isinstance(home, dict):
            home.pop(name, None)
        elif name in vars(home):
            delattr(home, name)
    elif isinstance(home, dict):
        home[name] = load(packed)
    else:
        setattr(home, name, load(packed))


def _packed(value: Any, teller: CodeTeller | None = None) -> bytes | None:
    """Pickle a value that can be followed; None for others."""
    return _pickled(value, teller) if can_be_followed(value) else None


def _pickled(value: Any, teller: CodeTeller | None) -> bytes | None:
    try:
        return pack(value, teller=teller)
    except Exception:  # such as of a class that is not where it says
        return None


def can_be_followed(value: Any) -> bool:
    """Tell whether ``value`` is plain and small, or a function or class."""
    if isinstance(value, Tensor):
        return is_plain(value) and value.nbytes <= _MOST_TENSOR_BYTES
    return _is_plain(value, _members_of_any)


def _is_plain(value: Any, members_of: Callable[[Any], Sequence[Any] | None]) -> bool:
    """Tell whether ``value`` consists of plain values, in what has members, and is not large."""
    waiting, num_seen = [(value, _MOST_DEPTH)], 0
    while waiting:
        each, depth = waiting.pop()
        if isinstance(each, (*_SCALARS, *_IMPORTED)):
            continue
        members = members_of(each)
        if members is None or (members and depth == 0) or len(members) > _MOST_MEMBERS:
            return False
        num_seen += len(members)
        if num_seen > _MOST_IN_ALL:
            return False
        waiting += [(member, depth - 1) for member in members]
    return True


def _members(value: Any) -> Sequence[Any] | None:
    """Return the members of what is equal where they are; None for anything else."""
    if type(value) is dict:
        return [*value, *value.values()]
    if type(value) in _SEQUENCES:
        return list(value)
    return list(vars(value).values()) if type(value) in _NAMESPACES else None


def _members_of_any(value: Any) -> Sequence[Any] | None:
    """Return the members of whatever pickle takes apart without code of its class."""
    if isinstance(value, Tensor):
        return () if is_plain(value) and value.nbytes <= _MOST_TENSOR_BYTES else None
    if type(value) is np.ndarray:
        return () if not value.dtype.hasobject and value.nbytes <= _MOST_TENSOR_BYTES else None
    if type(value) in _MORE_MAPPINGS:
        return [*value, *value.values()]
    if type(value) is collections.deque:
        return list(value)
    if _is_record(value):
        if hasattr(value, "__dict__"):
            return list(vars(value).values())
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return _members(value)


def _is_record(value: Any) -> bool:
    """Tell whether ``value`` is a dataclass's, or a plain object of a class of the user's."""
    kind = type(value)
    if isinstance(value, type):
        return False
    if dataclasses.is_dataclass(value):
        return True
    plain = {each for base in _NAMESPACES for each in base.__mro__}
    return (
        hasattr(value, "__dict__")
        and not any(is_foreign(each.__module__) for each in kind.__mro__ if each not in plain)
        and all(getattr(kind, name) is getattr(object, name) for name in _OF_PICKLE)
    )


class _Code:
    """What can be reached from the functions that workers call.

    Attributes:
        homes: Where variables are: a module's globals, a class, or a function.
    """

    def __init__(self, roots: Sequence[object]) -> None:
        self.homes: dict[_Home, Any] = {}
        self._names: dict[_Home, dict[str, None]] = {}
        self._assigned: set[tuple[_Home, str]] = set()
        self._visited: dict[int, object] = {}
        self._waiting: list[object] = list(roots)
        while self._waiting and len(self._visited) < _MOST_OBJECTS:
            self._visit(self._waiting.pop())

    def names(self) -> Iterator[tuple[_Home, str]]:
        """Return the variables that are read and that the code does not assign itself."""
        for home, names in self._names.items():
            for name in names:
                if (home, name) not in self._assigned:
                    yield home, name

    def _visit(self, found: object) -> None:
        if id(found) in self._visited or isinstance(found, (Tensor, *_SCALARS)):
            return
        self._visited[id(found)] = found
        if isinstance(found, types.MethodType):
            self._waiting += [found.__func__, found.__self__]
        elif isinstance(found, functools.partial):
            self._waiting += [found.func, *found.args, *found.keywords.values()]
        elif isinstance(found, types.FunctionType):
            self._visit_function(found)
        elif isinstance(found, type):
            self._visit_class(found)
        elif isinstance(found, (staticmethod, classmethod)):
            self._waiting.append(found.__func__)
        elif isinstance(found, property):
            self._waiting.append(found.fget)
        elif isinstance(found, nn.Module):
            # Its hooks are in dicts.
            self._waiting += [type(found), *found._modules.values(), *_callables(vars(found))]
        elif not isinstance(found, (types.ModuleType, list, dict, tuple, set)):
            self._waiting += [type(found), *_callables(getattr(found, "__dict__", {}))]

    def _visit_function(self, function: types.FunctionType) -> None:
        if is_foreign(function.__globals__.get("__name__")):
            return
        if isinstance(inner := getattr(function, "__wrapped__", None), types.FunctionType):
            self._waiting.append(inner)
        for cell in function.__closure__ or ():
            try:
                self._waiting.append(cell.cell_contents)
            except ValueError:  # not filled yet
                continue
        names: dict[str, None] = {}
        self._read_function(function)
        home = self._home(function.__globals__["__name__"], "", function.__globals__)
        for code in codes_of(function.__code__):
            names.update(dict.fromkeys(code.co_names))
            if any(op in code.co_code[::2] for op in _STORES):
                self._assigned |= {
                    (home, each.argval)
                    for each in dis.get_instructions(code)
                    if each.opcode in _STORES
                }
        self._read(home, function.__globals__, names, set())

    def _read_function(self, function: types.FunctionType) -> None:
        """Note its attributes, and its defaults where these can change inside."""
        if "<locals>" in function.__qualname__:
            return  # in a worker nobody could say which one it is
        names = [name for name in vars(function) if name != "__wrapped__"]
        if any(isinstance(each, (list, dict, set)) for each in function.__defaults__ or ()):
            names.append("__defaults__")
        # Also without names: an attribute may be set where only the parent process has been.
        home = self._home(function.__module__, function.__qualname__, function)
        self._names[home].update(dict.fromkeys(names))

    def _read(
        self,
        home: _Home,
        namespace: Mapping[str, Any],
        names: Mapping[str, None],
        modules: set[int],
    ) -> None:
        """Note which of ``names`` are variables there, and go on with what they hold."""
        for name in names:
            value = namespace.get(name, _NOTHING)
            if value is _NOTHING or (name.startswith("__") and name.endswith("__")):
                continue
            if isinstance(value, types.ModuleType):
                if not is_foreign(value.__name__) and id(value) not in modules:
                    modules.add(id(value))
                    inner = self._home(value.__name__, "", vars(value))
                    self._read(inner, vars(value), names, modules)  # `module.name`
                continue
            self._names[home][name] = None
            if not isinstance(value, (list, dict, tuple, set)):
                self._waiting.append(value)

    def _visit_class(self, kind: type) -> None:
        own = [
            each
            for each in kind.__mro__
            if not is_foreign(each.__module__) and not issubclass(each, enum.Enum)
        ]
        for each in own:
            home = self._home(each.__module__, each.__qualname__, each)
            # Those of its bases may be set in it later.
            inherited = {name for base in own if base is not each for name in vars(base)}
            self._names[home] |= dict.fromkeys(name for name in inherited if name[:1] != "_")
            for name, value in vars(each).items():
                if name.startswith("__") and name.endswith("__"):
                    if isinstance(value, types.FunctionType):
                        self._waiting.append(value)
                    continue
                if name.startswith("_abc_"):
                    continue
                self._names[home][name] = None
                self._waiting.append(value)

    def _home(self, module: str, qualified: str, namespace: Any) -> _Home:
        home = (module, qualified)
        self.homes.setdefault(home, namespace)
        self._names.setdefault(home, {})
        return home


def is_atom(value: object) -> bool:
    """Tell whether ``value`` can neither change nor hold anything."""
    return isinstance(value, _SCALARS)


def is_foreign(module: object) -> bool:
    """Tell whether a module of this name is torch's, NumPy's, Python's or this package's."""
    return not isinstance(module, str) or (module != MAIN and module.partition(".")[0] in _FOREIGN)


def _is_installed(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module != MAIN and bool({"site-packages", "dist-packages"} & set(Path(file).parts))


def _is_at_home(value: Any, home: _Home, name: str) -> bool:
    """Tell whether a function or class is what its own definition put there."""
    if not isinstance(value, _IMPORTED):
        return False
    module = getattr(value, "__module__", None)
    qualified = f"{home[1]}.{name}" if home[1] else name
    return module == home[0] and getattr(value, "__qualname__", None) == qualified


def _callables(attributes: Mapping[Any, Any]) -> list[Callable[..., Any]]:
    """Return those among the values, and in lists and dicts of them."""
    found = []
    for value in attributes.values():
        if isinstance(value, dict):
            found += [each for each in value.values() if callable(each)]
        elif isinstance(value, (list, tuple, set)):
            found += [each for each in value if callable(each)]
        elif callable(value):
            found.append(value)
    return found
