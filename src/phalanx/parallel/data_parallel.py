"""Data parallelism as an `nn.Module`: every replica takes its slice, outputs are merged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.execution import ThreadExecutor
from phalanx.parallel.container import Call, Container
from phalanx.parallel.wrapper import Wrapper
from phalanx.plan import (
    Layout,
    Merging,
    Rows,
    check_argument,
    check_microbatches,
    equal_sizes,
    read_layout,
    read_workloads,
    workload_sizes,
)
from phalanx.replicas import (
    check_replicable,
    current_replica,
    resolve_devices,
)
from phalanx.torch_internals import uncompiled
from phalanx.types import Device, Nested


class DataParallel(Container, Wrapper):
    """Run ``module`` on several devices of this host, each replica on its slice of the batch.

    Output, input gradients and parameter gradients equal the unwrapped module's within float
    rounding (sums are taken in another order); only layers that look across the batch, such as
    batch norm in training, see a slice. Any optimizer over ``parameters()``, any
    loss, autograd as usual. `state_dict()` has the keys of the unwrapped module, and loads from
    either. Hooks on the module's children run in every replica.

    Args:
        module: The module; it is trained in place (its parameters are the replicas' own memory).
        devices: One per replica, such as ``["cpu", "cpu"]``; default one for each device of its
            kind (two on a CPU).
        workloads: Relative share of each replica; equal by default; 0 switches one off. Not with
            ``microbatches``, of which a free replica takes the next.
        microbatches: Number of pieces of every batch, at least as many as there are replicas. It
            fixes the order of all sums, so gradients are bitwise identical for any number of
            replicas; every operator on a CPU then runs on one thread, also in the calling
            thread. Default: None, one slice for each replica.
        layout: The dim along which each input leaf is split; default dim 0 of all tensors.
            Leaves are named by position, by the name of the module's argument, or by path
            (``0``, ``"mask"``, ``"0.items"``); None gives a leaf whole to all.
        output: How output leaves are merged: a rule (``"mean"``), or rules by leaf path.
            Default: concatenated along the layout's dim, scalars stacked to one value per replica
            in use (or per microbatch), other values from the first. An output of three dims or more
            that has the slices' rows along two of them in the first batch needs a rule.
        buffers: What becomes of floating-point buffers that replicas write: ``"mean"``, weighted by
            rows, or ``"first"``, the first one's. Others are always the first one's.

    Shapes:
        B: rows of the batch, 0 or more. Every split leaf is [B, …]; every merged output is [B, …].

    Raises:
        ConfigError: Devices or workloads do not fit; leaves differ in their rows; a path names no
            leaf; outputs cannot be merged.
        UnsupportedError: A second derivative (``create_graph=True``), or another limit that the
            guide to containers lists.

    Determinism: with ``microbatches``, outputs, gradients and buffers are bitwise identical for any
    number of replicas on the same kind of device, with dropout and batch norm, too. Without, they
    are bitwise identical from run to run for the same devices and workloads. In both cases
    gradients are the whole batch's, within float rounding.

    Example:
        >>> net = nn.Linear(4, 2)
        >>> with DataParallel(net, devices=["cpu", "cpu"]) as model:
        ...     model(torch.ones(3, 4)).sum().backward()
        >>> net.weight.grad.tolist()
        [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]

    Source: torch/cunn's DataParallelTable and fbcunn's DataParallel; unlike them any batch size is
    cut, leaves of different batch size are refused, and buffers do not drift apart.
    """

    # Whether outputs without a rule must have their slice's rows along the layout's dim.
    _checks_rows = True

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Device] | int | None = None,
        *,
        workloads: Sequence[float] | None = None,
        microbatches: int | None = None,
        layout: Layout | None = None,
        output: str | Mapping[str | int, str] | None = None,
        buffers: str = "mean",
    ) -> None:
        check_microbatches(microbatches)
        super().__init__()
        check_argument(isinstance(module, nn.Module), "module", "be an `nn.Module`", module)
        check_replicable(module)
        home = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self._devices = resolve_devices(devices, home)
        self._workloads = read_workloads(workloads, len(self._devices))
        if microbatches is not None and workloads is not None:
            raise ConfigError(
                "`workloads` must be left out with `microbatches`, of which a free replica takes "
                f"the next, but is {workloads!r:.80}."
            )
        if microbatches is not None and len(self._devices) > microbatches:
            raise ConfigError(
                f"`devices` must be at most as many as there are microbatches ({microbatches}), "
                f"but are {len(self._devices)}. Give more microbatches, or fewer devices."
            )
        self._microbatches = microbatches
        self._one_thread = microbatches is not None
        self._layout = read_layout(layout)
        if self._layout.split is not None:
            raise UnsupportedError(
                "`layout` must not have `split` in a container, but has. Cut the batch yourself, "
                "and give the pieces to `forward_parts()`."
            )
        self._noun = "replica" if microbatches is None else "microbatch"
        self._merging = Merging(output, self._layout.dim, noun=self._noun)
        check_argument(buffers in ("mean", "first"), "buffers", "be 'mean' or 'first'", buffers)
        self._averages = buffers == "mean"
        self._arguments = _arguments_of(module)
        self.module = module

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each replica."""
        return self._devices

    @property
    def workloads(self) -> tuple[float, ...]:
        """Each replica's relative share of a batch."""
        return tuple(self._workloads)

    @property
    def _num_pieces(self) -> int:
        """The number of pieces of a batch."""
        return len(self._devices) if self._microbatches is None else self._microbatches

    def _owners(self, num_pieces: int) -> Sequence[int] | None:
        return range(num_pieces) if self._microbatches is None else None

    # Any: the module's own signature.
    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on all replicas and merge their outputs."""
        call = Call(args, kwargs)
        parts, sizes = self._cut(call)
        used = sizes if any(sizes) else [1] + [0] * (len(sizes) - 1)  # an empty batch runs once
        rows = [size for size, weight in zip(sizes, used, strict=True) if weight]

        def run(_: int, module: nn.Module, inputs: Nested) -> Nested:
            return call.run(module, inputs)

        def merge(outputs: list[Nested]) -> Nested:
            checked = rows if self._checks_rows and call.leaves else None
            return self._merging.merge(outputs, checked, self._home())

        taken = [part if weight else None for part, weight in zip(parts, used, strict=True)]
        return self._run(taken, sizes, run, merge)

    def forward_parts(
        self,
        parts: Sequence[Nested],
        sizes: Sequence[int] | None = None,
        check: Callable[[list[Nested]], object] | None = None,
    ) -> list[Nested]:
        """Run the module on inputs that are cut already, and return the outputs of every piece.

        Nothing is merged, and outputs stay on their replica's device; gradients of the parameters
        are summed as ever.

        Args:
            parts: One for each replica, or microbatch: a tuple is given as positions, a dict by
                name, anything else as the one argument; None for one that takes no part.
            sizes: What each counts where buffers are averaged, such as its rows; default: the same.
            check: Called with what will be returned, before buffers change; it may refuse.

        Returns:
            Outputs by part, None for those that were None.

        Raises:
            ConfigError: There are more or fewer parts than pieces, or none takes part.

        Example:
            >>> with DataParallel(nn.Identity(), devices=3) as model:
            ...     model.forward_parts([torch.ones(1), None, torch.zeros(2)])
            [tensor([1.]), None, tensor([0., 0.])]
        """
        wanted = f"hold one input per {self._noun} ({self._num_pieces})"
        check_argument(isinstance(parts, (list, tuple)), "parts", wanted, parts, "Give a list.")
        if len(parts) != self._num_pieces or all(part is None for part in parts):
            given = sum(part is not None for part in parts)
            raise ConfigError(
                f"`parts` must {wanted}, not all None, but holds {len(parts)}, {given} of them not "
                "None."
            )
        calls = [None if part is None else Call.with_inputs(part) for part in parts]
        sizes = [1] * len(parts) if sizes is None else sizes
        check_argument(len(sizes) == len(parts), "sizes", "hold one for each part", sizes)
        rows = [0 if call is None else size for call, size in zip(calls, sizes, strict=True)]

        def run(piece: int, module: nn.Module, inputs: Nested) -> Nested:
            call = calls[piece]
            assert call is not None  # it would not run
            return call.run(module, inputs)

        def place(found: list[Nested]) -> list[Nested]:
            outputs = iter(found)
            placed = [None if call is None else next(outputs) for call in calls]
            if check is not None:
                check(placed)
            return placed

        leaves = [None if call is None else call.leaves for call in calls]
        return self._run(leaves, rows, run, place)

    def extra_repr(self) -> str:
        names = [str(device) for device in self._devices]
        kinds = ", ".join(f"{name}×{names.count(name)}" for name in dict.fromkeys(names))
        cut = "" if self._microbatches is None else f", microbatches={self._microbatches}"
        return f"{len(names)} replicas on {kinds}, dim={self._layout.dim}{cut}"

    def _trained(self) -> nn.Module:
        return self.module

    def _make_executor(self) -> ThreadExecutor:
        return ThreadExecutor(
            self.module,
            self._devices,
            intra_op=1 if self._one_thread else None,
            averages=self._averages,
        )

    def _cut(self, call: Call) -> tuple[list[Nested], list[int]]:
        """Return the pieces of a call's arguments, and their rows."""
        count = self._num_pieces
        if not call.leaves:  # replica 0 is called once, as the module would be
            return [{}] * count, [0] * count
        batch = Rows(call.leaves, self._layout_of(call))
        rows = batch.count()
        equal = self._microbatches is not None
        sizes = equal_sizes(rows, count) if equal else workload_sizes(rows, self._workloads)
        return batch.cut(sizes), sizes

    def _layout_of(self, call: Call) -> Layout:
        """Return the layout with the paths of this call: arguments by position, if given so.

        An argument of the module that is not given is no wrong path.
        """
        dims: dict[str | int, int | None] = {}
        layout = self._layout
        for path, dim in layout.dims.items():
            root, dot, below = str(path).partition(".")
            place = self._arguments.get(root, len(call.leaves))
            if root in call.leaves:
                dims[str(path)] = dim
            elif place < call.num_args:
                dims[f"{place}{dot}{below}"] = dim
            elif root not in self._arguments:
                dims[str(path)] = dim  # refused where it is looked up
        return Layout(layout.dim, dims) if layout.dims else layout

    def _home(self) -> torch.device:
        """Return where outputs go: to the first device, or where a replica that holds this is."""
        if current_replica() is not None:
            places = (parameter.device for parameter in self.module.parameters())
            return next((each for each in places if each in self._devices), self._devices[0])
        return self._devices[0]


def _arguments_of(module: nn.Module) -> dict[str, int]:
    """Return the positions of the arguments that the module's forward names."""
    known = inspect.signature(module.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name: place for place, each in enumerate(known) if each.kind in kinds}
