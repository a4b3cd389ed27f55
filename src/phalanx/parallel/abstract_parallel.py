"""Columns on devices: the container that others extend by two rules, and `ModelParallel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Self

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError, StateError
from phalanx.execution import ThreadExecutor
from phalanx.parallel.container import Call, Container
from phalanx.parallel.on_device import keeping
from phalanx.plan import Merging, check_argument, read_whole
from phalanx.replicas import known_devices, resolve_device
from phalanx.torch_internals import uncompiled
from phalanx.types import Device, Nested

_CPU = torch.device("cpu")


class AbstractParallel(Container):
    """Run different modules, the columns, at the same time, each on its device.

    A subclass defines in ordinary torch operations the input of every column
    (:meth:`distribute`) and the output of all (:meth:`merge`); autograd follows from the two. The
    rest is here: placement, one thread per column, forward and backward on it, copies between
    devices. Columns are trained in place, and named "0", "1", … in `state_dict()`.

    Args:
        dim: The dim that the two rules are about.

    Raises:
        ConfigError: ``distribute`` does not return one input per column.
        StateError: The container is called without columns.
        UnsupportedError: In a second derivative (``create_graph=True``).

    Determinism: bitwise equal from run to run.

    Example:
        >>> class Mixture(AbstractParallel):
        ...     def distribute(self, inputs):
        ...         return [inputs] * len(self)
        ...
        ...     def merge(self, outputs):
        ...         return torch.stack(outputs).sum(0)
        >>> with Mixture().add(nn.Linear(4, 2)).add(nn.Sequential(nn.Linear(4, 2))) as model:
        ...     model(torch.ones(3, 4)).shape
        torch.Size([3, 2])

    A model around it that is moved to a device moves columns that are on the CPU; those on
    accelerators stay where they are.

    Source: fbcunn's ``AbstractParallel``; unlike it, any devices, any nested inputs and outputs,
    and columns that run concurrently on a CPU too.
    """

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim = read_whole("dim", dim)
        self._placed: list[torch.device] = []

    def distribute(self, inputs: Nested) -> Sequence[Nested]:
        """Return one input per column.

        Args:
            inputs: What the container was called with: the value itself when it was one, and a
                column's input is then what the column is called with. A tuple when there were
                several; a column's input is then a tuple of its arguments, and anything else is its
                one argument. Keyword arguments do not come here; they are given whole to every
                column.
        """
        raise NotImplementedError(
            f"`{type(self).__name__}` must say what its columns get, but has no `distribute()`. "
            "Write one that returns one input per column."
        )

    def merge(self, outputs: list[Nested]) -> Nested:
        """Return the container's output; by default, columns' outputs concatenated along ``dim``.

        Leaf by leaf, on the first column's device; scalars are stacked, and of leaves that are no
        tensors the first column's is taken.

        Args:
            outputs: What the columns returned, in order, each on its column's device.
        """
        way_out = "Write a `merge()` that takes them as they are."
        merging = Merging(dim=self.dim, noun="column", way_out=way_out)
        return merging.merge(outputs, None, self.devices[0])

    def add(self, module: nn.Module, device: Device | None = None) -> Self:
        """Append ``module`` as the next column, move it to ``device``, and return the container.

        Args:
            device: Default: :meth:`next_device`.

        Raises:
            ConfigError: It is no module, or holds this container; or the device does not exist.
        """
        check_argument(isinstance(module, nn.Module), "module", "be an `nn.Module`", module)
        if any(each is self for each in module.modules()):
            raise ConfigError(
                f"`module` must lie outside of this container, but is {type(module).__name__!r}, "
                "which is or holds it. Give another module, or a `clone()`."
            )
        place = self.next_device() if device is None else resolve_device(device)
        self.close()
        self.add_module(str(len(self)), module.to(place))
        self._placed.append(place)
        return self

    def get(self, index: int) -> nn.Module:
        """Return column ``index``, counted from 0; negative ones count from the end."""
        return self._columns()[index]

    def __len__(self) -> int:
        return len(self._placed)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each column: where its parameters are, or where it was placed."""
        return tuple(map(_place, self._columns(), self._placed))

    def next_device(self) -> torch.device:
        """Return the device with the fewest columns, the first of them."""
        return min(known_devices(), key=self.devices.count)

    # Any: the columns' own signature.
    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Distribute the inputs, run all columns at once, and merge their outputs."""
        if not len(self):
            raise StateError(
                f"`{type(self).__name__}` needs at least one column. Call `add()` first."
            )
        inputs = args[0] if len(args) == 1 else args
        calls = [
            Call(part if len(args) != 1 and type(part) is tuple else (part,), kwargs)
            for part in self._checked(self.distribute(inputs))
        ]

        def run(index: int, module: nn.Module, leaves: Nested) -> Nested:
            return calls[index].run(module, leaves)

        return self._run([call.leaves for call in calls], [1] * len(calls), run, self.merge)

    def extra_repr(self) -> str:
        return f"devices=[{', '.join(map(str, self._placed))}], dim={self.dim}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn`` to all tensors inside, as `to()`, `cuda()`, `float()`, … of a model do.

        Columns on accelerators take over the dtype only: they were spread out on purpose.
        """
        super()._apply(fn, recurse=False)  # type: ignore[no-untyped-call]
        places = {
            id(column): place for column, place in zip(self._columns(), self.devices, strict=True)
        }
        for child in self.children() if recurse else ():
            place = places.get(id(child), _CPU)
            child._apply(fn if place == _CPU else keeping(fn, place))
        return self

    def _checked(self, parts: Sequence[Nested]) -> Sequence[Nested]:
        if not isinstance(parts, (list, tuple)) or len(parts) != len(self):
            told = f"{len(parts)}" if isinstance(parts, (list, tuple)) else repr(type(parts))
            raise ConfigError(
                f"`distribute()` must return a list of one input per column ({len(self)}), but "
                f"returned {told}."
            )
        return parts

    def _columns(self) -> list[nn.Module]:
        return [self.get_submodule(str(index)) for index in range(len(self._placed))]

    def _fits(self, executor: ThreadExecutor) -> bool:
        return all(map(is_, executor.modules, self._columns()))

    def _make_executor(self) -> ThreadExecutor:
        return ThreadExecutor(self._columns(), self.devices)


class ModelParallel(AbstractParallel):
    """Give the whole input to every column, and concatenate their outputs along ``dim``.

                     ┌─ column 0 ─ output ─┐
        input ───────┼─ column 1 ─ output ─┼─ cat(dim) ─ output
                     └─ column 2 ─ output ─┘

    The gradient of the input is the sum of the columns'. They may return nested outputs, of the
    same structure: leaf by leaf, tensors are concatenated; of other values the first column's is
    taken.

    Columns must not change their input in place: on one device it is the same memory for all.

    Args:
        dim: The dim along which outputs are concatenated; negative ones count from the end.

    Shapes:
        Outputs may differ along ``dim`` only; the result has the sum of their sizes there.

    Raises:
        ConfigError: Outputs cannot be concatenated along ``dim``.
        StateError: It is called without columns.
        UnsupportedError: In a second derivative (``create_graph=True``).

    Determinism: bitwise equal from run to run. Equal to the uncut layer within float rounding:
    the input's gradient is summed over outputs in another order, and matrix products of another
    size may be computed in another order.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = ModelParallel(dim=-1).add(nn.Linear(4, 3)).add(nn.Linear(4, 2))
        >>> with model:
        ...     model(torch.ones(2, 4)).shape
        torch.Size([2, 5])

    Source: fbcunn's ModelParallel; unlike it, columns may lie on any devices, and summing the
    input's gradients does not change the columns' own.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def distribute(self, inputs: Nested) -> list[Nested]:
        """Return the whole input for every column."""
        return [inputs] * len(self)


def _place(column: nn.Module, placed: torch.device) -> torch.device:
    return next((parameter.device for parameter in column.parameters()), placed)
