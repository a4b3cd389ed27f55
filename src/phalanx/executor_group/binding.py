"""What a group is bound to: names, shapes and layouts; and how a batch is read by them.

Nothing here computes or keeps anything: a binding is a value, and another batch size makes another
one.

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

from phalanx.errors import ConfigError
from phalanx.executor_group.batches import DataBatch, DataDesc, read_descs
from phalanx.executor_group.given_tensors import as_bound, read_tensor
from phalanx.executor_group.group_arguments import read_names
from phalanx.plan import read_whole
from phalanx.types import Nested

__all__ = ["Binding", "Fed", "Share", "as_batch", "is_batch", "resized"]


@dataclasses.dataclass(frozen=True)
class Share:
    """One device's part of a batch, without padded rows."""

    data: dict[str, Tensor]
    labels: dict[str, Tensor]
    rows: int


@dataclasses.dataclass(frozen=True)
class Fed:
    """One whole batch as tensors by name, of ``rows`` rows, ``pad`` of them padded."""

    data: dict[str, Tensor]
    labels: dict[str, Tensor]
    rows: int
    pad: int


@dataclasses.dataclass(frozen=True)
class Binding:
    """Descriptions of what goes in, and which of it the module's forward takes.

    Attributes:
        batch_size: B.
        signature: What the module's forward takes.
    """

    data: tuple[DataDesc, ...]
    labels: tuple[DataDesc, ...]
    states: tuple[DataDesc, ...]
    batch_size: int
    signature: _Signature = dataclasses.field(repr=False)

    @staticmethod
    def of(module: nn.Module, data: Any, labels: Any, state_names: Any) -> Binding:
        """Read descriptions, and check them against each other and the module.

        Args:
            state_names: Which of the data are states; None for none.

        Raises:
            ConfigError: Batch sizes differ; names are taken twice, or are none of the module's; the
                module needs others; a state is described nowhere.
        """
        names = read_names("state_names", () if state_names is None else state_names)
        known = read_descs(data, "data_shapes")
        states = tuple(each for each in known if each.name in names)
        for name in names:
            if name not in {each.name for each in states}:
                raise ConfigError(
                    f"`state_names` must name states with a shape in `data_shapes`, but {name!r} "
                    "has none."
                )
        return Binding._of(module, tuple(e for e in known if e not in states), labels, states)

    def rebound(self, module: nn.Module, data: Any, labels: Any) -> Binding:
        """Read other descriptions; states that are not among them keep all but their rows."""
        descs = {each.name: each for each in read_descs(data, "data_shapes")}
        followed = self.followed(tuple(descs.values())).states
        states = tuple(descs.pop(each.name, each) for each in followed)
        return Binding._of(module, tuple(descs.values()), labels, states)

    @staticmethod
    def _of(
        module: nn.Module,
        data: tuple[DataDesc, ...],
        labels: Any,
        states: tuple[DataDesc, ...],
    ) -> Binding:
        groups = (data, read_descs(labels, "label_shapes"), states)
        if not data:
            raise ConfigError("`data_shapes` must describe at least one input, but does not.")
        _check_names_differ(groups)
        signature = _Signature.of(module)
        signature.check(*groups)
        return Binding(*groups, _common_rows(groups), signature)

    def fed_with(self, fed: Fed) -> Binding:
        """Return the binding to the shapes of ``fed``; what was not fed keeps all but its rows."""
        data = tuple(each.with_shape(fed.data[each.name].shape) for each in self.data)
        labels = tuple(
            each.with_shape(fed.labels[each.name].shape)
            if each.name in fed.labels
            else resized(each, fed.rows)
            for each in self.labels
        )
        states = tuple(resized(each, fed.rows) for each in self.states)
        return dataclasses.replace(
            self, data=data, labels=labels, states=states, batch_size=fed.rows
        )

    def read(self, batch: Nested) -> Fed:
        """Read one batch in any of its forms.

        Raises:
            ConfigError: Names, number of dims, rows, dtypes or pad do not fit.
        """
        batch = as_batch(batch, self)
        data = self.read_data(batch.data)
        given = batch.label if self.labels else None
        labels = {} if given is None else self.read_labels(given)
        rows = _rows_of({**data, **labels}, (*self.data, *self.labels), self.batch_size)
        pad = _read_pad(batch.pad, rows)
        self.signature.check_fed({*data, *labels, *(each.name for each in self.states)})
        return Fed(data, labels, rows, pad)

    def read_data(self, given: Nested) -> dict[str, Tensor]:
        """Read inputs by name; see :meth:`read`."""
        return _named(given, self.data, "data")

    def read_labels(self, given: Nested) -> dict[str, Tensor]:
        """Read labels by name; see :meth:`read`."""
        return _named(given, self.labels, "labels")

    def cut(self, fed: Fed, sizes: Sequence[int]) -> list[Share]:
        """Cut off padded rows, and the rest into ``sizes``; all are views."""
        data = _cut(fed.data, self.data, sizes)
        labels = _cut(fed.labels, self.labels, sizes)
        return [Share(data[i], labels[i], size) for i, size in enumerate(sizes)]

    def cut_labels(self, given: Nested, sizes: Sequence[int], pad: int) -> list[dict[str, Tensor]]:
        """Read labels alone and cut them; padded rows may be there or not.

        Raises:
            ConfigError: Names or rows do not fit.
        """
        labels, rows = self.read_labels(given), sum(sizes)
        for desc in self.labels:
            axis = desc.batch_axis
            if axis is None or desc.name not in labels:
                continue
            shape = tuple(labels[desc.name].shape)
            if shape[axis] not in (rows, rows + pad):
                raise ConfigError(
                    f"`{desc.name}` must have {rows + pad} rows like the last batch, but has shape "
                    f"{shape}."
                )
        return _cut(labels, self.labels, sizes)

    # Any: labels in any of their forms, by device.
    def read_sliced(
        self, given: Any, sizes: Sequence[int], pads: Sequence[int]
    ) -> list[dict[str, Tensor]]:
        """Read labels that are cut already; each device's own padded rows may be there or not.

        Raises:
            ConfigError: They are not one entry per device, or have other rows than its outputs.
        """
        if not isinstance(given, (list, tuple)) or len(given) != len(sizes):
            raise ConfigError(
                f"`labels` must hold one entry per device ({len(sizes)}) if pre_sliced, but "
                f"is {given!r:.80}."
            )
        read: list[dict[str, Tensor]] = []
        for place, (own, size, pad) in enumerate(zip(given, sizes, pads, strict=True)):
            if own is None:
                if size:
                    raise ConfigError(
                        f"`labels` must hold an entry for device {place}, which has {size} rows, "
                        "but hold None. Leave `labels` out to take the batch's own."
                    )
                read.append({})
                continue
            labels = self.read_labels(own)
            for desc in self.labels:
                axis = desc.batch_axis
                if axis is None or desc.name not in labels:
                    continue
                shape = tuple(labels[desc.name].shape)
                if shape[axis] not in (size, size + pad):
                    raise ConfigError(
                        f"`{desc.name}` must have {size} rows for device {place} like its outputs, "
                        f"but has shape {shape}. `slices` says which rows each device has."
                    )
                labels[desc.name] = labels[desc.name].narrow(axis, 0, size)
            read.append(labels)
        return read

    def join_labels(
        self, by_device: Sequence[Mapping[str, Tensor]], sizes: Sequence[int], home: torch.device
    ) -> dict[str, Tensor]:
        """Return whole labels on ``home``, of the devices that have rows."""
        used = [own for own, size in zip(by_device, sizes, strict=True) if size] or by_device[:1]
        whole = {}
        for desc in self.labels:
            parts = [own[desc.name].to(home) for own in used if desc.name in own]
            if parts:
                axis = desc.batch_axis
                whole[desc.name] = parts[0] if axis is None else torch.cat(parts, axis)
        return whole

    def call(
        self, share: Share, data: Mapping[str, Tensor], states: Mapping[str, Tensor]
    ) -> Nested:
        """Return the arguments of the module's forward for ``share``, with ``data`` as its data."""
        return self.signature.arguments(share, data, states)

    def of_rows(self, rows: int) -> Binding:
        """Return the binding to ``rows`` rows."""
        data, labels, states = (
            tuple(resized(each, rows) for each in descs)
            for descs in (self.data, self.labels, self.states)
        )
        return dataclasses.replace(self, data=data, labels=labels, states=states, batch_size=rows)

    # Any: descriptions in any of their forms.
    def followed(self, data: Any) -> Binding:
        """Return the binding to as many rows as ``data`` has, of which labels and states follow."""
        rows = next(
            (each.rows for each in read_descs(data, "data_shapes") if each.rows is not None), None
        )
        return self if rows is None else self.of_rows(rows)


@dataclasses.dataclass(frozen=True)
class _Signature:
    """What a module's forward takes; ``names`` is None where it does not say."""

    names: tuple[str, ...] | None
    needed: tuple[str, ...]
    takes_any: bool

    @staticmethod
    def of(module: nn.Module) -> _Signature:
        try:
            known = list(inspect.signature(module.forward).parameters.values())
        except (TypeError, ValueError):  # a forward that does not say what it takes
            return _Signature(None, (), False)
        named = [
            each for each in known if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        ]
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known)
        if not named and not takes_any:
            return _Signature(None, (), False)
        needed = tuple(each.name for each in named if each.default is each.empty)
        return _Signature(tuple(each.name for each in named), needed, takes_any)

    def check(
        self,
        data: Sequence[DataDesc],
        labels: Sequence[DataDesc],
        states: Sequence[DataDesc],
    ) -> None:
        if self.names is None:
            return
        told = ", ".join(map(repr, self.names))
        for desc in (*data, *states):
            if desc.name not in self.names and not self.takes_any:
                raise ConfigError(
                    f"`data_shapes` must name arguments of the module's forward, but names "
                    f"{desc.name!r}. It takes {told}."
                )
        given = {*(desc.name for desc in (*data, *labels, *states))}
        lacking = [name for name in self.needed if name not in given]
        if lacking:
            raise ConfigError(
                "`data_shapes` and `label_shapes` must name all that the module's forward needs, "
                f"but {_listed(lacking)} {'is' if len(lacking) == 1 else 'are'} missing. It takes "
                f"{told}."
            )

    def check_fed(self, given: Iterable[str]) -> None:
        """Refuse a batch without labels that the module's forward cannot do without."""
        lacking = [name for name in self.needed if name not in given]
        if lacking:
            raise ConfigError(
                f"`data_batch` must hold {_listed(lacking)}, which the module's forward needs, but "
                "does not. Give `DataBatch(data, label)`."
            )

    def takes(self, name: str) -> bool:
        return self.names is not None and (name in self.names or self.takes_any)

    def arguments(
        self, share: Share, data: Mapping[str, Tensor], states: Mapping[str, Tensor]
    ) -> Nested:
        if self.names is None:
            return (*data.values(), *states.values())
        labels = {name: value for name, value in share.labels.items() if self.takes(name)}
        return {**data, **labels, **states}


# Any: whatever the user gave.
def is_batch(value: Any) -> bool:
    """Tell whether ``value`` is a batch with its own fields, as `DataBatch` is."""
    # An array is told first: that of an array of dates cannot even be looked at.
    return not isinstance(value, (Tensor, np.ndarray, Mapping)) and hasattr(value, "data")


# Any: whatever the user gave.
def as_batch(value: Any, binding: Binding) -> DataBatch:
    """Read a batch: one already, or an object alike, or its data, with labels if by name."""
    if is_batch(value):
        return DataBatch(value.data, getattr(value, "label", None), getattr(value, "pad", None))
    if isinstance(value, Mapping):
        names = {each.name for each in binding.labels}
        labels = {name: each for name, each in value.items() if name in names}
        data = {name: each for name, each in value.items() if name not in names}
        return DataBatch(data, labels or None)
    return DataBatch(value)


def _check_names_differ(groups: Sequence[Sequence[DataDesc]]) -> None:
    names = [each.name for group in groups for each in group]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"`data_shapes` and `label_shapes` must name each tensor once, but name {name!r} "
                "twice."
            )


def _common_rows(groups: Sequence[Sequence[DataDesc]]) -> int:
    first: DataDesc | None = None
    for desc in (each for group in groups for each in group):
        if desc.rows is None:
            continue
        first = first or desc
        if desc.rows != first.rows:
            raise ConfigError(_other_rows(desc, first, first.rows, desc.shape))
    return 1 if first is None or first.rows is None else first.rows


def _rows_of(values: Mapping[str, Tensor], descs: Sequence[DataDesc], default: int) -> int:
    first: DataDesc | None = None
    rows = default
    for desc in descs:
        axis = desc.batch_axis
        if axis is None or desc.name not in values:
            continue
        shape = tuple(values[desc.name].shape)
        if first is None:
            first, rows = desc, shape[axis]
        if shape[axis] != rows:
            raise ConfigError(_other_rows(desc, first, rows, shape))
    return rows


def _other_rows(desc: DataDesc, like: DataDesc, rows: int | None, shape: Sequence[int]) -> str:
    return (
        f"`{desc.name}` must have {rows} rows like `{like.name}`, but has shape {tuple(shape)} "
        f"with layout {desc.layout or 'N first'}. Give a layout without N to what is not per "
        "sample."
    )


def _named(given: Nested, descs: Sequence[DataDesc], noun: str) -> dict[str, Tensor]:
    """Return tensors by name, in the order of ``descs``."""
    names = [each.name for each in descs]
    if isinstance(given, Mapping):
        missing = [name for name in names if name not in given]
        extra = [name for name in given if name not in names]
        if extra or (missing and noun == "data"):
            told = [f"lacks {_listed(missing)}"] if missing else []
            told += [f"has {_listed(extra)} too"] if extra else []
            raise ConfigError(
                f"`{noun}` must hold {_listed(names) or 'nothing'} as bound, but "
                f"{' and '.join(told)}."
            )
        return {each.name: _tensor(given[each.name], each) for each in descs if each.name in given}
    values = list(given) if isinstance(given, (tuple, list)) else [given]
    if len(values) != len(names):
        raise ConfigError(
            f"`{noun}` must hold {len(names)} tensors ({_listed(names) or 'none'}), but holds "
            f"{len(values)}. Bind as many, or give them by name."
        )
    return {each.name: _tensor(value, each) for each, value in zip(descs, values, strict=True)}


# Any: whatever the user gave.
def _tensor(value: Any, desc: DataDesc) -> Tensor:
    # Cut off from what made it, whose graph is not the group's to go back through.
    return as_bound(read_tensor(desc.name, value).detach(), desc)


def _read_pad(given: Any, rows: int) -> int:  # Any: whatever the user wrote
    pad = read_whole("pad", given)
    if not 0 <= pad <= rows or 0 < pad == rows:
        most = max(0, rows - 1)
        raise ConfigError(
            f"`pad` must be a number of rows from 0 to {most}, which leaves one, but is {pad!r}."
        )
    return pad


def resized(desc: DataDesc, rows: int) -> DataDesc:
    """Return the description of ``rows`` rows."""
    axis = desc.batch_axis
    if axis is None:
        return desc
    return desc.with_shape((*desc.shape[:axis], rows, *desc.shape[axis + 1 :]))


def _cut(
    values: Mapping[str, Tensor], descs: Sequence[DataDesc], sizes: Sequence[int]
) -> list[dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = [{} for _ in sizes]
    for desc in descs:
        if desc.name not in values:
            continue
        value, axis = values[desc.name], desc.batch_axis
        pieces = [value] * len(sizes) if axis is None else _split(value, axis, sizes)
        for part, piece in zip(parts, pieces, strict=True):
            part[desc.name] = piece
    return parts


def _split(value: Tensor, axis: int, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Cut off what is padded, then into ``sizes``."""
    pieces: Sequence[Tensor] = value.narrow(axis, 0, sum(sizes)).split(list(sizes), axis)
    return pieces


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
