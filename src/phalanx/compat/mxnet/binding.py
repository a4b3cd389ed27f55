"""The names, shapes and layouts that a group is bound to, and how a batch is read by them.

A binding is a value: a batch of another size makes another one.

Shape legend: B rows of the batch, padded ones included; a tensor with a batch axis has B along it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.compat.mxnet.batches import DataBatch, DataDesc, read_descs
from phalanx.errors import ConfigError
from phalanx.plan import Layout, Rows, cut, read_count
from phalanx.types import Nested

__all__ = ["Binding", "Fed", "cut_tensors", "read_tensors"]


@dataclasses.dataclass(frozen=True)
class Fed:
    """One batch as tensors by name, without its ``pad`` padded rows; ``rows`` are left."""

    data: dict[str, Tensor]
    labels: dict[str, Tensor]
    rows: int
    pad: int


@dataclasses.dataclass(frozen=True)
class Binding:
    """Descriptions of the inputs, and which of them the module's forward takes.

    Attributes:
        batch_size: B.
        arguments: The names of the forward's arguments; None where it has no names.
    """

    data: tuple[DataDesc, ...]
    labels: tuple[DataDesc, ...]
    batch_size: int
    arguments: frozenset[str] | None

    # Any: descriptions in any of their forms.
    @staticmethod
    def of(module: nn.Module, data: Any, labels: Any) -> Binding:
        """Read descriptions, and which of them the module's forward takes.

        Raises:
            ConfigError: Batch sizes differ.
        """
        known, targets = read_descs(data, "data_shapes"), read_descs(labels, "label_shapes")
        arguments, takes_any = _arguments_of(module)
        if takes_any:
            arguments = frozenset({*(arguments or ()), *(each.name for each in targets)})
        return Binding(known, targets, _common_rows([*known, *targets]), arguments)

    def of_rows(self, rows: int) -> Binding:
        """Return the binding to ``rows`` rows."""
        data, labels = (
            tuple(each.with_rows(rows) for each in descs) for descs in (self.data, self.labels)
        )
        return dataclasses.replace(self, data=data, labels=labels, batch_size=rows)

    # Any: a batch in any of its forms.
    def read(self, batch: Any) -> tuple[Binding, Fed]:
        """Read one batch, and return the binding to its shapes as well.

        Raises:
            ConfigError: Names, number of dims or rows do not fit.
        """
        batch = self._as_batch(batch)
        data = read_tensors(batch.data, self.data, "data")
        given = batch.label if self.labels else None
        labels = {} if given is None else read_tensors(given, self.labels, "labels", partly=True)
        both = {**data, **labels}
        found = Rows(both, _layout_of(both, (*self.data, *self.labels)))
        rows = self.batch_size if found.first is None else found.count()
        pad = read_count("pad", batch.pad, 0)
        bound = tuple(
            dataclasses.replace(each, shape=tuple(data[each.name].shape)) for each in self.data
        )
        binding = dataclasses.replace(self.of_rows(rows), data=bound)
        if pad:
            data = cut_tensors(data, self.data, [rows - pad, pad])[0]
            labels = cut_tensors(labels, self.labels, [rows - pad, pad])[0]
        return binding, Fed(data, labels, rows - pad, pad)

    # Any: labels in any of their forms.
    def read_labels(self, given: Any, rows: int, pad: int) -> dict[str, Tensor]:
        """Read labels alone, without padded rows, which may be there or not.

        Raises:
            ConfigError: Names do not fit.
        """
        labels = read_tensors(given, self.labels, "labels", partly=True)
        found = Rows(labels, _layout_of(labels, self.labels))
        if found.first is None or found.count() == rows:
            return labels
        kept: dict[str, Tensor] = found.cut([rows, pad])[0]
        return kept

    def call(self, data: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> Nested:
        """Return the arguments of the module's forward."""
        if self.arguments is None:
            return tuple(data.values())
        taken = {name: label for name, label in labels.items() if name in self.arguments}
        return {**data, **taken}

    # Any: a batch in any of its forms.
    def _as_batch(self, value: Any) -> DataBatch:
        """Read a batch: one already, or an object alike, or its data, with labels if by name."""
        plain = isinstance(value, (Tensor, np.ndarray, Mapping))
        if not plain and hasattr(value, "data"):
            return DataBatch(value.data, getattr(value, "label", None), getattr(value, "pad", None))
        if isinstance(value, Mapping):
            names = {each.name for each in self.labels}
            labels = {name: each for name, each in value.items() if name in names}
            data = {name: each for name, each in value.items() if name not in names}
            return DataBatch(data, labels or None)
        return DataBatch(value)


def cut_tensors(
    tensors: Mapping[str, Tensor], descs: Iterable[DataDesc], sizes: Sequence[int]
) -> list[dict[str, Tensor]]:
    """Return parts of ``sizes`` rows by name; all are views."""
    if not tensors:
        return [{} for _ in sizes]
    parts: list[dict[str, Tensor]] = cut(tensors, sizes, _layout_of(tensors, descs))
    return parts


def _layout_of(tensors: Mapping[str, Tensor], descs: Iterable[DataDesc]) -> Layout:
    return Layout(dims={each.name: each.batch_axis for each in descs if each.name in tensors})


def read_tensors(
    given: Nested, descs: Sequence[DataDesc], noun: str, *, partly: bool = False
) -> dict[str, Tensor]:
    """Return tensors by name, in the order of ``descs`` and with their dtypes, without a graph.

    Args:
        given: By name; or in the order of ``descs``; or the one tensor or array.
        partly: Whether names may be missing.

    Raises:
        ConfigError: Names, their number, or a number of dims do not fit.
    """
    names = [each.name for each in descs]
    if not isinstance(given, Mapping):
        values = list(given) if isinstance(given, (tuple, list)) else [given]
        if len(values) != len(names):
            raise ConfigError(
                f"`{noun}` must hold {len(names)} tensors ({', '.join(names) or 'none'}), but "
                f"holds {len(values)}. Bind as many, or give them by name."
            )
        given = dict(zip(names, values, strict=True))
    if not set(given) <= set(names) or not (partly or len(given) == len(names)):
        raise ConfigError(f"`{noun}` must hold {names} as bound, but holds {list(given)}.")
    return {each.name: _read_tensor(given[each.name], each) for each in descs if each.name in given}


# Any: whatever the user gave.
def _read_tensor(value: Any, desc: DataDesc) -> Tensor:
    try:
        tensor = torch.as_tensor(value, dtype=desc.dtype).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"`{desc.name}` must be a tensor or an array, but is {value!r:.80}."
        ) from error
    if tensor.dim() != len(desc.shape):
        raise ConfigError(
            f"`{desc.name}` must have {len(desc.shape)} dims like {desc.shape}, as bound, but has "
            f"shape {tuple(tensor.shape)}. Call `reshape` to bind it to another."
        )
    return tensor


def _arguments_of(module: nn.Module) -> tuple[frozenset[str] | None, bool]:
    """Return the names that the module's forward takes, and whether it takes any other."""
    try:
        known = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # a forward that does not say what it takes
        return None, False
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = frozenset(each.name for each in known if each.kind in kinds)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known)
    return (names, takes_any) if names or takes_any else (None, False)


def _common_rows(descs: Sequence[DataDesc]) -> int:
    """Return B, the same in all descriptions that have it; 1 where none has."""
    counted = [each for each in descs if each.rows is not None]
    for desc in counted:
        if desc.rows != counted[0].rows:
            raise ConfigError(
                f"`{desc.name}` must have {counted[0].rows} rows like `{counted[0].name}`, but has "
                f"shape {desc.shape} with layout {desc.layout or 'N first'}. Give a layout without "
                "N to tensors that are not per sample."
            )
    return 1 if not counted else counted[0].rows or 0
