"""Notice that objects of the user's, such as a loss, are no longer what they were.

What can be reached from them is looked through once: attributes, containers, what functions have
beside their code. Then only identities are compared, all of them in a few calls, so that a loss in
which nothing changes costs a step next to nothing.
"""

from __future__ import annotations

import collections
import copyreg
import functools
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from phalanx.replicas.global_values import is_atom, is_foreign
from phalanx.replicas.packing import is_plain

__all__ = ["FunctionState", "WatchedObjects", "can_be_copied", "state_of_function"]

_SEQUENCES = (list, set, collections.deque)
_UNCHANGING = (tuple, frozenset)
_CODE = (type, types.ModuleType, types.BuiltinFunctionType)
_PROTOCOL = 4  # the state of an object with slots is a pair there
# What a function has beside its code: (kind, name or position) -> value.
FunctionState = dict[tuple[str, Any], Any]  # Any: values of the user's functions


class WatchedObjects:
    """Everything that can be reached from ``roots``, as it is now.

    Args:
        roots: Where to begin.
        known: The ids of objects that somebody else looks after; nothing in them is looked at.
        pack: Pickles an object that has more than attributes and members, which is compared so.

    Attributes:
        tensors: Those whose contents the caller must compare.
        functions: Those with something beside their code.
        code: The ids of all functions and classes.
    """

    # Any, in this class: whatever the user's objects hold.
    def __init__(
        self, roots: Iterable[object], known: Collection[int], pack: Callable[[Any], bytes | None]
    ) -> None:
        self.tensors: list[Tensor] = []
        self.functions: list[types.FunctionType] = []
        self.code: set[int] = set()
        self._pack = pack
        self._visited: dict[int, object] = {}  # held: an id alone would come back
        self._known = known
        self._views: list[Collection[Any]] = []
        self._owners: list[Any] = []
        self._packed: list[tuple[Any, bytes]] = []
        self._waiting: list[object] = list(roots)
        while self._waiting:
            self._visit(self._waiting.pop())
        self._seen = self._look()

    def are_still(self) -> bool:
        """Tell whether all of it is the same, but for the contents of `tensors`."""
        sizes, members, told = self._seen
        return (
            list(map(len, self._views)) == sizes
            and all(map(is_, chain.from_iterable(self._views), members))
            and all(map(is_, self._told(), told))
            and all(self._pack(found) == packed for found, packed in self._packed)
        )

    def _look(self) -> tuple[list[int], list[Any], list[Any]]:
        members = list(chain.from_iterable(self._views))
        return list(map(len, self._views)), members, list(self._told())

    def _told(self) -> Iterable[Any]:
        """Return what views do not show: of objects, of functions, of tensors."""
        told = chain.from_iterable(map(_told_by, self.functions))
        trained = map(attrgetter("requires_grad"), self.tensors)
        return chain(map(vars, self._owners), told, trained)

    def _visit(self, found: Any) -> None:
        if id(found) in self._visited or id(found) in self._known or is_atom(found):
            return
        self._visited[id(found)] = found
        if isinstance(found, _CODE):
            self.code.add(id(found))
        elif isinstance(found, types.FunctionType):
            self.code.add(id(found))
            if not is_foreign(found.__module__):
                self.functions.append(found)
                self._visit_members([vars(found), *_told_by(found)])
        elif isinstance(found, types.MethodType):
            self._visit_members([found.__func__, found.__self__])
        elif isinstance(found, Tensor):
            self._visit_tensor(found)
        else:
            self._visit_object(found)

    def _visit_tensor(self, tensor: Tensor) -> None:
        if can_be_copied(tensor):
            self.tensors.append(tensor)
        else:
            self._compare_packed(tensor)
        if vars(tensor):
            self._visit_attributes(tensor)

    def _visit_object(self, found: Any) -> None:
        if isinstance(found, dict):
            self._watch(found, *([found.values()] if found else []))
        elif isinstance(found, _SEQUENCES):
            self._watch(found)
        elif isinstance(found, _UNCHANGING):
            self._visit_members(found)
        elif isinstance(found, functools.partial):
            self._visit_members([found.func, found.args, found.keywords])
        elif not isinstance(found, nn.Module) and not _is_all_attributes(found):
            self._compare_packed(found)
        if hasattr(found, "__dict__"):
            self._visit_attributes(found)
        self._waiting.append(type(found))

    def _visit_attributes(self, found: Any) -> None:
        self._owners.append(found)
        self._visit_members([vars(found)])

    def _watch(self, *views: Collection[Any]) -> None:
        for view in views:
            self._views.append(view)
            self._visit_members(view)

    def _visit_members(self, members: Iterable[Any]) -> None:
        self._waiting += members

    def _compare_packed(self, found: Any) -> None:
        packed = self._pack(found)
        if packed is not None:  # else it is not sent either
            self._packed.append((found, packed))


def can_be_copied(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is numbers on the CPU, and maybe a parameter."""
    return is_plain(tensor) or (tensor.is_leaf and _is_plain_parameter(tensor))


def _is_plain_parameter(tensor: Tensor) -> bool:
    kind = type(tensor)
    return (kind is Tensor or kind is nn.Parameter) and is_plain(tensor.detach())


def state_of_function(function: types.FunctionType) -> FunctionState:
    """Return what a function has beside its code, by place."""
    cells, defaults = function.__closure__ or (), function.__defaults__ or ()
    return {
        **{("variable", i): each.cell_contents for i, each in enumerate(cells) if _is_filled(each)},
        **{("default", index): value for index, value in enumerate(defaults)},
        **{("keyword", name): value for name, value in (function.__kwdefaults__ or {}).items()},
        **{("attribute", k): v for k, v in vars(function).items() if k != "__wrapped__"},
    }


# Any, from here on: what the user's functions and objects hold.
def _told_by(function: types.FunctionType) -> Sequence[Any]:
    cells = function.__closure__
    told = (function.__defaults__, function.__kwdefaults__)
    if cells is None:
        return told
    return (*told, *(cell.cell_contents for cell in cells if _is_filled(cell)))


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - asked for whether it raises
    except ValueError:  # a name that was not assigned yet
        return False
    return True


def _is_all_attributes(found: Any) -> bool:
    """Tell whether pickle takes ``found`` by its attributes alone."""
    try:
        reduced = found.__reduce_ex__(_PROTOCOL)
    except Exception:  # whatever the user's objects raise when pickled
        return True  # it is not sent, unless its owner leaves it out
    return (
        isinstance(reduced, tuple)
        and reduced[0] is copyreg.__newobj__  # type: ignore[attr-defined]
        and len(reduced[1]) == 1
        and (len(reduced) < 3 or reduced[2] is None or isinstance(reduced[2], dict))
    )
