"""The outputs of one forward pass, by device and whole.

Shape legend: device i has rows_i rows along an output's batch axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.compat.mxnet.binding import DataDesc
from phalanx.errors import ConfigError
from phalanx.plan import Merging, flatten, leaf_paths
from phalanx.types import Nested


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
        home: Where whole outputs lie.

    Attributes:
        whole: Merged outputs by name, with the graph of the pass.
        losses: The names of outputs that are losses.

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
        home: torch.device,
    ) -> None:
        used = [place for place, part in enumerate(found) if part is not None]
        paths = leaf_paths(found[used[0]])
        if declared and len(declared) != len(paths):
            raise ConfigError(
                f"`output_shapes` must declare all {len(paths)} outputs of the module, but "
                f"declares {len(declared)}."
            )
        rules: dict[str | int, str] = {}
        for place, (path, leaf) in enumerate(zip(paths, flatten(found[used[0]])[0], strict=True)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.dim():
                rules[path] = "mean"
            elif isinstance(leaf, Tensor) and leaf.dim() and declared:
                own = declared[place].batch_axis
                rules[path] = "first" if own is None else f"cat({own})"
        way_out = "Declare its layout in `output_shapes`, without N for an output without rows."
        merging = Merging(rules, axis, noun="device", way_out=way_out)
        parts, rows = [found[place] for place in used], [sizes[place] for place in used]
        own_names = [f"output{path or 0}" if path.isdigit() or not path else path for path in paths]
        self.names = [each.name for each in declared] or own_names
        leaves = flatten(merging.merge(parts, rows, home))[0]
        self.whole: dict[str, Any] = dict(zip(self.names, leaves, strict=True))
        self.losses = [
            name for name, path in zip(self.names, paths, strict=True) if rules.get(path) == "mean"
        ]
        self._by_device = [None if part is None else flatten(part)[0] for part in found]

    @property
    def measured(self) -> list[str]:
        """The names of outputs that metrics see: tensors with dims; else the losses."""
        return [
            name for name, each in self.whole.items() if isinstance(each, Tensor) and each.dim()
        ] or self.losses

    # Any, here and below: a tensor, or whatever else the module returns.
    def detached(self, names: Sequence[str]) -> list[Any]:
        """Return whole outputs of these names, without a graph."""
        return [_detached(self.whole[name]) for name in names]

    def by_device(self) -> list[list[Any]]:
        """Return each output of every device, without a graph; None for those without a part."""
        return [
            [None if leaves is None else _detached(leaves[place]) for leaves in self._by_device]
            for place in range(len(self.names))
        ]

    def gradients(self, given: Nested) -> list[tuple[Tensor, Tensor]]:
        """Return whole outputs and their gradients; of losses by default.

        Args:
            given: One for each output, or None, in their order; or the one gradient.

        Raises:
            ConfigError: They are not as many, or have another shape.
        """
        if given is None and self.losses:
            given = [1.0 if name in self.losses else None for name in self.names]
        elif isinstance(given, (Tensor, np.ndarray)):
            given = [given]
        if not isinstance(given, (list, tuple)) or len(given) != len(self.names):
            raise ConfigError(
                f"`out_grads` must hold one tensor, or None, for each of {self.names}, but is "
                f"{given!r:.80}. It may be left out where an output is a loss, one number per "
                "device."
            )
        pairs = []
        for (name, output), gradient in zip(self.whole.items(), given, strict=True):
            if gradient is None or not isinstance(output, Tensor) or not output.requires_grad:
                continue
            tensor = torch.as_tensor(gradient).to(output)
            if tensor.shape != output.shape:
                raise ConfigError(
                    f"`out_grads` must have shape {tuple(output.shape)} for output `{name}`, but "
                    f"has {tuple(tensor.shape)}."
                )
            pairs.append((output, tensor))
        return pairs


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
