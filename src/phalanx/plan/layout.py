"""How a batch is laid out: what is split along which dim, how many rows it has, its parts.

    tensors, arrays      split along their dim
    lists of values      split by their items, one per row
    anything else        given whole
    Layout(split=…)      the user's functions make samples of a batch, and batches of samples

Shape legend: B rows of the batch; a leaf that is split has B along its dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.plan.arguments import check_function
from phalanx.plan.leaves import covering, covers, flatten, leaf_paths, named, unflatten
from phalanx.types import Nested

__all__ = ["Layout", "Rows", "Samples", "cut", "num_rows", "open_rows"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Along which dim each input leaf is split.

    Args:
        dim: The dim for all leaves that ``dims`` does not name.
        dims: Exceptions by leaf path as errors print it (``"mask"``, ``"0"``, ``"items.1"``), or by
            position (``0``); None gives the leaf whole to every replica. A path covers all leaves
            below it, and yields to a longer one.
        split: batch -> its samples, as a list, for batches that cannot be cut leaf by leaf: objects
            of other libraries, or lists of one dict of tensors per sample. Needs ``collate``.
        collate: Some of these samples -> a batch, as the ``collate_fn`` of a loader.

    Tensors and NumPy arrays are split, and lists without tensors (of strings, numbers, dicts, …),
    which must hold one item per row. Given whole: tuples of numbers, single values. A tensor or
    array without dims counts as a number.

    Example:
        >>> import torch
        >>> layout = Layout(dims={"mask": None})
        >>> parts = cut({"x": torch.arange(3), "mask": torch.ones(2)}, [2, 1], layout)
        >>> parts[1]["x"].tolist(), parts[1]["mask"].tolist()
        ([2], [1.0, 1.0])
    """

    dim: int = 0
    dims: Mapping[str | int, int | None] = dataclasses.field(default_factory=dict)
    split: Callable[[Nested], Sequence[Any]] | None = None
    collate: Callable[[list[Any]], Nested] | None = None

    def __post_init__(self) -> None:
        _check_words(self.dim, self.dims)
        _check_functions(self.split, self.collate, self.dims)
        object.__setattr__(self, "dims", {str(path): dim for path, dim in self.dims.items()})

    def chosen(self, paths: Sequence[str]) -> list[int | None]:
        """Return the dim that is said for each of ``paths``."""
        found = [covering(path, self.dims) for path in paths]
        return [self.dim if path is None else self.dims[path] for path in found]

    def check_paths(self, batch: Nested, paths: Sequence[str]) -> None:
        """Refuse a path in ``dims`` that names none of ``paths``, the leaves of ``batch``."""
        found = [covering(path, self.dims) for path in paths]
        for path in self.dims:
            known = path in found or any(covers(str(path), each) for each in paths)
            if not known and not _reaches(batch, str(path)):
                raise ConfigError(
                    f"`layout` must name leaves of the input, but names {path!r}. The input has "
                    f"{', '.join(map(repr, paths)) or 'none'}."
                )


class Rows:
    """A batch that is cut leaf by leaf.

    Attributes:
        dims: For every leaf, along which dim it is split; None where it is given whole.

    Raises:
        ConfigError: A leaf has not the dim that it is to be split along; a path of the layout names
            no leaf; a list may be meant in two ways; a value of B items cannot be split.
        UnsupportedError: A leaf that is split is sparse or nested.
    """

    def __init__(self, batch: Nested, layout: Layout) -> None:
        self._batch = batch
        self._layout = layout
        self._opened: set[int] = set()  # ids of lists of lists whose own items are no rows
        self._mappings: list[Sequence[Any]] = []  # lists of mappings with tensors
        self._numbers: list[Sequence[Any]] = []  # tuples of numbers
        if not layout.dims and _is_plain(batch, layout.dim):
            self._leaves, self._spec = flatten(batch)
            self.dims: list[int | None] = [layout.dim] * len(self._leaves)
            return
        self._read()
        while self._open_lists():
            self._read()
        if layout.dims:
            layout.check_paths(batch, self._paths())
        self._refuse_samples()
        self._refuse_unsplit()

    def _read(self) -> None:
        self._mappings.clear()
        self._numbers.clear()
        self._leaves, self._spec = flatten(self._batch, self._is_leaf)
        self.dims = self._dims()

    @property
    def first(self) -> int | None:
        """The rows of the first leaf that is split; None where none is."""
        split = self._split()
        return None if not split else self._rows(split[0])

    def count(self) -> int:
        """Return B, the number of rows that all split leaves share.

        Raises:
            ConfigError: Two leaves differ (both are named), or no leaf is split.
        """
        split = self._split()
        if not split:
            raise ConfigError(
                "`batch` must hold at least one tensor that is split over replicas, but holds "
                "none. Give a tensor with a batch dim, or say by Layout(split=..., collate=...) "
                "what its samples are."
            )
        first, expected = split[0], self._rows(split[0])
        for place in split[1:]:
            if (rows := self._rows(place)) != expected:
                paths = self._paths()
                along = f"rows along dim {self.dims[place]}"
                told = along if _is_array(self._leaves[place]) else "items, one per row,"
                raise ConfigError(
                    f"Input {named(paths[place])} must have {expected} {told} like "
                    f"{named(paths[first])}, but has {rows}. Give leaves that are not per sample "
                    "whole, by None in the layout."
                )
        return expected

    def cut(self, sizes: Sequence[int]) -> list[Nested]:
        """Return consecutive parts of ``sizes`` rows; tensors and arrays are views."""
        columns: list[Sequence[Any]] = [
            [leaf] * len(sizes) if dim is None else _cut_leaf(leaf, sizes, dim)
            for leaf, dim in zip(self._leaves, self.dims, strict=True)
        ]
        parts = range(len(sizes))
        return [unflatten([column[part] for column in columns], self._spec) for part in parts]

    def _split(self) -> list[int]:
        """Return the places of the leaves that are split; those that say B best stand first."""
        split = [place for place, dim in enumerate(self.dims) if dim is not None]
        if len(split) > 1 and not _is_array(self._leaves[split[0]]):
            split.sort(key=lambda place: _rank(self._leaves[place]))
        return split

    def _rows(self, place: int) -> int:
        leaf, dim = self._leaves[place], self.dims[place]
        return int(leaf.shape[dim]) if _is_array(leaf) else len(leaf)

    def _paths(self) -> list[str]:
        return leaf_paths(self._batch, self._is_leaf)

    # Any: a node of the user's own inputs.
    def _is_leaf(self, node: Any) -> bool:
        if isinstance(node, PackedSequence):
            return True
        if not _is_list(node) or id(node) in self._opened:
            return False
        if node is self._batch and _is_list_of_containers(node):
            return False
        if _holds_arrays(node):
            pair = node is self._batch and len(node) == 2
            if not pair and all(isinstance(each, Mapping) for each in node):
                self._mappings.append(node)
            return False
        if _is_one_value(node):
            if isinstance(node, tuple) and node is not self._batch and any(map(_is_number, node)):
                self._numbers.append(node)
            return False
        return len(node) > 0

    def _dims(self) -> list[int | None]:
        chosen: list[int | None] = [self._layout.dim] * len(self._leaves)
        if self._layout.dims:
            chosen = self._layout.chosen(self._paths())
        dims = [
            dim if (leaf.ndim if _is_array(leaf) else self._is_leaf(leaf)) else None
            for leaf, dim in zip(self._leaves, chosen, strict=True)
        ]
        for place, (leaf, dim) in enumerate(zip(self._leaves, dims, strict=True)):
            if dim is not None and _is_array(leaf):
                self._check_array(place, leaf, dim)
            elif dim is not None and isinstance(leaf, PackedSequence):
                raise UnsupportedError(
                    f"Input {named(self._paths()[place])} must be padded to be split, but is a "
                    "`PackedSequence`, whose rows are steps in time. Give the padded tensor and "
                    "the lengths, and pack in `forward()`."
                )
        return dims

    # Any: a tensor or an array.
    def _check_array(self, place: int, leaf: Any, dim: int) -> None:
        if not -leaf.ndim <= dim < leaf.ndim:
            raise ConfigError(
                f"Input {named(self._paths()[place])} must have a dim {dim} to be split along, but "
                f"has shape {tuple(leaf.shape)}. Give its path with None in the layout to hand it "
                "over whole."
            )
        if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
            told = "nested" if leaf.is_nested else f"of layout {leaf.layout}"
            raise UnsupportedError(
                f"Input {named(self._paths()[place])} must be dense to be split, but is "
                f"{told}. Give its path with None in the layout to hand it over whole, or make it "
                "dense."
            )

    def _open_lists(self) -> bool:
        """Look into lists of lists that hold columns, not rows; tell whether there was one."""
        rows, found = self.first, False
        for place, leaf in enumerate(self._leaves):
            if self.dims[place] is None or _is_array(leaf) or not _is_list_of_containers(leaf):
                continue
            path = self._paths()[place]
            if path in self._layout.dims:
                continue
            below = any(covers(path, str(each)) for each in self._layout.dims)
            columns = _fits(leaf, rows) or False
            if columns and len(leaf) == rows == 1:
                continue  # the part with the one row is the same, whichever is meant
            if columns and len(leaf) == rows and not below:
                raise ConfigError(
                    f"Input {named(path)} must hold one item per row ({rows}), or {len(leaf)} "
                    "lists of one item per row each, but may be either. Give its path in the "
                    "layout for the first, or the paths of the lists in it for the second."
                )
            if columns or below:
                self._opened.add(id(leaf))
                found = True
        return found

    def _refuse_samples(self) -> None:
        """Refuse a list of samples: tensors in it would be split along dims of their own."""
        if not self._layout.dims and _is_list_of_samples(self._batch):
            raise ConfigError(
                f"A batch must not be a list of samples, but is one of {len(self._batch)} alike, "
                f"each a {type(self._batch[0]).__name__!r}: the tensors in them would be split "
                "along dims of their own. Let the loader's `collate_fn` put them together, or give "
                "Layout(split=list, collate=list)."
            )

    def _refuse_unsplit(self) -> None:
        """Refuse what has as many items as there are rows, and would be given whole."""
        rows = self.first
        if rows is None or rows < 2:
            return
        for values in self._numbers:
            if len(values) == rows and not self._says_below(values):
                raise ConfigError(
                    f"A tuple of {rows} numbers in a batch of {rows} rows must be clear, but may "
                    "be one value or one number per row. Give a list of them to be split, or name "
                    "its path with None in the layout to hand it over whole."
                )
        for sequence in self._mappings:
            if len(sequence) == rows and not self._says_below(sequence):
                raise ConfigError(
                    f"A list of {rows} dicts with tensors must not lie in a batch of {rows} rows "
                    "without a word about it: it may hold one dict per row. Say what the samples "
                    "are by Layout(split=..., collate=...), or name the list's path in the layout "
                    "to split every tensor in it."
                )
        for place, leaf in enumerate(self._leaves):
            if self.dims[place] is not None or _is_array(leaf):
                continue
            holds = _holds_arrays(leaf)
            if not holds and _num_items(leaf) != rows:
                continue
            path = self._paths()[place]
            if self._layout.chosen([path])[0] is None:
                continue
            told = "that holds tensors" if holds else f"of {rows} items, as many as there are rows"
            raise ConfigError(
                f"Input {named(path)} must be a tensor, an array or a list to be split, but is "
                f"{type(leaf).__name__!r} {told}. Give list(...) of it, or its path with None in "
                "the layout to hand it over whole."
            )

    def _says_below(self, sequence: Sequence[Any]) -> bool:
        """Tell whether the layout names the list, or something in it."""
        if not self._layout.dims:
            return False
        paths = leaf_paths(self._batch, lambda node: node is sequence or self._is_leaf(node))
        leaves, _ = flatten(self._batch, lambda node: node is sequence or self._is_leaf(node))
        path = next(path for path, leaf in zip(paths, leaves, strict=True) if leaf is sequence)
        return any(covers(path, str(each)) or covers(str(each), path) for each in self._layout.dims)


class Samples:
    """A batch that the user's own functions take apart and put together; see :class:`Layout`.

    Raises:
        ConfigError: ``split`` returns no list.
    """

    def __init__(self, batch: Nested, layout: Layout) -> None:
        assert layout.split is not None
        assert layout.collate is not None
        self._batch = batch
        self._collate = layout.collate
        found: Any = layout.split(batch)  # Any: whatever the user's function returns
        if not isinstance(found, Iterable) or isinstance(found, (str, bytes, Mapping)):
            raise ConfigError(
                f"`split` must return a list of samples, but returned {type(found).__name__!r}."
            )
        self._samples = list(found)

    @property
    def first(self) -> int | None:
        """The number of samples."""
        return len(self._samples)

    def count(self) -> int:
        """Return the number of samples."""
        return len(self._samples)

    def cut(self, sizes: Sequence[int]) -> list[Nested]:
        """Return consecutive parts of ``sizes`` samples; None for one without any."""
        if not self._samples:
            return [self._batch] * len(sizes)
        parts = _cut_leaf(self._samples, sizes, 0)
        return [self._collate(list(part)) if part else None for part in parts]


def open_rows(batch: Nested, layout: Layout) -> Rows | Samples:
    """Return ``batch`` laid out, to be measured and cut."""
    return Rows(batch, layout) if layout.split is None else Samples(batch, layout)


def num_rows(batch: Nested, layout: Layout) -> int:
    """Return what :meth:`Rows.count` does."""
    return open_rows(batch, layout).count()


def cut(batch: Nested, sizes: Sequence[int], layout: Layout) -> list[Nested]:
    """Return what :meth:`Rows.cut` does."""
    return open_rows(batch, layout).cut(sizes)


# Any: whatever the user wrote.
def _check_words(dim: Any, dims: Any) -> None:
    if not _is_whole(dim):
        raise ConfigError(f"`dim` must be a whole number, but is {dim!r}. Give Layout(dim=1), say.")
    if not isinstance(dims, Mapping) or not all(
        each is None or _is_whole(each) for each in dims.values()
    ):
        raise ConfigError(
            f"`dims` must say a whole number or None for each path, but is {dims!r}. Give "
            "Layout(dims={'mask': None}), say."
        )


# Any: whatever the user wrote.
def _check_functions(split: Any, collate: Any, dims: Mapping[Any, Any]) -> None:
    if split is None and collate is None:
        return
    for name, given in (("split", split), ("collate", collate)):
        if given is None:
            raise ConfigError(
                f"`{name}` must be given with the other of `split` and `collate`, but is None. "
                "Give Layout(split=to_samples, collate=to_batch)."
            )
        check_function(name, given)
    if dims:
        raise ConfigError(
            f"`dims` must be empty where `split` is given, but is {dict(dims)!r}. Let `split` and "
            "`collate` treat every leaf."
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _reaches(value: Nested, path: str) -> bool:
    """Tell whether ``path`` leads to something; a dataclass's field that is None is no leaf."""
    for key in path.split("."):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, (list, tuple)) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        elif dataclasses.is_dataclass(value) and hasattr(value, key):
            value = getattr(value, key)
        else:
            return False
    return value is None


# Any, from here on: nodes of the user's own inputs.
def _is_plain(batch: Any, dim: int | None) -> bool:
    """Tell whether ``batch`` is a dense tensor, or some: most are, and can be nothing else."""
    leaves = batch if type(batch) in (tuple, list) else (batch,)
    if dim is None or dim < 0:
        return False
    for leaf in leaves:
        if type(leaf) is not Tensor or leaf.ndim <= dim:
            return False
        if leaf.layout is not torch.strided or leaf.is_nested:
            return False
    return True


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, np.ndarray))


def _is_list(node: Any) -> bool:
    """Tell whether a node is a list or tuple, or a sequence of the user's own that is no tuple."""
    if type(node) in (list, tuple):
        return True
    no_list = (str, bytes, bytearray, tuple, range)
    return isinstance(node, Sequence) and not isinstance(node, no_list)


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, tuple, Mapping)) or dataclasses.is_dataclass(value)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return value if isinstance(value, (list, tuple)) or _is_list(value) else ()


def _holds_arrays(value: Any) -> bool:
    """Tell whether there are arrays with dims in ``value``; one without any is a single value."""
    return any(
        each.ndim > 0 if _is_array(each) else _holds_arrays(each) for each in _children(value)
    )


def _is_list_of_containers(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and all(map(_is_container, value))


def _is_list_of_samples(batch: Any) -> bool:
    """Tell whether ``batch`` is a list of dicts or tuples of one form, as a data set gives them.

    A pair of such may be inputs and targets. Samples have single values (labels) among tensors.
    """
    if type(batch) is not list or not _is_list_of_containers(batch) or not _holds_arrays(batch):
        return False
    forms = [
        tuple(each) if isinstance(each, Mapping) else len(list(_children(each))) for each in batch
    ]
    if any(form != forms[0] for form in forms):
        return False
    if len(batch) > 2 and isinstance(batch[0], Mapping):
        return True
    return all(any(map(_is_single, _children(each))) for each in batch)


def _is_single(value: Any) -> bool:
    return isinstance(value, (str, bytes)) or _is_number(value)


def _is_one_value(node: Sequence[Any]) -> bool:
    """Tell whether a list without tensors is a value by itself: a size, or nothing at all."""
    numbers = isinstance(node, tuple)
    return all(each is None or (numbers and _is_number(each)) for each in node)


def _is_number(value: Any) -> bool:
    if isinstance(value, (int, float, complex, np.number, np.bool_)):
        return True
    return _is_array(value) and value.ndim == 0


def _fits(value: Any, rows: int | None) -> bool | None:
    """Tell whether all lists in ``value`` hold ``rows`` items; None where there is no list."""
    found = []
    for each in _children(value):
        listed = _is_list(each) and len(each) > 0 and not _is_one_value(each)
        if listed and len(each) == rows:
            found.append(True)
        elif listed and not _is_list_of_containers(each):
            found.append(False)
        elif (inside := _fits(each, rows)) is not None or listed:
            found.append(bool(inside))
    return all(found) if found else None


def _rank(leaf: Any) -> int:
    """Order leaves by how surely their length is that of the batch."""
    return 0 if _is_array(leaf) else 2 if _is_list_of_containers(leaf) else 1


def _num_items(leaf: Any) -> int | None:
    if isinstance(leaf, (str, bytes, bytearray, tuple, range, type)) or _is_array(leaf):
        return None
    try:
        return len(leaf) if hasattr(leaf, "__len__") else None
    except Exception:  # a length that the object itself does not know
        return None


def _cut_leaf(leaf: Any, sizes: Sequence[int], dim: int) -> Sequence[Any]:
    if isinstance(leaf, Tensor):
        return leaf.split_with_sizes(list(sizes), dim)  # what `split` does in the end
    stops = [0, *accumulate(sizes)]
    if isinstance(leaf, np.ndarray):
        return list(np.split(leaf, stops[1:-1], dim))
    try:
        return [leaf[start:stop] for start, stop in pairwise(stops)]
    except TypeError as error:
        raise ConfigError(
            f"A sequence in a batch must have slices to be split, but {type(leaf).__name__!r} has "
            "none. Give list(...) of it."
        ) from error
