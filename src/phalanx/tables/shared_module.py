"""A module that every worker trains a copy of, and that they exchange through tables.

    worker 0   step step step ┐ sync: the change of my copy since the last sync → table
    worker 1   step step step ┤       the merged values                         → my copy
    worker 2   step step step ┘

every=1, merge="sum", asynchronous   ASGD as Multiverso and Downpour have it
every=k, merge="mean", sync=True     local SGD
the same with outer="nesterov"       DiLoCo

In a table the tensors lie end to end, as one tensor of float32, or of float64 where any tensor is
of that. Deltas of parameters are (P, 1), P their elements; of statistics (P, 2): a worker's value,
and how much it counts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from phalanx.errors import ConfigError, StateError
from phalanx.plan import check_argument, read_count
from phalanx.tables.part import Entry
from phalanx.tables.snapshots import load_parts
from phalanx.tables.table import Table
from phalanx.tables.table_group import TableGroup, read_mode
from phalanx.tables.updaters import Blend, Nesterov, Sum, Updater

Tensors = dict[str, Tensor]  # by name


class SharedModule:
    """Keep the workers' copies of a module together, by their changes since the last exchange.

    Every worker trains its own copy with its own optimizer, and calls :meth:`step` after each
    of its steps. Parameters exchange differences; floating-point buffers (running statistics) are
    averaged; others (counters, masks that hold infinity) are each worker's own. Tied parameters are
    one; frozen ones are shared and keep their values. A tensor that replaces another, as with
    ``load_state_dict(assign=True)``, is shared instead.

    After a synchronous sync all copies hold the same values: the sum or mean of the changes of the
    workers that took part, applied at once, by one outer step with ``outer``. After another one the
    copy holds all changes that were added by then, of which "mean" counts ``1 / num_workers`` each,
    and each is an outer step; with ``staleness`` k at least all but the others' last k.

    Args:
        module: Its parameters and buffers are shared. It gets the master's values at once, or the
            current ones if the worker joins later.
        world: This worker's group, from :func:`phalanx.tables.join`.
        every: Number of steps between two exchanges.
        merge: "mean" averages the changes of the n workers; "sum" adds them, which is a step up to
            n times as long.
        outer: None, or "nesterov": the shared values go down old − new with momentum, in tables
            that all workers share, as in DiLoCo: ``tables.Nesterov(lr=0.7, momentum=0.9)``, which
            may have other options.
        sync, staleness: The mode; the world's if None, as for ``world.array``.
        name: The beginning of its tables' names; None numbers them, in the order of opening.

    Raises:
        ConfigError: An argument cannot work; the module has no parameters or one without memory; or
            another worker's module has more or fewer numbers.

    Determinism: Synchronous: all copies are bitwise identical at any timing; sums go in the order
    of workers. With one worker and no ``outer``, training is bitwise identical to plain training.
    Collective: Synchronous: all workers construct it, and sync equally often or close.
    Moves: Both ways, 4 bytes for each element (8 where any is float64); it keeps three more copies,
    and the tables hold two, four with ``outer``.

    Example:
        >>> from phalanx import tables
        >>> net = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> with tables.join(sync=True) as world:
        ...     shared = SharedModule(net, world, every=20, outer="nesterov")
        ...     for _ in range(40):
        ...         optimizer.zero_grad()
        ...         net(torch.ones(5, 3)).square().mean().backward()
        ...         optimizer.step()
        ...         _ = shared.step()
        >>> shared.num_syncs
        2

    Source: microsoft/Multiverso's MVModelParamManager for the differences; Stich, arXiv 1805.09767
    (local SGD); Douillard et al., arXiv 2311.08105 (DiLoCo), algorithm 1.
    """

    def __init__(
        self,
        module: nn.Module,
        world: TableGroup,
        every: int = 1,
        merge: str = "mean",
        outer: str | Nesterov | None = None,
        *,
        sync: bool | None = None,
        staleness: int | None = None,
        name: str | None = None,
    ) -> None:
        check_argument(isinstance(module, nn.Module), "module", "be an nn.Module", module)
        check_argument(isinstance(world, TableGroup), "world", "be what `join` returned", world)
        check_argument(merge in ("sum", "mean"), "merge", "be 'sum' or 'mean'", merge)
        check_argument(name != "", "name", "be None or a name", name)
        if outer == "nesterov":
            outer = Nesterov(lr=0.7, momentum=0.9)  # arXiv 2311.08105, table 5
        fits = outer is None or type(outer) is Nesterov
        check_argument(fits, "outer", "be None, 'nesterov' or `tables.Nesterov(…)`", outer)
        assert outer is None or isinstance(outer, Nesterov)
        self.module = module
        self.every = read_count("every", every, 1, "step")
        self.merge = merge
        self.outer = outer
        self.num_steps = 0
        self.num_syncs = 0
        self._world = world
        self._staleness = read_mode(sync, staleness, world.staleness)
        self._is_torn = False  # whether a sync has begun and not ended
        self._exchanges = self._open_exchanges(name)
        self._receive()

    def _open_exchanges(self, name: str | None) -> list[ParameterExchange]:
        parameters, statistics = _sort_tensors(self.module)
        # Buffers with infinity or NaN, such as masks.
        self._constants = [n for n, each in statistics.items() if not bool(each.isfinite().all())]
        for constant in self._constants:
            del statistics[constant]
        in_rounds = self._staleness == 0
        # Small changes to narrower floats add up before they are rounded.
        dtype = torch.float32
        for tensor in (*parameters.values(), *statistics.values()):
            dtype = torch.promote_types(dtype, tensor.dtype)

        def open_table(tensors: Tensors, what: str, updater: Updater) -> Table:
            size = sum(tensor.numel() for tensor in tensors.values())
            return self._world.array(
                size,
                dtype,
                init=_gather(tensors, torch.empty(size, dtype=dtype, device="cpu")),
                name=name and f"{name}.{what}",
                updater=updater,
                sync=in_rounds,
                staleness=self._staleness or None,
            )

        # A round's deltas are merged, others are taken one by one as they come.
        updater = replace(self.outer or Sum(), merge=self.merge if in_rounds else None)
        table = open_table(parameters, "parameters", updater)
        exchanges = [ParameterExchange(parameters, table)]
        if statistics:
            table = open_table(statistics, "statistics", Blend())
            exchanges.append(StatisticsExchange(statistics, table))
        return exchanges

    # --- exchanging -------------------------------------------------------------------------------

    def step(self) -> bool:
        """Count one step of this worker; sync with every ``every``-th, and return whether it did.

        Call it after ``optimizer.step()``.

        Raises:
            PeerTimeout: As :meth:`sync`. The step is counted.
        """
        self.num_steps += 1
        due = self.num_steps % self.every == 0
        if due:
            self.sync()
        return due

    def sync(self) -> None:
        """Exchange with the others now: add what has changed, get what everybody made of it.

        Gradients and the state of the worker's own optimizer are left alone.

        Raises:
            ConfigError: A parameter or statistic has become NaN or infinite; nothing is changed.
            PeerTimeout: A worker for whom the mode waits stayed away; ``.rank`` is it. Some tables
                may have this worker's change by then, and others not, so that is the end of the
                sharing: begin it again from a :meth:`snapshot`.
            StateError: The group is closed, an earlier sync failed, or the module has
                other parameters or statistics than it had. Nothing is changed.

        Collective: Synchronous: all workers. Blocks: As a table's ``get`` in its mode.
        """
        world = self._world
        world._check_open()
        self._refuse_torn("sync")
        self._find_tensors()
        for exchange in self._exchanges:
            exchange.note()
        self._is_torn = True
        share = 1.0 if self._staleness == 0 else 1.0 / world.num_workers
        factor = share if self.merge == "mean" else 1.0
        factor = factor if self.outer is None else -factor  # an outer step goes downhill
        for exchange, each in zip(self._exchanges, (factor, share), strict=False):
            exchange.give(each)
        if self._staleness:
            world.tick()
        self._receive()
        self._is_torn = False
        self.num_syncs += 1

    def _refuse_torn(self, what: str) -> None:
        if self._is_torn:
            raise StateError(
                f"`{what}` must come after syncs that succeeded, but one has failed, and some "
                "tables may lack this worker's change. Start the run again, and restore a snapshot."
            )

    def _find_tensors(self) -> None:
        """Share what the module holds by now under the names of what was shared."""
        found = [tensors for tensors in _sort_tensors(self.module, self._constants) if tensors]
        if list(map(_layout, found)) != [_layout(each.tensors) for each in self._exchanges]:
            raise StateError(
                "`module` must keep the names, shapes and dtypes that it had when it was shared, "
                "but they have changed. Make another `SharedModule` of it."
            )
        for exchange, tensors in zip(self._exchanges, found, strict=True):
            exchange.tensors = tensors

    def _receive(self) -> None:
        # All rounds end before one is waited for: a worker that joins between the rounds of two
        # tables would else be waited for in one, while it waits in the other.
        with torch.inference_mode(False):  # answers are kept, and written to later
            for exchange in self._exchanges:
                exchange.end_round()
            for exchange in self._exchanges:
                alone = self.outer is None and self._world.num_workers == 1
                exchange.receive(alone=alone)

    # --- checkpoints ------------------------------------------------------------------------------

    def snapshot(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write the shared values and the outer step's state into ``directory``.

        One worker is enough, and the others continue. Of a synchronous module, and between two
        barriers, all of it is of one moment; else each of its tables is. Counters and the workers'
        optimizers are not in it.

        Raises:
            CheckpointError: The directory cannot be written to. An older snapshot is intact.
        """
        return [exchange.table.snapshot(directory) for exchange in self._exchanges]

    def restore(self, directory: str | os.PathLike[str]) -> None:
        """Go back to a snapshot: shared values, the outer step's state, and every worker's copy.

        What a worker has trained since its last sync is dropped. Give ``name`` when the module is
        shared, so that the tables find theirs, and the same ``outer``.

        Raises:
            CheckpointError: It is missing, damaged or of another module. Nothing is changed.
            PeerTimeout: A worker did not come.
            StateError: A sync has failed, or the module has other parameters or statistics than it
                had.

        Collective: All workers. Blocks: Until all have come.
        """
        self._refuse_torn("restore")
        self._find_tensors()
        for exchange in self._exchanges:  # everybody looks, so that all go on or none
            load_parts(exchange.table._spec, Path(directory))
        self._world.barrier()
        if self._world.is_master:
            for exchange in self._exchanges:
                exchange.table.restore(directory)
        self._world.barrier()
        self._receive()


def _layout(tensors: Tensors) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def _sort_tensors(module: nn.Module, without: Sequence[str] = ()) -> tuple[Tensors, Tensors]:
    """Return parameters and floating-point buffers by name, each tensor once."""
    parameters: Tensors = dict(module.named_parameters())
    if not parameters:
        raise ConfigError(f"`module` must have parameters, but {type(module).__name__} has none.")
    known = {id(tensor) for tensor in parameters.values()}
    buffers = [item for item in module.named_buffers() if id(item[1]) not in known]
    floating = [item for item in buffers if item[1].is_floating_point()]
    statistics = {name: tensor for name, tensor in floating if name not in without}
    for name, tensor in (*parameters.items(), *statistics.items()):
        is_plain = tensor.layout is torch.strided and tensor.is_floating_point()
        if is_lazy(tensor) or tensor.is_meta or not is_plain:
            raise ConfigError(
                f"`{name}` must be a dense tensor of floating point with memory, but is "
                f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout}, on {tensor.device}."
            )
    return parameters, statistics


def _gather(tensors: Tensors, flat: Tensor) -> Tensor:
    """Copy tensors into ``flat``, and return it."""
    for part, tensor in _pairs(tensors, flat):
        part.copy_(tensor)
    return flat


def _scatter(flat: Tensor, tensors: Tensors) -> None:
    """Copy ``flat`` into the tensors, and round it to what they can hold."""
    for part, tensor in _pairs(tensors, flat):
        tensor.copy_(part)
        if tensor.dtype != part.dtype:
            part.copy_(tensor)


def _pairs(tensors: Tensors, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return each tensor with its part of ``flat``, in the same shape."""
    owns = [tensor.detach() for tensor in tensors.values()]
    pieces = flat.split([own.numel() for own in owns])
    return [(piece.view(own.shape), own) for piece, own in zip(pieces, owns, strict=True)]


class ParameterExchange:
    """Parameters, of which a table takes the differences.

    ``note``, ``give``, ``end_round`` and ``receive``, in this order, make one exchange.

    Args:
        tensors: By name; read and changed in place.
        table: An array of as many elements.

    ``_base`` is what the last exchange put into the module, ``_held`` what the module held when it
    was noted, ``_spare`` the difference, then the answer.
    """

    def __init__(self, tensors: Tensors, table: Table) -> None:
        self.tensors = tensors
        self.table = table
        with torch.inference_mode(False):  # else they could not be written to outside of it
            self._base = torch.zeros(table.shape, dtype=table.dtype, device="cpu")
            self._held = torch.empty_like(self._base)
            self._spare = torch.empty_like(self._base)

    def note(self) -> None:
        """Look at what the tensors hold.

        Raises:
            ConfigError: A tensor has become NaN or infinite. Nothing is changed.
        """
        held, base = _gather(self.tensors, self._held), self._base
        difference = torch.sub(held, base, out=self._spare)
        if bool(difference.sum().isfinite()):
            return
        for (part, _), name in zip(_pairs(self.tensors, difference), self.tensors, strict=True):
            if not bool(part.isfinite().all()):
                raise ConfigError(
                    f"`{name}` must be finite to be shared, but holds NaN or infinity."
                )

    def give(self, factor: float) -> None:
        """Give the table what was noted, times ``factor``."""
        self.table.add(self._spare if factor == 1 else self._spare * factor)
        self._base.add_(self._spare)  # what the table holds now, if nobody else adds

    def end_round(self) -> None:
        """Say that all was given, where the table is bulk-synchronous."""
        table, self._round = self.table, None
        if table._is_bulk:
            self._round = table._storage.arrive(table._group.timeout_s)

    def receive(self, *, alone: bool) -> None:
        """Wait for the answer, and put it into the tensors.

        Args:
            alone: Whether no other worker is there. Then the tensors stay as they are if the table
                holds what was given; put back, they might differ from it in the last bit.
        """
        got = self._spare
        self.table._read(self.table._storage, None, got.view(-1, 1), self._round)
        if not (alone and torch.equal(got, self._base)):
            _scatter(got, self.tensors)
        self._base, self._spare = got, self._base


class StatisticsExchange(ParameterExchange):
    """Running statistics: the table takes the values, and a weight for each (see ``Blend``)."""

    def give(self, factor: float) -> None:
        """Give the table what was noted, with the weight ``factor``."""
        wide = torch.stack((self._held, torch.full_like(self._held, factor)), 1)
        self.table._take(Entry(None, wide, self.table._group.worker_id))
