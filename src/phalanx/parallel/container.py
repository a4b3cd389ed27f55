"""The part that all containers share: worker threads, and one model whatever their number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from torch import nn

from phalanx.execution import ThreadExecutor
from phalanx.parallel.graph import Passes, RunPart, run_pieces
from phalanx.replicas import (
    OwnInShell,
    Statistics,
    advance_process_generator,
    check_statistics,
    hold_caller_at_one_thread,
    write_statistics,
)
from phalanx.types import Nested

T = TypeVar("T")


class Call:
    """The arguments of one call as one nested value: ``f(x, mask=m)`` is ``{"0": x, "mask": m}``.

    Args:
        args: Positions, called by their number.
        kwargs: Keywords, by name.
    """

    # Any, here and below: the user's own arguments.
    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.num_args = len(args)
        self.leaves: Nested = {**{str(place): arg for place, arg in enumerate(args)}, **kwargs}

    @staticmethod
    def with_inputs(inputs: Nested) -> Call:
        """Read a tuple as positions, a dict as keywords, anything else as the one argument."""
        if isinstance(inputs, Mapping):
            return Call((), inputs)
        return Call(inputs if type(inputs) is tuple else (inputs,), {})

    def run(self, module: nn.Module, leaves: Mapping[str, Any]) -> Nested:
        """Call ``module`` with ``leaves`` instead of this call's own."""
        items = list(leaves.items())
        args = [value for _, value in items[: self.num_args]]
        return module(*args, **dict(items[self.num_args :]))


class _Running(OwnInShell):
    """The threads of a container in this process, and the tensors in their memory.

    They are neither copied nor saved with the container, which is why one object holds them.
    """

    def __init__(self) -> None:
        self.executor: ThreadExecutor | None = None
        self.lock = threading.RLock()  # two threads may call one container
        self.restore_caller: Callable[[], object] | None = None

    def __reduce__(self) -> tuple[type[_Running], tuple[()]]:
        return _Running, ()

    def renewed(self) -> _Running:
        """Return that of a replica of the container in another container."""
        return _Running()


class Container(nn.Module):
    """A module that runs others on worker threads; it trains their own parameters."""

    _one_thread = False  # whether the caller's operators run on one thread in any case

    def __init__(self) -> None:
        super().__init__()
        self._running = _Running()

    # -- each kind of container has its own --------------------------

    def _make_executor(self) -> ThreadExecutor:
        """Make the workers."""
        raise NotImplementedError

    def _fits(self, executor: ThreadExecutor) -> bool:
        """Tell whether ``executor`` runs the modules that this container holds now."""
        return executor.modules[0] is self._trained()

    def _owners(self, num_pieces: int) -> Sequence[int] | None:
        """Return the worker of each piece; None: any that is free."""
        return range(num_pieces)

    def _passes(self, sizes: Sequence[int]) -> Passes:  # noqa: ARG002 - of a subclass
        """Return a forward pass over parts of these sizes, and its backward passes."""
        return Passes()

    def _trained(self) -> nn.Module:
        """Return the module whose names parameters and buffers go by."""
        return self

    # -- workers -----------------------------------------------------

    def close(self) -> None:
        """Dismiss the workers' threads; the next forward pass makes new ones."""
        if self._running.executor is not None:
            self._running.executor.close()
            self._running.executor = None
        if self._running.restore_caller is not None:
            self._running.restore_caller()
            self._running.restore_caller = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def sync_parameters(self) -> None:
        """Make all workers equal to the module now.

        Whatever changes parameters, and in-place operations on buffers, are noticed without it. It
        is needed only after a write through ``.data``, or into the memory, of a buffer.
        """
        if self._running.executor is not None:
            self._open_executor().refresh()

    def _open_executor(self) -> ThreadExecutor:
        with self._running.lock:
            before = self._running.executor
            if before is not None and not (self._fits(before) and before.follow_attributes()):
                self.close()
            if self._running.executor is None:
                self._running.executor = self._make_executor()
                self._quiet_caller(self._running.executor)
            return self._running.executor

    def _quiet_caller(self, executor: ThreadExecutor) -> None:
        """Let the caller's operators run on one thread while workers share its CPU.

        The pool behind them (loss, optimizer) would spin next to the workers after each
        of them: at best 1.2 times the step of an MLP, 1.45 times that of a CNN. Where bits are
        promised, their number must not depend on that of the workers.
        """
        if self._one_thread or sum(device.type == "cpu" for device in executor.devices) > 1:
            self._running.restore_caller = hold_caller_at_one_thread(self)

    # -- a forward pass ----------------------------------------------

    def _run(
        self,
        parts: Sequence[Nested | None],
        sizes: Sequence[int],
        run: RunPart,
        merge: Callable[[list[Nested]], T],
    ) -> T:
        """Run every part on its worker, and merge the outputs of those that there are.

        Nothing that the caller can see has changed before everything has succeeded.

        Args:
            parts: The pieces of the inputs; None for those that take no part.
            sizes: How many rows each stands for, where what it leaves in buffers is merged.
            run: Called as ``run(piece, module, inputs)`` in a worker's thread.
            merge: Called with the outputs, in order, in the caller's thread.
        """
        executor = self._open_executor()
        with executor.one_run:  # of several threads, each begins with what the one before wrote
            owners = self._owners(len(parts))
            passes = self._passes(sizes)
            # A part without rows runs, too, so its statistics must weigh something.
            pairs = zip(parts, sizes, strict=True)
            weights = [0.0 if part is None else float(max(1, size)) for part, size in pairs]
            outputs, report = run_pieces(executor, parts, run, weights, owners, passes)
            statistics = passes.statistics(report)
            merged = merge(outputs)
            self._write_buffers(statistics)
            if report.drew:
                advance_process_generator()
        return merged

    def _write_buffers(self, statistics: Statistics) -> None:
        """Write into the buffers what a forward pass left in their copies."""
        if statistics:
            buffers = dict(self._trained().named_buffers(remove_duplicate=False))
            check_statistics(buffers, statistics)
            write_statistics(buffers, statistics)
