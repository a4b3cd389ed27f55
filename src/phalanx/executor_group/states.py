"""Inputs that stay from batch to batch, by device, such as the states of a recurrent net."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.executor_group.batches import DataDesc
from phalanx.executor_group.given_tensors import as_bound, read_tensor, savable
from phalanx.plan import read_number

__all__ = ["States"]


class States:
    """One number for all of them, or tensors by device, which are cut anew when sizes change."""

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices
        self._value = 0.0
        # By state, then by device, or one for all; None for a device that was given none.
        self._parts: list[list[Tensor | None]] | None = None

    # Any: what the user gave.
    def set(self, descs: Sequence[DataDesc], states: Any, value: float | None) -> None:
        """Take tensors, each whole or a list by device, or one value for all.

        Raises:
            ConfigError: Neither or both are given, or they are not as many, or of another shape, or
                have other rows than each other. With the batch's, :meth:`cut` compares them.
        """
        if (states is None) == (value is None):
            told = "both are" if states is not None else "neither is"
            raise ConfigError(f"`states` or `value` must be given, one of them, but {told}.")
        if value is not None:
            self._value, self._parts = read_number("value", value), None
            return
        if not isinstance(states, (list, tuple)) or len(states) != len(descs):
            raise ConfigError(
                f"`states` must hold one entry for each of {[each.name for each in descs]}, but is "
                f"{states!r:.80}."
            )
        parts = [self._read(desc, given) for desc, given in zip(descs, states, strict=True)]
        _check_rows(descs, parts)
        self._parts = parts

    def cut(
        self, descs: Sequence[DataDesc], sizes: Sequence[int], pad: int = 0
    ) -> list[dict[str, Tensor]]:
        """Return each device's states by name; rows for ``pad`` padded ones may be there or not.

        A device that was given none has none, which only one without rows may.

        Raises:
            ConfigError: Tensors were given that have other rows together, or none for a device that
                has rows.
        """
        parts: list[dict[str, Tensor]] = [{} for _ in sizes]
        for place, desc in enumerate(descs):
            own = None if self._parts is None else self._parts[place]
            filled = own is None
            pieces = self._filled(desc, sizes) if own is None else _fitted(desc, own, sizes, pad)
            for part, piece in zip(parts, pieces, strict=True):
                if piece is not None:
                    part[desc.name] = piece if filled else savable(piece).detach()
        return parts

    def _filled(self, desc: DataDesc, sizes: Sequence[int]) -> list[Tensor | None]:
        shape, axis = list(desc.shape), desc.batch_axis
        pieces: list[Tensor | None] = []
        for size in sizes:
            if axis is not None:
                shape[axis] = size
            pieces.append(torch.full(shape, self._value, dtype=desc.dtype))
        return pieces

    # Any: what the user gave.
    def _read(self, desc: DataDesc, given: Any) -> list[Tensor | None]:
        parts = [given] if isinstance(given, (Tensor, np.ndarray)) else given
        fits = isinstance(parts, (list, tuple)) and len(parts) in (1, self._num_devices)
        if not fits or all(each is None for each in parts):
            raise ConfigError(
                f"`states` must hold a tensor of {len(desc.shape)} dims for `{desc.name}`, or one "
                f"for each of {self._num_devices} devices, but holds {given!r:.80}."
            )
        return [None if each is None else _bound_part(desc, each) for each in parts]


# Any: what the user gave.
def _bound_part(desc: DataDesc, given: Any) -> Tensor:
    """Read the whole of one state, or a device's part: as bound, but for how many rows it has."""
    part, axis = as_bound(read_tensor(desc.name, given), desc), desc.batch_axis
    wanted = [size for dim, size in enumerate(desc.shape) if dim != axis]
    if [size for dim, size in enumerate(part.shape) if dim != axis] != wanted:
        raise ConfigError(
            f"`states` must have the shape of `{desc.name}` as bound, {desc.shape} but for its "
            f"rows, but has {tuple(part.shape)}."
        )
    return part


def _check_rows(descs: Sequence[DataDesc], states: Sequence[Sequence[Tensor | None]]) -> None:
    """Refuse states that fit no batch: of one with 6 rows and one with 7, say."""
    first: tuple[str, int] | None = None
    for desc, parts in zip(descs, states, strict=True):
        axis = desc.batch_axis
        if axis is None:
            continue
        rows = sum(part.shape[axis] for part in parts if part is not None)
        first = first or (desc.name, rows)
        if rows != first[1]:
            raise ConfigError(
                f"`states` must have {first[1]} rows for `{desc.name}` like `{first[0]}`, but have "
                f"{rows}."
            )


def _fitted(
    desc: DataDesc, parts: Sequence[Tensor | None], sizes: Sequence[int], pad: int
) -> list[Tensor | None]:
    """Return the parts as they are where their rows fit, or joined and cut anew."""
    axis = desc.batch_axis
    given = [part for part in parts if part is not None]
    if axis is None:
        own = list(parts) if len(parts) == len(sizes) else [parts[0]] * len(sizes)
        used = sizes if any(sizes) else [1]  # of no rows at all, the first device computes
        for place, (part, size) in enumerate(zip(own, used, strict=False)):
            if part is None and size:
                raise ConfigError(
                    f"`states` must hold a tensor for `{desc.name}` of device {place}, which has "
                    f"rows, but hold None. Call `set_states()` for all devices."
                )
        return own
    if [0 if part is None else part.shape[axis] for part in parts] == list(sizes):
        return [given[0].narrow(axis, 0, 0) if part is None else part for part in parts]
    whole = torch.cat([part.to(given[0].device) for part in given], axis)
    if whole.shape[axis] not in (sum(sizes), sum(sizes) + pad):
        raise ConfigError(
            f"`states` must have {sum(sizes)} rows for `{desc.name}` like the batch, but have "
            f"{whole.shape[axis]}. Call `set_states()` for this batch size."
        )
    return list(whole.narrow(axis, 0, sum(sizes)).split(list(sizes), axis))
