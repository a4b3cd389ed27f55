"""The outputs of one forward pass, by device and whole.

Shape legend: B rows without padded ones; device i has rows_i of them along an output's batch axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.compat.mxnet.batches import DataDesc
from phalanx.errors import ConfigError
from phalanx.plan import Merging, flatten, leaf_paths
from phalanx.types import Nested

__all__ = ["Outputs"]


class Outputs:
    """The leaves of what the module returned on every device.

    An output with the device's rows is concatenated; a floating-point number is a loss, and its
    mean is weighted by rows; whole numbers are stacked; the first device's is taken of an output
    that is declared without a batch axis, and of a value that is no tensor.

    Args:
        found: By device; None for one that had no part.
        sizes: Each device's rows.
        declared: The descriptions of all outputs, or none.
        axis: Where rows lie in outputs that are not declared.

    Raises:
        ConfigError: Devices returned different structures; there are more or fewer outputs than are
            declared; an output has not its device's rows.
    """

    def __init__(
        self,
        found: Sequence[Nested],
        sizes: Sequence[int],
        declared: Sequence[DataDesc],
        axis: int,
    ) -> None:
        self._used = [place for place, size in enumerate(sizes) if size] or [0]
        self._sizes = [sizes[place] for place in self._used]
        self._num_devices = len(sizes)
        flat = [flatten(found[place]) for place in self._used]
        if any(spec != flat[0][1] for _, spec in flat):
            raise ConfigError(
                "`module` must return the same structure on every device, but does not. Return the "
                "same leaves whatever the rows."
            )
        paths = leaf_paths(found[self._used[0]])
        if declared and len(declared) != len(paths):
            raise ConfigError(
                f"`output_shapes` must declare all {len(paths)} outputs of the module, but "
                f"declares {len(declared)}."
            )
        own = [f"output{path or 0}" if path.isdigit() or not path else path for path in paths]
        self.names = [each.name for each in declared] or own
        axes = [each.batch_axis for each in declared] or [axis] * len(paths)
        self._leaves = [dict(zip(self.names, leaves, strict=True)) for leaves, _ in flat]
        self._axes: dict[str, int] = {}  # of outputs that have rows
        self._rules: dict[str | int, str] = {}
        for name, own_axis in zip(self.names, axes, strict=True):
            self._rules[name] = self._rule(name, own_axis)
        self._whole: dict[str, Any] | None = None

    def _rule(self, name: str, axis: int | None) -> str:
        """Return how an output is merged, and note where it has rows."""
        first = self._leaves[0][name]
        if not isinstance(first, Tensor) or (first.dim() and axis is None):
            return "first"
        if not first.dim():
            return "mean" if first.is_floating_point() or first.is_complex() else "stack"
        axis = axis or 0
        for leaves, size in zip(self._leaves, self._sizes, strict=True):
            shape = tuple(leaves[name].shape)
            if len(shape) <= axis or shape[axis] != size:
                raise ConfigError(
                    f"Output `{name}` must have its device's {size} rows along dim {axis}, but has "
                    f"shape {shape}. Declare its layout in `output_shapes`, without N for an "
                    "output without rows."
                )
        self._axes[name] = axis
        return f"cat({axis})"

    @property
    def losses(self) -> list[str]:
        """The names of outputs that are losses: one number per device."""
        return [name for name in self.names if self._rules[name] == "mean"]

    @property
    def measured(self) -> list[str]:
        """The names of outputs that metrics see: tensors with dims; else the losses."""
        first = self._leaves[0]
        found = [name for name in self.names if isinstance(first[name], Tensor)]
        return [name for name in found if first[name].dim()] or self.losses

    def shape(self, name: str, rows: int) -> tuple[int, ...]:
        """Return the merged shape of an output for ``rows`` rows."""
        first = self._leaves[0][name]
        shape = list(first.shape) if isinstance(first, Tensor) else []
        if name in self._axes:
            shape[self._axes[name]] = rows
        elif self._rules[name] == "stack":
            shape = [len(self._used)]
        return tuple(shape)

    # Any: a tensor, or whatever else the module returns.
    def by_device(self, name: str) -> list[Any]:
        """Return an output of every device, without a graph; None for those that had no part."""
        parts: list[Any] = [None] * self._num_devices
        for place, leaves in zip(self._used, self._leaves, strict=True):
            parts[place] = _detached(leaves[name])
        return parts

    def merged(self, home: torch.device) -> dict[str, Any]:
        """Return whole outputs by name, on ``home``, with the graph of the pass."""
        if self._whole is None:
            with torch.enable_grad():
                merging = Merging(self._rules, noun="device")
                self._whole = merging.merge(self._leaves, self._sizes, home)
        return self._whole

    def whole(self, name: str, home: torch.device) -> Any:
        """Return one whole output on ``home``, without a graph."""
        whole = _detached(self.merged(home)[name])
        return whole.to(home) if isinstance(whole, Tensor) else whole

    def gradients(self, given: Nested, pad: int, home: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Return whole outputs and their gradients; of losses by default.

        Args:
            given: One for each output, or None, in their order or by name; or the one gradient.
            pad: Padded rows, which gradients may have or not.

        Raises:
            ConfigError: They are not as many, or name others, or have another shape.
        """
        pairs = []
        for name, gradient in self._picked(given).items():
            output = self.merged(home)[name]
            if gradient is None or not isinstance(output, Tensor) or not output.requires_grad:
                continue
            tensor = torch.as_tensor(gradient).to(output)
            axis = self._axes.get(name)
            if axis is not None and tensor.dim() == output.dim():
                rows = output.shape[axis]
                tensor = (
                    tensor.narrow(axis, 0, rows) if tensor.shape[axis] == rows + pad else tensor
                )
            if tensor.shape != output.shape:
                raise ConfigError(
                    f"`out_grads` must have shape {tuple(output.shape)} for output `{name}`, but "
                    f"has {tuple(tensor.shape)}."
                )
            pairs.append((output, tensor))
        return pairs

    def _picked(self, given: Nested) -> Mapping[str, Any]:
        """Return a gradient, or None, for each of the outputs that are to be differentiated."""
        if given is None:
            if not self.losses:
                raise ConfigError(
                    "`out_grads` must be given where no output is a loss, one number per device, "
                    f"but is None. Give one gradient for each of {self.names}."
                )
            return dict.fromkeys(self.losses, 1.0)
        if isinstance(given, (Tensor, np.ndarray)):
            given = [given]
        if isinstance(given, (list, tuple)) and len(given) == len(self.names):
            given = dict(zip(self.names, given, strict=True))
        if not isinstance(given, Mapping) or not set(given) <= set(self.names):
            raise ConfigError(
                f"`out_grads` must hold one tensor, or None, for each of {self.names}, but is "
                f"{given!r:.80}."
            )
        return given


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
