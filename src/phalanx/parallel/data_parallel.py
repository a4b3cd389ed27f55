"""Data parallelism as an `nn.Module`: every replica takes its slice, outputs are merged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.execution import ThreadExecutor, check_reduce, refuse_without_nccl
from phalanx.parallel.container import Call, Container
from phalanx.parallel.graph import ForwardTask, ReplicaGraph, RunPart
from phalanx.parallel.replica_losses import (
    check_criterion,
    cut_targets,
    loss_of_nothing,
    loss_of_piece,
    mean_loss,
)
from phalanx.parallel.unwrapped import Unwrapped
from phalanx.plan import (
    Balancer,
    BufferRules,
    Layout,
    Merging,
    check_argument,
    check_function,
    check_microbatches,
    check_workloads,
    equal_sizes,
    fixed_workloads,
    flatten,
    open_rows,
    read_sizes,
    read_weights,
    unflatten,
    workload_sizes,
)
from phalanx.replicas import (
    current_replica,
    present_devices,
    resolve_devices,
    seed_of_process,
    uncompiled,
)
from phalanx.types import Device, LossFn, Nested, WeightFn

__all__ = ["DataParallel"]

T = TypeVar("T")


class DataParallel(Container, Unwrapped):
    """Run ``module`` on several devices of this host, each replica on its slice of the batch.

    Output, input gradients and parameter gradients are those of the unwrapped module within float
    rounding (sums are taken in another order); only what looks across the batch, such as batch norm
    in training, sees its slice. Any optimizer over ``parameters()``, any
    loss, autograd as usual. `state_dict()` has the keys of the unwrapped module, and loads from
    either. Hooks on the module's children run in every replica.

    Args:
        module: The module; it is trained in place (its parameters are the replicas' own memory).
        devices: One per replica, such as ``["cpu", "cpu"]``; default one for each device of its
            kind (two on a CPU).
        workloads: Relative share of each replica; equal by default; 0 switches one off. "auto":
            shares follow the seconds that each replica takes per row, forward and backward, until
            all take the same time. Passes without gradients count by themselves; a pass with them
            when its backward pass is done. With ``microbatches`` it means equal shares.
        microbatches: Number of pieces that every batch is cut into, at least as many as there are
            replicas. It fixes the order of all sums, so the gradients are bitwise the same for any
            number of replicas; every operator on a CPU runs on one thread, for the same reason,
            also those of the caller. Default: None, one slice for each replica.
        layout: Which dim of which input leaf is split; default dim 0 of all tensors with dims.
            Leaves are named by position, by the name of the module's argument, or by path
            (``0``, ``"mask"``, ``"0.items"``); None gives a leaf whole to all. A layout's ``split``
            gets the one argument, a tuple of several, or a dict of keywords, and ``collate``
            returns such.
        output: How output leaves are merged: a rule (``"mean"``), or rules by leaf path.
            Default: concatenated along the layout's dim, scalars stacked to one value per replica
            in use (or per microbatch), other values from the first. Where an output of three dims
            or more has the slices' rows along two of them, the whole batch is run once more to tell
            which.
        buffers: What becomes of buffers that replicas write: ``"mean"`` (weighted by rows),
            ``"first"`` or ``"sum"`` (what each has added), or these by pattern of name. Integer
            counters are never averaged.
        intra_op: Threads inside operators per replica; default: cores divided by replicas.
        reduce: "tree": gradients are added in an order of their own, whatever the devices. "nccl":
            on each GPU, and then over all GPUs by NCCL within this process, in NCCL's order and so
            to other bits.

    Shapes:
        B: rows of the batch, 0 or more. Every split leaf is [B, …]; every merged output is [B, …].

    Raises:
        ConfigError: Devices or workloads do not fit; leaves differ in their rows; a path names no
            leaf, or a pattern no buffer; outputs cannot be merged.
        UnsupportedError: In a second derivative (``create_graph=True``), or what else stands at the
            end of `docs/containers.md`.

    Determinism: with ``microbatches``, outputs, gradients and buffers are bitwise identical for any
    number of replicas on the same kind of device, with dropout and batch norm, too. Without, they
    are bitwise equal from run to run for the same devices and workloads; with ``workloads="auto"``
    the shares, and so the bits, depend on timing. Either way gradients are the whole batch's,
    within float rounding. ``reduce="nccl"`` adds in an order of its own.

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
        workloads: Sequence[float] | str | None = None,
        microbatches: int | None = None,
        layout: Layout | None = None,
        output: str | Mapping[str | int, str] | None = None,
        buffers: str | Mapping[str, str] = "mean",
        intra_op: int | None = None,
        reduce: str = "tree",
    ) -> None:
        check_microbatches(microbatches, intra_op)
        super().__init__(intra_op if microbatches is None else 1)
        check_reduce(reduce)
        self._nccl = reduce == "nccl"
        if not isinstance(module, nn.Module):
            raise ConfigError(f"`module` must be an `nn.Module`, but is {type(module).__name__!r}.")
        home = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self._devices = resolve_devices(devices, home)
        given = fixed_workloads(workloads)
        self._workloads = [1.0] * len(self._devices) if given is None else list(given)
        self._balances = isinstance(workloads, str) and microbatches is None
        if microbatches is not None and len(self._devices) > microbatches:
            raise ConfigError(
                f"`devices` must be at most as many as there are microbatches ({microbatches}), "
                f"but are {len(self._devices)}. Give more microbatches, or fewer devices."
            )
        self._microbatches = microbatches
        self._one_thread = microbatches is not None
        check_workloads(self._workloads, len(self._devices))
        if self._nccl:
            refuse_without_nccl(self._devices, "reduce='nccl'")
        if layout is not None and not isinstance(layout, Layout):
            raise ConfigError(
                f"`layout` must be a `Layout`, but is {layout!r}. Give Layout(dim=1), say."
            )
        self._layout = layout if layout is not None else Layout()
        noun = "replica" if microbatches is None else "microbatch"
        self._merging = Merging(output, self._layout.dim, noun=noun)
        self._rules = BufferRules(buffers)
        self._rules.check(_buffer_names(module))
        self._arguments = _arguments_of(module)
        self.wrap(module)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each replica."""
        return self._devices

    @property
    def workloads(self) -> tuple[float, ...]:
        """Each replica's relative share of the next batch."""
        balancer = self._balancer()
        return tuple(self._workloads) if balancer is None else balancer.workloads

    @property
    def _num_pieces(self) -> int:
        """How many pieces a batch is cut into."""
        return len(self._devices) if self._microbatches is None else self._microbatches

    def _owners(self, num_pieces: int) -> Sequence[int] | None:
        return range(num_pieces) if self._microbatches is None else None

    # Any: the module's own signature.
    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on all replicas and merge their outputs."""
        return self._forward(Call(args, kwargs), None)

    def forward_sized(self, sizes: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """Run the module as calling the container does, with ``sizes[i]`` rows in piece i.

        The pieces are the replicas' slices, or the microbatches.

        Raises:
            ConfigError: The sizes do not make the batch.

        Example:
            >>> with DataParallel(nn.Identity(), devices=3) as model:
            ...     model.forward_sized([1, 0, 4], torch.arange(5))
            tensor([0, 1, 2, 3, 4])
        """
        return self._forward(Call(args, kwargs), sizes)

    def forward_parts(
        self,
        parts: Sequence[Nested],
        sizes: Sequence[int] | None = None,
        check: Callable[[list[Nested]], object] | None = None,
    ) -> list[Nested]:
        """Run the module on inputs that are cut already, and return those of every piece.

        Nothing is merged, and outputs stay on their replica's device; gradients of the parameters
        are summed as ever.

        Args:
            parts: One for each replica, or microbatch: a tuple is given as positions, a dict by
                name, anything else as the one argument; None for one that takes no part.
            sizes: How many rows each stands for; default: by the layout.
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
        noun = "replica" if self._microbatches is None else "microbatch"
        wanted = f"hold one input per {noun} ({self._num_pieces})"
        check_argument(isinstance(parts, (list, tuple)), "parts", wanted, parts, "Give a list.")
        if check is not None:
            check_function("check", check)
        if len(parts) != self._num_pieces or all(part is None for part in parts):
            given = sum(part is not None for part in parts)
            raise ConfigError(
                f"`parts` must {wanted}, not all None, but holds {len(parts)}, {given} of them not "
                "None."
            )
        calls = [None if part is None else Call.with_inputs(part) for part in parts]
        if sizes is None:
            sizes = [0 if call is None else _rows_of(call, self._layout_of(call)) for call in calls]
        sizes = read_sizes(sizes, None, len(parts))
        rows = [0 if call is None else size for call, size in zip(calls, sizes, strict=True)]
        # A part without rows runs, too, so its statistics must weigh something.
        weights = [0 if call is None else max(1, rows[i]) for i, call in enumerate(calls)]

        def run(piece: int, module: nn.Module, inputs: Nested) -> Nested:
            call = calls[piece]
            assert call is not None  # it would not run
            return call.run(module, inputs)

        leaves = [None if call is None else call.leaves for call in calls]
        observe = self._observer(rows)

        def place(found: list[Nested]) -> list[Nested]:
            outputs = iter(found)
            placed = [None if call is None else next(outputs) for call in calls]
            if check is not None:
                check(placed)
            return placed

        return self._run(leaves, weights, run, place, observe)

    def forward_loss(
        self,
        loss_fn: LossFn,
        inputs: Nested,
        targets: Nested,
        *,
        weight_fn: WeightFn | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the whole batch's mean loss, computed inside the replicas.

        Outputs never leave their replica, so that the first device does not fill with all of them.

        Args:
            loss_fn: Called as ``loss_fn(outputs, targets)`` in every replica, for its slice; a mean
                over what it counts. It has no parameters of its own.
            inputs: A tuple is given as positions, a dict by name, anything else as the one
                argument; the container's layout says how they are split.
            targets: Split along the layout's dim.
            weight_fn: What a slice's mean loss stands for, from its targets; default: its rows.
                Give it where targets are ignored or masked: a mean over none of them is nan.
            sizes: Rows per replica, or microbatch; default: by workloads, or equal.

        Shapes:
            Every replica's loss is a scalar, and so is the result.

        Raises:
            ConfigError: Rows of inputs and targets differ; a weight is negative or all are zero;
                ``loss_fn`` has parameters, is no mean or returns no scalar; a slice has no targets
                to be a mean over.

        Example:
            >>> net, x, y = nn.Linear(4, 1), torch.ones(5, 4), torch.zeros(5, 1)
            >>> loss_fn = nn.functional.mse_loss
            >>> with DataParallel(net, devices=3) as model:
            ...     torch.allclose(model.forward_loss(loss_fn, x, y), loss_fn(net(x), y))
            True
        """
        check_criterion(loss_fn)
        if weight_fn is not None:
            check_function("weight_fn", weight_fn)
        call = Call.with_inputs(inputs)
        parts, sizes = self._cut(call, sizes)
        slices = cut_targets(targets, sizes, self._layout.dim)
        used = _used(sizes)
        weights = read_weights("weight_fn", weight_fn, slices, used)

        def run(piece: int, module: nn.Module, both: Nested) -> Nested:
            outputs = call.run(module, both["inputs"])
            if not weights[piece]:
                return loss_of_nothing(outputs)
            return loss_of_piece(loss_fn, outputs, both["targets"])

        def merge(found: list[Nested]) -> Tensor:
            own = _used_of(weights, used)
            return mean_loss(found, own, self._home(), by_rows=weight_fn is None)

        pairs = [{"inputs": part, "targets": own} for part, own in zip(parts, slices, strict=True)]
        return self._run(_only(pairs, used), used, run, merge, self._observer(sizes))

    def extra_repr(self) -> str:
        names = [str(device) for device in self._devices]
        kinds = ", ".join(f"{name}×{names.count(name)}" for name in dict.fromkeys(names))
        cut = "" if self._microbatches is None else f", microbatches={self._microbatches}"
        return f"{len(names)} replicas on {kinds}, dim={self._layout.dim}{cut}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._devices = present_devices(self._devices)

    def _trained(self) -> nn.Module:
        return self.module

    def _make_executor(self) -> ThreadExecutor:
        return ThreadExecutor(
            self.module,
            self._devices,
            workloads=self._workloads,
            intra_op=self._intra_op,
            rules=self._rules,
            timed=self._balances,
            nccl=self._nccl,
        )

    def _balancer(self) -> Balancer | None:
        """Return the balancer of the workloads; None where they are given."""
        if self._balances and self._running.balancer is None:
            self._running.balancer = Balancer(len(self._devices))
        return self._running.balancer

    def _observer(self, sizes: Sequence[int]) -> Callable[[Sequence[float]], None] | None:
        """Return a function that takes in the seconds of a batch that was cut into ``sizes``."""
        balancer = self._balancer()
        if balancer is None:
            return None

        def observe(seconds: Sequence[float]) -> None:
            with self._running.lock:
                balancer.observe(sizes, seconds)

        return observe

    def _forward(self, call: Call, sizes: Sequence[int] | None) -> Nested:
        parts, sizes = self._cut(call, sizes)
        return self._outputs(call, parts, sizes)

    def _cut(self, call: Call, sizes: Sequence[int] | None) -> tuple[list[Nested], list[int]]:
        count = self._num_pieces
        if not call.leaves:  # replica 0 is called once, as the module would be
            return [{}] * count, read_sizes(sizes or [0] * count, 0, count)
        layout = self._layout_of(call)
        batch = open_rows(call.leaves if layout.split is None else call.inputs(), layout)
        rows = batch.count()
        if sizes is None and self._microbatches is not None:
            sizes = equal_sizes(rows, count)
        elif sizes is None:
            sizes = workload_sizes(rows, self.workloads)
        sizes = read_sizes(sizes, rows, count)
        parts = batch.cut(sizes)
        if layout.split is not None:
            parts = [None if part is None else call.like(part).leaves for part in parts]
        return parts, sizes

    def _layout_of(self, call: Call) -> Layout:
        """Return the layout with the paths of this call: arguments by position, if given so.

        An argument of the module that is not given is no wrong path.
        """
        dims: dict[str | int, int | None] = {}
        layout = self._layout_for(call.leaves)
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

    # Any: the user's own inputs.
    def _layout_for(self, inputs: Any) -> Layout:  # noqa: ARG002 - subclasses look at them
        """Return the layout for a call's inputs, by their paths."""
        return self._layout

    def _outputs(self, call: Call, parts: list[Nested], sizes: list[int]) -> Nested:
        used = _used(sizes)
        rows = _used_of(sizes, used) if self._checks_rows and call.leaves else None

        def run(_: int, module: nn.Module, inputs: Nested) -> Nested:
            return call.run(module, inputs)

        def merge(outputs: list[Nested]) -> Nested:
            if rows is not None:
                dubious = self._merging.coincidences(outputs, rows) - self._running.told_apart
                if dubious:
                    whole = self._on_whole_batch(call, run)
                    self._merging.merge([whole], [sum(rows)])  # refuses what has other sizes now
                    self._running.told_apart |= dubious
            return self._merging.merge(outputs, rows, self._home())

        return self._run(_only(parts, used), used, run, merge, self._observer(sizes))

    def _on_whole_batch(self, call: Call, run: RunPart) -> Nested:
        """Return the outputs of replica 0 for the whole batch; they are only looked at."""
        batch = call.leaves, [False] * len(flatten(call.leaves)[0])
        task = ForwardTask(run, records=False)
        with torch.no_grad():
            result = self._open_executor().run(
                task, [batch], weights=[1.0], seed=(seed_of_process(),), owners=[0]
            )
        graph: ReplicaGraph = result.results[0][0]
        return unflatten(graph.outputs, graph.spec)

    def _home(self) -> torch.device:
        """Return where outputs go: to the first device, or where a replica that holds this is."""
        if current_replica() is not None:
            places = (parameter.device for parameter in self.module.parameters())
            return next((each for each in places if each in self._devices), self._devices[0])
        return self._devices[0]


def _used(sizes: Sequence[int]) -> list[int]:
    """Return what each part weighs; an empty batch runs as the first one."""
    return list(sizes) if any(sizes) else [1] + [0] * (len(sizes) - 1)


def _only(parts: Sequence[Nested], used: Sequence[int]) -> list[Nested | None]:
    return [part if weight else None for part, weight in zip(parts, used, strict=True)]


def _used_of(values: Sequence[T], used: Sequence[int]) -> list[T]:
    return [value for value, weight in zip(values, used, strict=True) if weight]


def _rows_of(call: Call, layout: Layout) -> int:
    """Return the rows of a part's first leaf that would be split, or 1 where none would be."""
    first = open_rows(call.leaves if layout.split is None else call.inputs(), layout).first
    return 1 if first is None else first


def _buffer_names(module: nn.Module) -> list[str]:
    """Return the names of all buffers, also of those that are None as yet."""
    return [
        f"{path}.{key}" if path else key
        for path, each in module.named_modules()
        for key in each._buffers.keys()  # noqa: SIM118  # TorchScript has no more than that
    ]


def _arguments_of(module: nn.Module) -> dict[str, int]:
    """Return the positions of the arguments that the module's forward names."""
    try:
        known = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a forward that does not say what it takes
        return {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name: place for place, each in enumerate(known) if each.kind in kinds}
