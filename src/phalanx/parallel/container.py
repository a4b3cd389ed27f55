"""What all containers have in common: workers, and one model whatever their number."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.execution import RunResult, ThreadExecutor
from phalanx.memory import FlatParameters
from phalanx.parallel.balancing import Balancing
from phalanx.parallel.graph import Graph, refuse_transforms
from phalanx.parallel.redrawing import redraw_of, refuse_unreached
from phalanx.parallel.tasks import RunPart
from phalanx.plan import check_argument, check_function, read_intra_op
from phalanx.replicas import (
    Inputs,
    Statistic,
    advance_process_generator,
    check_statistics,
    hold_caller_at_one_thread,
    sum_statistics,
    write_statistics,
)
from phalanx.types import Nested

__all__ = ["Container"]

T = TypeVar("T")


class _Running:
    """What belongs to this object in this process: threads, and what lies in their memory.

    One object, so that nothing of it shows as a change of the container, of which there may be
    replicas in an outer one.
    """

    def __init__(self) -> None:
        self.executor: ThreadExecutor | None = None
        self.opening = threading.RLock()  # two threads may make the first call
        self.restore_caller: Callable[[], object] | None = None
        self.flat: FlatParameters | None = None
        self.balancing: Balancing | None = None
        self.told_apart: set[str] = set()  # outputs that were seen to have the batch's rows

    def __reduce__(self) -> tuple[type[_Running], tuple[()]]:
        return _Running, ()


class _Initialisers(list[Callable[[], object]]):
    """Functions for workers' threads; lambdas and functions in functions are not saved."""

    def __deepcopy__(self, memo: dict[int, object]) -> _Initialisers:
        return _Initialisers(self)

    def __reduce__(self) -> tuple[Any, ...]:  # Any: what `pickle` makes an object of
        kept = [init for init in self if _has_a_name(init)]
        if len(kept) < len(self):
            warnings.warn(
                f"{len(self) - len(kept)} of {len(self)} functions given to `threads()` have no "
                "name in their module and are not saved. Call `threads()` again after loading.",
                stacklevel=3,
            )
        return _Initialisers, (kept,)


class Container(nn.Module):
    """A module that runs others on worker threads; what it trains are their own parameters."""

    _inputs: Inputs | None = None
    _one_thread = False  # whether the caller's operators run on one thread in any case

    def __init__(self, intra_op: int | None) -> None:
        super().__init__()
        self._intra_op = read_intra_op(intra_op)
        self._initialisers = _Initialisers()
        self._running = _Running()

    def _make_executor(self) -> ThreadExecutor:
        """Make the workers; each kind of container has its own."""
        raise NotImplementedError

    def _is_of(self, executor: ThreadExecutor) -> bool:
        """Tell whether ``executor`` runs the modules that this container holds now."""
        return executor.sources[0] is self._trained()

    def _owners(self, num_pieces: int) -> Sequence[int] | None:
        """Return the worker of each piece; None: whoever is free."""
        return range(num_pieces)

    def _trained(self) -> nn.Module:
        """Return the module whose names parameters and buffers go by."""
        return self

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

    def threads(self, init: Callable[[], object]) -> Self:
        """Run ``init()`` once in every worker's thread, before the first forward pass in it.

        Called several times, all functions run, in order. Threads that exist already are replaced.

        Example:
            >>> import torch
            >>> from phalanx import DataParallel
            >>> model = DataParallel(nn.Linear(2, 1)).threads(lambda: torch.set_printoptions(4))
            >>> with model:
            ...     model(torch.ones(3, 2)).shape
            torch.Size([3, 1])

        Source: torch/cunn's ``DataParallelTable:threads``, where a second call before the first
        forward pass failed.
        """
        check_function("init", init, "be a function without arguments")
        self.close()
        self._initialisers.append(init)
        return self

    def sync_parameters(self) -> None:
        """Make all workers equal to the module now.

        Whatever changes parameters, and in-place operations on buffers, are noticed without it. It
        is needed only after a write through ``.data``, or into the memory, of a buffer.
        """
        if self._running.executor is not None:
            self._open_executor().refresh()

    def flat_parameters(self) -> tuple[Tensor, Tensor]:
        """Return all parameters as one tensor, and all their gradients as another.

        From now on every parameter, and its ``grad``, is a view of them: who writes there trains
        the module. Zero gradients by :meth:`zero_grad` or in the flat tensor. Calling it again
        returns the same tensors, unless something has moved a parameter.

        Shapes:
            Both [N], with N = the sum of the parameters' elements, frozen ones too, in order.

        Raises:
            UnsupportedError: There is no parameter, or they differ in dtype or device.

        Example:
            >>> from phalanx import DataParallel
            >>> net = nn.Linear(3, 2)
            >>> values, gradients = DataParallel(net).flat_parameters()
            >>> _ = values.fill_(1.0)
            >>> net.bias.tolist(), values.numel()
            ([1.0, 1.0], 8)

        Source: Torch7's ``getParameters()``.
        """
        parameters = list(self.parameters())
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        if len(kinds) != 1:
            told = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "none"
            raise UnsupportedError(
                "`flat_parameters()` needs parameters of one dtype on one device, but the module "
                f"has {told}."
            )
        if self._running.flat is None or not _holds(self._running.flat, parameters):
            gradients = [parameter.grad for parameter in parameters]
            self._running.flat = FlatParameters([parameters], tight=True)
            self._running.flat.keep_gradients(gradients)
        segment = self._running.flat.segments[0]
        return segment.values, segment.gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; flat ones become zero and stay."""
        super().zero_grad(set_to_none)
        if self._running.flat is not None and _holds(self._running.flat, list(self.parameters())):
            self._running.flat.keep_gradients([None] * len(self._running.flat.parameters))

    def clone(self) -> Self:
        """Return a deep copy: equal parameters, buffers and settings, and workers of its own."""
        return copy.deepcopy(self)

    def share(self, other: nn.Module, *names: str) -> Self:
        """Make parameters of this container the very parameters of ``other``, of the same names.

        Args:
            names: Last components of the names, such as ``"weight"``; all parameters by default.

        Raises:
            ConfigError: ``other`` has a parameter that this container has not, or in another shape.
                Nothing has changed then.

        Source: Torch7's ``share``, which the original containers refused (siamese nets need it).
        """
        check_argument(isinstance(other, nn.Module), "other", "be an `nn.Module`", other)
        theirs = {
            name: parameter
            for name, parameter in other.named_parameters(remove_duplicate=False)
            if not names or name.rpartition(".")[2] in names
        }
        own = dict(self.named_parameters(remove_duplicate=False))
        for wanted in names:
            if not any(name.rpartition(".")[2] == wanted for name in theirs):
                raise ConfigError(
                    f"`names` must be last components of the names of parameters, but {wanted!r} "
                    f"is none. `other` has {', '.join(dict(other.named_parameters()))}."
                )
        for name, parameter in theirs.items():
            if name not in own or own[name].shape != parameter.shape:
                shape = tuple(own[name].shape) if name in own else "none of that name"
                raise ConfigError(
                    f"`other` must have parameters of the same names and shapes, but has `{name}` "
                    f"of shape {tuple(parameter.shape)}, and this container {shape}."
                )
        for name, parameter in theirs.items():
            path, _, key = name.rpartition(".")
            # Not `register_parameter()`: recurrent layers keep a second list of their weights.
            setattr(self._trained().get_submodule(path), key, parameter)
        return self

    def reset_parameters(self) -> Self:
        """Let every module inside draw its parameters anew, once; replicas stay equal.

        Raises:
            ConfigError: A module with parameters does not say how; nothing has changed then.
        """
        modules = [
            each for each in dict.fromkeys(_children_first(self)) if not isinstance(each, Container)
        ]
        drawn = [  # by containers of the user's, which call this one from a method of their own
            parameter
            for each in self.modules()
            if isinstance(each, Container)
            and type(each).reset_parameters is not Container.reset_parameters
            for parameter in each.parameters(recurse=False)
        ]
        refuse_unreached(self, modules, drawn)
        for module in modules:
            redraw = redraw_of(module)
            if redraw is not None:
                redraw()
        return self

    # Any: what nn.Module's own state holds.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_running": _Running()}

    def _open_executor(self) -> ThreadExecutor:
        with self._running.opening:
            before = self._running.executor
            if before is not None and not (self._is_of(before) and before.matches_source()):
                self.close()
            if self._running.executor is None:
                executor = self._make_executor()
                try:
                    for init in self._initialisers:
                        executor.each(lambda _, init=init: init())  # type: ignore[misc]
                except BaseException:
                    executor.close()
                    raise
                self._running.executor = executor
                self._quiet_caller(executor)
            return self._running.executor

    def _quiet_caller(self, executor: ThreadExecutor) -> None:
        """Let the caller's operators run on one thread while workers share its CPU.

        The pool behind them (loss, optimizer) would go on spinning beside the workers after each
        of them: at best 1.2 times the step of an MLP, 1.45 times that of a CNN. Where bits are
        promised, their number must not depend on that of the workers.
        """
        if self._one_thread or sum(device.type == "cpu" for device in executor.devices) > 1:
            self._running.restore_caller = hold_caller_at_one_thread(self)

    def _run(
        self,
        parts: Sequence[Nested | None],
        weights: Sequence[float],
        run: RunPart,
        merge: Callable[[list[Nested]], T],
        observe: Callable[[Sequence[float]], None] | None = None,
    ) -> T:
        """Run every part on its worker, and merge the outputs of those that there are.

        Nothing that the caller can see has changed before everything has succeeded.

        Args:
            parts: The pieces of the inputs; None for those that take no part, whose weight is 0.
            run: Called as ``run(piece, module, inputs)`` in a worker's thread.
            merge: Called with the outputs, in order, in the caller's thread.
            observe: Called once with the seconds that each worker took, forward and backward: in
                the first backward pass through all of them, or here if there can be none.
        """
        refuse_transforms()
        executor = self._open_executor()
        with executor.in_order():  # of several threads, each begins with what the one before wrote
            owners = self._owners(len(parts))
            graph = Graph(executor, parts, run, owners=owners, inputs=self._inputs)
            report = graph.forward(weights)
            statistics = self._merged_statistics(report)
            merged = merge(graph.outputs(report))
            if report.drew:
                advance_process_generator()
            if statistics:
                write_statistics(self._buffers_by_name(), statistics)
        if observe is not None:
            graph.report_seconds(report.seconds, observe)
        return merged

    def keep_inputs(self) -> None:
        """Let what the module writes to its inputs stay in the replicas from now on.

        By default it reaches the caller's tensors, as with the unwrapped module.
        """
        self._inputs = Inputs()

    def _merged_statistics(self, report: RunResult) -> dict[str, Statistic]:
        merged = sum_statistics(operand.statistics for operand in report.operands)
        if merged:
            check_statistics(self._buffers_by_name(), merged)
        return merged

    def _buffers_by_name(self) -> dict[str, Tensor]:
        return dict(self._trained().named_buffers(remove_duplicate=False))


def _has_a_name(function: Callable[[], object]) -> bool:
    """Tell whether ``function`` can be found again by its name, as `pickle` looks for it."""
    while isinstance(function, functools.partial):
        function = function.func
    return "<" not in getattr(function, "__qualname__", "")


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules inside, each after its children, over whom it has the last word."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _holds(flat: FlatParameters, parameters: Sequence[nn.Parameter]) -> bool:
    return (
        len(flat.parameters) == len(parameters)
        and all(a is b for a, b in zip(flat.parameters, parameters, strict=True))
        and flat.intact()
    )
