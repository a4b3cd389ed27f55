"""The part that all containers share: worker threads, and one model whatever their number."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.execution import ThreadExecutor
from phalanx.memory import FlatParameters
from phalanx.parallel.graph import Graph, RunPart, refuse_transforms
from phalanx.plan import Balancer, check_argument, check_function, read_intra_op
from phalanx.replicas import (
    OwnInShell,
    advance_process_generator,
    check_statistics,
    hold_caller_at_one_thread,
    sum_statistics,
    write_statistics,
)
from phalanx.types import Nested

__all__ = ["Call", "Container", "redraw"]

T = TypeVar("T")
# torch's MultiheadAttention and Transformer have the second name only.
_REDRAW_NAMES = ("reset_parameters", "_reset_parameters")


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

    def inputs(self) -> Nested:
        """Return the value that :meth:`with_inputs` reads as this call.

        Raises:
            ConfigError: There are positions and keywords.
        """
        args, kwargs = self._split(self.leaves)
        if args and kwargs:
            raise ConfigError(
                "A call whose batch is split by `Layout(split=...)` must have positions or "
                f"keywords, but has {len(args)} of the former and {', '.join(kwargs)}. Give all "
                "by name."
            )
        return kwargs if kwargs else args[0] if len(args) == 1 else tuple(args)

    def like(self, inputs: Nested) -> Call:
        """Read ``inputs`` as :meth:`with_inputs`, for a call of the same form.

        Raises:
            ConfigError: It has another number of positions.
        """
        found = Call.with_inputs(inputs)
        if found.num_args != self.num_args:
            raise ConfigError(
                "`collate` must return what `split` was given (one argument, a tuple of "
                f"{self.num_args}, or a dict of keywords), but makes {found.num_args} positions."
            )
        return found

    def run(self, module: nn.Module, leaves: Mapping[str, Any]) -> Nested:
        """Call ``module`` with ``leaves`` in the place of this call's own."""
        args, kwargs = self._split(leaves)
        return module(*args, **kwargs)

    def _split(self, leaves: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        values = list(leaves.values())
        return values[: self.num_args], dict(list(leaves.items())[self.num_args :])


class _Running(OwnInShell):
    """The threads of a container in this process, and the tensors in their memory.

    They are neither copied nor saved with the container, which is why one object holds them.
    """

    def __init__(self) -> None:
        self.executor: ThreadExecutor | None = None
        self.lock = threading.RLock()  # two threads may call one container
        self.restore_caller: Callable[[], object] | None = None
        self.flat: FlatParameters | None = None
        self.balancer: Balancer | None = None
        self.told_apart: set[str] = set()  # outputs that were seen to have the batch's rows

    def __reduce__(self) -> tuple[type[_Running], tuple[()]]:
        return _Running, ()

    def renewed(self) -> _Running:
        """Return that of a replica of the container in another container."""
        return _Running()


class _Initialisers(list[Callable[[], object]]):
    """Functions for workers' threads: copies of a container have them, saved ones do not."""

    def __deepcopy__(self, memo: dict[int, object]) -> _Initialisers:
        return _Initialisers(self)

    def __reduce__(self) -> tuple[type[_Initialisers], tuple[()]]:
        return _Initialisers, ()


class Container(nn.Module):
    """A module that runs others on worker threads; it trains their own parameters."""

    _one_thread = False  # whether the caller's operators run on one thread in any case

    def __init__(self, intra_op: int | None) -> None:
        super().__init__()
        self._intra_op = read_intra_op(intra_op)
        self._initialisers = _Initialisers()
        self._running = _Running()

    # -- each kind of container has its own --------------------------

    def _make_executor(self) -> ThreadExecutor:
        """Make the workers."""
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

    # -- threads -----------------------------------------------------

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
        Functions are not saved with the container: call it again after loading.

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

    def _open_executor(self) -> ThreadExecutor:
        with self._running.lock:
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

    # -- a forward pass ----------------------------------------------

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
            observe: Called once with the seconds that each piece took, forward and backward: in
                the first backward pass through all of them, or here if there can be none.
        """
        refuse_transforms()
        executor = self._open_executor()
        with executor.in_order():  # of several threads, each begins with what the one before wrote
            owners = self._owners(len(parts))
            graph = Graph(executor, parts, run, owners=owners)
            report = graph.forward(weights)
            statistics = sum_statistics(operand.statistics for operand in report.operands)
            named = self._trained().named_buffers(remove_duplicate=False) if statistics else ()
            buffers = dict(named)
            check_statistics(buffers, statistics)
            merged = merge(graph.outputs(report))
            if report.drew:
                advance_process_generator()
            write_statistics(buffers, statistics)
        if observe is not None:
            graph.report_seconds(report.seconds, observe)
        return merged

    # -- the model as a whole ----------------------------------------

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
            self._running.flat = FlatParameters(parameters)
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
        """Let every module inside draw its parameters again, once; replicas stay equal.

        Raises:
            ConfigError: A module with parameters does not say how; nothing has changed then.
        """
        inside = dict.fromkeys(_children_first(self))
        drawn = [  # by containers of the user's, which call this one from a method of their own
            parameter
            for each in inside
            if isinstance(each, Container)
            and type(each).reset_parameters is not Container.reset_parameters
            for parameter in each.parameters(recurse=False)
        ]
        redraw(self, [each for each in inside if not isinstance(each, Container)], drawn)
        return self

    # Any: what nn.Module's own state holds.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_running": _Running()}


def redraw(
    root: nn.Module, modules: Sequence[nn.Module], drawn: Iterable[nn.Parameter] = ()
) -> None:
    """Let each of ``modules`` draw its parameters again, by its ``reset_parameters()``.

    Args:
        root: The module that holds them.
        drawn: Parameters that are drawn in another way.

    Raises:
        ConfigError: Nothing draws a parameter of ``root``; nothing has changed then.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> redraw(net, list(net))
    """
    functions: list[Callable[[], object]] = []
    reached = set(map(id, drawn))
    for module in modules:
        found = (getattr(module, name, None) for name in _REDRAW_NAMES)
        function = next((each for each in found if callable(each)), None)
        if function is not None:
            functions.append(function)
            reached.update(map(id, module.parameters()))
    names = [name for name, each in root.named_parameters() if id(each) not in reached]
    if names:
        told = ", ".join(f"`{name}`" for name in names[:5]) + (", …" if len(names) > 5 else "")
        raise ConfigError(
            f"Every parameter must belong to a module with `reset_parameters()` to be drawn again, "
            f"but {told} {'does' if len(names) == 1 else 'do'} not. Write that method in its "
            "module, or in one around it."
        )
    for function in functions:
        function()


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
