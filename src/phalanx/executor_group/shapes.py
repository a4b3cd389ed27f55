"""The shapes of outputs before anything has run: as declared, or as a run without memory finds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import StateError
from phalanx.executor_group.batches import DataDesc
from phalanx.executor_group.binding import Binding, Share, resized
from phalanx.executor_group.outputs import read_outputs

__all__ = ["infer_shapes"]


def infer_shapes(
    module: nn.Module, binding: Binding, declared: Sequence[DataDesc], training: bool
) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of the outputs for all rows.

    A copy of the module runs once on the meta device, where there are shapes and no values.

    Raises:
        StateError: They are not declared, and the module does not run so.
    """
    if declared:
        known = [resized(each, binding.batch_size) for each in declared]
        return [(each.name, each.shape) for each in known]
    causes: list[Exception] = []
    number = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    whole = torch.int64
    # What data and labels may be of which no dtype was bound: numbers, and tokens or classes.
    for of_data, of_labels in ((number, whole), (number, number), (whole, whole)):
        try:
            return _inferred(module, binding, training, of_data, of_labels)
        except Exception as error:  # whatever a user's module raises without values
            causes.append(error)
    raise StateError(
        "The group must have run to know its outputs, but has not, and the module does not tell "
        f"their shapes without values ({causes[0]!r:.200}). Call `forward()` first, or declare "
        "`outputs`."
    ) from causes[0]


def _inferred(
    module: nn.Module,
    binding: Binding,
    training: bool,
    of_data: torch.dtype,
    of_labels: torch.dtype,
) -> list[tuple[str, tuple[int, ...]]]:
    data, labels, states = (
        {each.name: torch.empty(each.shape, dtype=each.dtype or kind, device="meta") for each in d}
        for d, kind in (
            (binding.data, of_data),
            (binding.labels, of_labels),
            (binding.states, of_data),
        )
    )
    rows = binding.batch_size
    given = binding.call(Share(data, labels, None, rows), data, states)
    with torch.no_grad():
        twin = _on_meta(module).train(training)
        found = twin(*given) if isinstance(given, tuple) else twin(**given)
    axis = next((each.batch_axis for each in binding.data if each.batch_axis is not None), 0)
    outputs = read_outputs([found], [rows], [rows], (), axis)
    return [(each.name, each.shape(rows)) for each in outputs]


def _on_meta(module: nn.Module) -> nn.Module:
    """Return a copy whose parameters and buffers have no values; the module's are not copied."""
    memo: dict[int, Any] = {}  # Any: what `deepcopy` keeps
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    for tensor in tensors:
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(module, memo)
