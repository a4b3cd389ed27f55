"""What the devices' forward passes returned, leaf by leaf, and how it is merged and cut.

Shape legend: B rows without padded ones; device i has rows_i of them along an output's batch axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.executor_group.batches import DataDesc
from phalanx.executor_group.given_tensors import read_tensor
from phalanx.plan import flatten, leaf_paths
from phalanx.types import Nested

__all__ = ["Output", "measured", "pick_gradients", "read_outputs"]


@dataclass(frozen=True)
class Output:
    """One output: a leaf of what the module returns.

    Attributes:
        parts: By device; None for those that took no part.
        used: The devices that took part.
        rows: Of each device.
        axis: The batch axis; None: the first device's is everybody's.
        kind: "rows", "whole", "loss" (a number per device, a mean over its rows), "numbers" (a
            number that is no mean, such as a count) or "value" (no tensor).
    """

    name: str
    parts: tuple[Any, ...]  # Any: tensors, or whatever else the module returns
    used: tuple[int, ...]
    rows: tuple[int, ...]
    axis: int | None
    kind: str

    def merged(self, device: torch.device) -> Any:
        """Return the whole batch's, on ``device`` and without its graph."""
        values = [self.parts[place] for place in self.used]
        if self.kind == "value":
            return values[0]
        if self.kind == "whole":
            return values[0].detach().to(device)
        values = [value.detach().to(device) for value in values]
        if self.kind == "numbers":
            return torch.stack(values)
        if self.kind == "rows":
            return torch.cat(values, self.axis or 0)
        pairs = [
            (value, self._weight(place)) for value, place in zip(values, self.used, strict=True)
        ]
        total = [value * weight for value, weight in pairs if weight] or values[:1]
        return torch.stack(total).sum(0)

    def per_device(self) -> list[Any]:
        """Return each device's, None for those that took no part."""
        return [part.detach() if isinstance(part, Tensor) else part for part in self.parts]

    def shape(self, batch_size: int) -> tuple[int, ...]:
        """Return the merged shape for ``batch_size`` rows, padded ones included."""
        first = self.parts[self.used[0]]
        shape = list(first.shape) if isinstance(first, Tensor) else []
        if self.kind == "rows":
            shape[self.axis or 0] = batch_size
        elif self.kind == "numbers":
            shape = [len(self.used)]
        return tuple(shape)

    def gradients(self, given: Tensor | None, rows: int, pad: int) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of a device's output and its gradient; ``given`` None: of a mean loss.

        Raises:
            ConfigError: ``given`` has another shape.
        """
        first = self.parts[self.used[0]]
        live = isinstance(first, Tensor) and (first.is_floating_point() or first.is_complex())
        if given is None:
            if self.kind != "loss":
                return []
            given = torch.ones_like(first)
        expected = self.shape(rows)
        padded = self.kind == "rows" and tuple(given.shape) == self.shape(rows + pad)
        if not live or (tuple(given.shape) != expected and not padded):
            told = f"shape {expected}" if live else "None, because it has no gradient"
            raise ConfigError(
                f"`out_grads` must have {told} for output `{self.name}`, but has shape "
                f"{tuple(given.shape)}."
            )
        if given.is_complex() and not first.is_complex():
            raise ConfigError(
                f"`out_grads` must be real for output `{self.name}` of {first.dtype}, but is "
                f"{given.dtype}."
            )
        pieces = self._pieces(given)
        return [
            (self.parts[place], piece.to(self.parts[place]))
            for place, piece in pieces.items()
            if self.parts[place].requires_grad
        ]

    def _pieces(self, given: Tensor) -> dict[int, Tensor]:
        if self.kind == "loss":
            return {i: given * self._weight(i) for i in self.used if self._weight(i)}
        if self.kind == "whole":
            return {self.used[0]: given}
        axis = self.axis or 0
        sizes = [self.parts[place].shape[axis] for place in self.used]
        pieces = given.narrow(axis, 0, sum(sizes)).split(sizes, axis)
        return dict(zip(self.used, pieces, strict=True))

    def _weight(self, place: int) -> float:
        """Return what share of the whole a device's loss is; of no rows at all, it is the whole."""
        total = sum(self.rows)
        return self.rows[place] / total if total else float(place == self.used[0])


def read_outputs(
    found: Sequence[Nested],
    sizes: Sequence[int],
    declared: Sequence[DataDesc],
    default_axis: int,
) -> list[Output]:
    """Read what every device returned, None for those without a part.

    Raises:
        ConfigError: Devices return different structures; there are more or fewer outputs than are
            declared; an output has not its device's rows where it should.
    """
    used = tuple(place for place, size in enumerate(sizes) if size) or (0,)
    flat = {place: flatten(found[place]) for place in used}
    spec = flat[used[0]][1]
    if any(flat[place][1] != spec for place in used):
        raise ConfigError(
            "`module` must return the same structure on every device, but does not. Return the "
            "same leaves whatever the rows."
        )
    names = [f"output{path}" if path.isdigit() else path for path in leaf_paths(found[used[0]])]
    if names == [""]:
        names = ["output0"]
    if declared and len(declared) != len(names):
        raise ConfigError(
            f"`output_shapes` must declare all {len(names)} outputs of the module, but declares "
            f"{len(declared)}."
        )
    told = [desc.name for desc in declared] or names
    if len(set(told)) < len(told):
        raise ConfigError(
            f"`output_shapes` must have a name each, but are named {told}. Declare them with other "
            "names."
        )
    outputs = []
    for index, name in enumerate(names):
        desc = declared[index] if declared else None
        parts: list[Any] = [None] * len(found)
        for place in used:
            parts[place] = flat[place][0][index]
        name = name if desc is None else desc.name
        axis = default_axis if desc is None else desc.batch_axis
        kind = _kind(parts[used[0]], axis)
        if kind == "rows":
            axis = _checked_axis(name, parts, sizes, axis, desc)
        outputs.append(Output(name, tuple(parts), used, tuple(sizes), axis, kind))
    return outputs


def pick_gradients(given: Nested, outputs: Sequence[Output]) -> list[Tensor | None]:
    """Return one gradient, or None, for each output.

    Raises:
        ConfigError: They are not as many, or name others, or hold something else.
    """
    names = [output.name for output in outputs]
    if given is None:
        if not any(output.kind == "loss" for output in outputs):
            raise ConfigError(
                "`out_grads` must be given where no output is a loss, one number per device, but "
                f"is None. Give one gradient for each of {names}."
            )
        return [None] * len(names)
    if isinstance(given, (Tensor, np.ndarray)):
        given = [given]
    if isinstance(given, Mapping) and set(given) <= set(names):
        given = [given.get(name) for name in names]
    fits = isinstance(given, (list, tuple)) and len(given) == len(names)
    if not fits:
        raise ConfigError(
            f"`out_grads` must hold one tensor, or None, for each of {names}, but is {given!r:.80}."
        )
    if all(each is None for each in given):
        raise ConfigError("`out_grads` must hold at least one tensor, but all are None.")
    return [None if each is None else read_tensor("out_grads", each) for each in given]


def measured(outputs: Sequence[Output], name: str | None) -> list[Output]:
    """Return the outputs that a metric is to see: the named one, or all but losses.

    Raises:
        ConfigError: None has that name.
    """
    if name is None:
        return [each for each in outputs if each.kind in ("rows", "whole")] or list(outputs)
    chosen = [each for each in outputs if each.name == name]
    if not chosen:
        raise ConfigError(
            f"`output` must be one of {[each.name for each in outputs]}, but is {name!r}."
        )
    return chosen


def _kind(first: Any, axis: int | None) -> str:  # Any: whatever the module returns
    if not isinstance(first, Tensor):
        return "value"
    if first.dim() == 0:
        return "loss" if first.is_floating_point() or first.is_complex() else "numbers"
    return "whole" if axis is None else "rows"


def _checked_axis(
    name: str,
    parts: Sequence[Any],
    sizes: Sequence[int],
    axis: int | None,
    desc: DataDesc | None,
) -> int:
    axis = axis or 0
    for part, size in zip(parts, sizes, strict=True):
        if part is None:
            continue
        ranks = desc is None or part.dim() == len(desc.shape)
        if not ranks or part.dim() <= axis or part.shape[axis] != size:
            raise ConfigError(
                f"Output `{name}` must have its device's {size} rows along dim {axis}"
                f"{'' if ranks else f' and {len(desc.shape) if desc else 0} dims'}, but has shape "
                f"{tuple(part.shape)}. Declare its layout in `output_shapes`, without N for what "
                "has no rows."
            )
    return axis
