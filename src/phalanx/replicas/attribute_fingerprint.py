"""Detection of attributes of modules, losses and functions that were assigned.

Replicas and worker processes share what they read with the program. A fingerprint tells when they
have to be made again: it holds the values of all attributes, parameters, buffers and children, and
compares them by identity. It does not look into lists, arrays or other objects.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.memory import has_memory

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CALLED = (nn.Module, FunctionType, MethodType, functools.partial)

PlainChanges = list[tuple[int, str, Any]]  # Any: numbers and strings of the user's objects
"""Values of attributes: the index of the object in the fingerprint's `objects`, and the name."""


class AttributeFingerprint:
    """The present attributes of everything that a call of the given objects reads.

    Args:
        roots: Modules, and losses or functions of any kind. A module stands for all modules in it;
            a function stands for itself, its defaults and the functions and modules that it closes
            over; a bound method and a `functools.partial` stand for their parts.

    Attributes:
        objects: Everything whose attributes are compared. A fork has them under the same indices.
        modules: The modules among them, such as a teacher that the loss closes over.

    Example:
        >>> net = nn.Sequential(nn.Dropout(0.5))
        >>> fingerprint = AttributeFingerprint(net)
        >>> net[0].p = 0.1
        >>> fingerprint.is_current(), fingerprint.plain_changes()
        (False, [(1, 'p', 0.1)])
    """

    def __init__(self, *roots: object) -> None:
        self.objects = list(_reached(roots))
        self.modules = [each for each in self.objects if isinstance(each, nn.Module)]
        self._kinds = list(map(type, self.objects))
        self._functions = [each for each in self.objects if isinstance(each, FunctionType)]
        self._tables: list[dict[str, Any]] = [vars(each) for each in self.objects]
        for module in self.modules:
            self._tables += [module._parameters, module._buffers, module._modules]
        self._sizes = list(map(len, self._tables))
        self._values = list(self._read_values())
        self._tensors = [
            each for each in self._values if isinstance(each, Tensor) and has_memory(each)
        ]
        self._memory = self._read_memory()

    def is_current(self) -> bool:
        """Tell whether nothing was assigned since; it takes about 1 µs for each module."""
        return (
            list(map(len, self._tables)) == self._sizes
            and all(map(is_, self._read_values(), self._values))
            and list(map(type, self.objects)) == self._kinds
            and self._read_memory() == self._memory
        )

    def plain_changes(self) -> PlainChanges | None:
        """Return the numbers and strings that were assigned; None where anything else was, too."""
        sizes, kinds = list(map(len, self._tables)), list(map(type, self.objects))
        if (sizes, kinds, self._read_memory()) != (self._sizes, self._kinds, self._memory):
            return None
        changes: PlainChanges = []
        places = ((i, name) for i, table in enumerate(self._tables) for name in table)
        others = repeat((len(self.objects), ""))  # the parts of functions
        columns = zip(chain(places, others), self._read_values(), self._values, strict=False)
        for (index, name), now, before in columns:
            if now is before:
                continue
            if index >= len(self.objects) or not isinstance(now, _PLAIN):
                return None
            changes.append((index, name, now))
        return changes

    def apply(self, changes: PlainChanges) -> None:
        """Assign what `plain_changes` has returned, in a fork."""
        for index, name, value in changes:
            vars(self.objects[index])[name] = value

    def _read_values(self) -> Iterator[Any]:  # Any: whatever the user's objects hold
        values = chain.from_iterable(map(dict.values, self._tables))
        return chain(values, chain.from_iterable(map(_parts_of, self._functions)))

    def _read_memory(self) -> list[tuple[int, bool]]:
        return [(each.data_ptr(), each.requires_grad) for each in self._tensors]


def _reached(roots: Iterable[object]) -> Iterator[object]:
    """Yield the modules, functions and called objects among ``roots``, and those they hold."""
    waiting = list(roots)
    seen: set[int] = set()
    for each in waiting:  # which grows
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, functools.partial):
            waiting += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, MethodType):
            waiting += [each.__self__, each.__func__]
        elif isinstance(each, nn.Module):
            yield each
            waiting += each._modules.values()
        elif isinstance(each, FunctionType):
            yield each
            waiting += [part for part in _parts_of(each) if isinstance(part, _CALLED)]
        elif isinstance(getattr(each, "__dict__", None), dict) and not isinstance(each, ModuleType):
            yield each
            waiting += [value for value in vars(each).values() if isinstance(value, _CALLED)]


# Any: code, defaults, and whatever the user's function closes over.
def _parts_of(function: FunctionType) -> Iterator[Any]:
    yield from (function.__code__, function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        yield _content_of(cell)


def _content_of(cell: CellType) -> Any:  # Any: whatever it holds
    try:
        return cell.cell_contents
    except ValueError:  # a name that was not assigned yet
        return None
