"""Statistics of what flows through a model, taken inside of every replica.

    tic ──── forward, backward, update ──── toc
     │        │  hooks note outputs          │
     │        │  and inputs, in the          └─ parameters, gradients and buffers are read;
     │        │  replicas' threads              everything is put in order
     └─ active in every `interval`-th batch

Hooks are registered on the user's own module; replicas share its dictionaries of hooks, so that
they run there as well. A hook knows its replica by the name of its thread, and its microbatch by
the time: a trainer's spans say who had which when. A step that the trainer refuses has no spans;
then an error raised by a hook has the executor's note, which says the microbatch.
"""

from __future__ import annotations

import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx.clock import now_s
from phalanx.errors import ConfigError
from phalanx.execution import Span
from phalanx.executor_group.group_arguments import read_names
from phalanx.executor_group.records import (
    Board,
    NonFinite,
    Record,
    draw_table,
    find_board,
    write_board,
    write_lines,
)
from phalanx.parallel import DataParallel
from phalanx.plan import check_function, flatten, leaf_paths, read_count
from phalanx.replicas import current_replica
from phalanx.types import Nested

if TYPE_CHECKING:  # it takes long to import
    from rich.console import Console
    from rich.table import Table

__all__ = ["Monitor", "check_monitor", "norm"]

Statistic = Callable[[Tensor], Tensor | float]

_KINDS = ("outputs", "inputs", "parameters", "gradients", "buffers")
_REACTIONS = ("record", "warn", "raise")


def norm(values: Tensor) -> Tensor:
    """Return the 2-norm of all elements, in float32 or better."""
    wide = values.dtype in (torch.float64, torch.complex128)
    result: Tensor = torch.linalg.vector_norm(values if wide else _widened(values))
    return result


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.complex64 if values.is_complex() else torch.float32)


@runtime_checkable
class _Step(Protocol):
    """What a trainer tells after a step, as far as a monitor wants to know it."""

    step: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """One tensor, measured; its numbers are read later, so that no device is waited for.

    Parameters, gradients and buffers belong to no forward pass.
    """

    module: str
    name: str
    device: str
    value: Tensor | float
    finite: Tensor
    forward: int | None = None
    replica: int | None = None
    thread: int = 0
    order: int = 0
    time_s: float = 0.0
    microbatch: int | None = None

    @property
    def turn(self) -> int | None:
        """The microbatch, or the forward pass where that is not known."""
        return self.forward if self.microbatch is None else self.microbatch

    def when(self) -> tuple[bool, int, int, int, int]:
        """Return what orders records: turn by turn, then replica by replica."""
        replica = -1 if self.replica is None else self.replica
        return self.forward is None, self.turn or 0, replica, self.thread, self.order

    def where(self) -> tuple[bool, int, tuple[bool, int, int, int, int]]:
        """Return what orders places in the model, whoever came there first."""
        return self.forward is None, self.order, self.when()


@dataclass
class _Walk:
    """Where one thread is: in which forward pass, and how many tensors it has seen in it."""

    forward: int = 0
    order: int = 0
    begun: bool = False
    training: bool = True

    def begin(self, training: bool) -> None:
        self.forward += self.begun
        self.order, self.begun, self.training = 0, True, training


class Monitor:
    """Note a statistic of outputs, inputs, parameters, gradients or buffers, by device and name.

    Nothing is computed but between :meth:`tic` and :meth:`toc` of every ``interval``-th batch, and
    nothing is hooked but between :meth:`install` and :meth:`remove`. What the model computes stays
    the same to the bit (but in eval mode without gradients torch's transformer layers leave their
    fast path, which rounds otherwise, where any module inside has a hook).

    Args:
        interval: Batches from one that is watched to the next.
        statistic: tensor -> number, for floating tensors (others are converted to float32); called
            in replicas' threads. Tensors without elements are left out.
        pattern: Regular expression for names, matched from their start.
        sort: By name; default: microbatch by microbatch, in the order of the forward.
        which: One or several of "outputs", "inputs", "parameters", "gradients", "buffers".
            Gradients are those that lie in ``grad`` at :meth:`toc`: the whole batch's.
        on_non_finite: "record": the first place of each step goes to :attr:`non_finite`; "warn":
            and is told as a warning at :meth:`toc`; "raise": it is an error, in the forward pass
            at once (each hook waits for its device then), for others at :meth:`toc`.
        lines: Gets every record as a line of JSON.
        board: Gets every record as a scalar: a `SummaryWriter`, or a folder to open one on, which
            needs the extra `board`.

    Raises:
        ConfigError: An argument cannot work.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> monitor = Monitor(pattern="0", which=("outputs", "gradients"))
        >>> monitor.install(net)
        >>> monitor.tic()
        >>> net(torch.ones(3, 2)).sum().backward()
        >>> [(record.step, record.device, record.name) for record in monitor.toc()]
        [(1, 'cpu', '0.output'), (1, 'cpu', '0.weight.grad'), (1, 'cpu', '0.bias.grad')]
        >>> monitor.remove()

    A trainer calls it after every step, if it is one of its callbacks:

        >>> from phalanx import Trainer
        >>> monitor.install(net)
        >>> monitor.tic()
        >>> def sgd(params):
        ...     return torch.optim.SGD(params, lr=0.1)
        >>> data = [(torch.ones(4, 2), torch.ones(4, 2))]
        >>> with Trainer(net, nn.MSELoss(), sgd, replicas=2, callbacks=[monitor]) as trainer:
        ...     epochs = trainer.fit(data)
        >>> [record.device for record in monitor.records if record.name == "0.output"]
        ['cpu#0', 'cpu#1']

    Source: MXNet's ``Monitor``, whose names did not say the device.
    """

    def __init__(
        self,
        interval: int = 1,
        statistic: Statistic = norm,
        pattern: str = ".*",
        sort: bool = False,
        which: str | Sequence[str] = "outputs",
        *,
        on_non_finite: str = "record",
        lines: TextIO | None = None,
        board: Board | str | Path | None = None,
    ) -> None:
        self._interval = read_count("interval", interval, 1, "batch")
        check_function("statistic", statistic)
        self._which = tuple(read_names("which", which))
        if not self._which or not set(self._which) <= set(_KINDS):
            raise ConfigError(f"`which` must hold some of {_KINDS}, but is {which!r}.")
        if on_non_finite not in _REACTIONS:
            raise ConfigError(
                f"`on_non_finite` must be one of {_REACTIONS}, but is {on_non_finite!r}."
            )
        try:
            self._pattern = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"`pattern` must be a regular expression, but is {pattern!r}: {error}."
            ) from error
        self._statistic = statistic
        self._sort = sort
        self._on_non_finite = on_non_finite
        self._lines = lines
        self._board: Board | None = None
        self._open_board: Callable[[], Board] | None = None
        if isinstance(board, (str, Path)):
            self._open_board = functools.partial(find_board(), str(board))
        else:
            self._board = board
        self._installed: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self._lock = threading.Lock()
        self._step = 0
        self._active = False
        self._follows_trainer = False
        self._seen: list[_Seen] = []
        self._walks: dict[int, _Walk] = {}
        self._records: list[Record] = []
        self._non_finite: list[NonFinite] = []

    def __repr__(self) -> str:
        return (
            f"Monitor({', '.join(self._which)} of {len(self._installed)} modules, "
            f"interval={self._interval}, step {self._step})"
        )

    @property
    def records(self) -> list[Record]:
        """What the last :meth:`toc` returned."""
        return list(self._records)

    @property
    def non_finite(self) -> list[NonFinite]:
        """The first place of each step that was not finite, in the order of steps."""
        return list(self._non_finite)

    # Any: a module, or what has one.
    def install(self, target: Any) -> None:
        """Watch a module: by itself, or the one in a `DataParallel`, an executor group, a trainer.

        Several may be installed; their names are told side by side.

        Raises:
            ConfigError: ``target`` neither is nor has a module, or is watched already.
        """
        module = _module_of(target)
        if any(module is each for each in self._installed):
            raise ConfigError(
                f"`target` must be installed once, but its `{type(module).__name__}` is watched "
                "already. Call `remove()` first."
            )
        self._installed.append(module)
        if "inputs" in self._which or "outputs" in self._which:
            self._handles += _hook(module, self._which, self._begin, self._note)

    def remove(self) -> None:
        """Take all hooks away and forget what is not told yet; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._installed = [], []
        with self._lock:
            self._active = False
            self._forget()
        if self._open_board is not None and self._board is not None:
            self._board.close()
            self._board = None

    def tic(self) -> None:
        """Begin a batch: the first, and every `interval`-th after it, is watched."""
        with self._lock:
            self._active = self._step % self._interval == 0
            self._step += 1
            self._forget()

    def toc(self) -> list[Record]:
        """End a batch, and return what was seen; nothing when it was not watched.

        Raises:
            ConfigError: Something was not finite, and that is to be an error; or the statistic is
                no number.
        """
        return self._finish(self._step, None)

    def toc_print(self, console: Console | None = None) -> Table:
        """End a batch, and return what was seen as a table, printed to ``console`` if given."""
        table = draw_table(self.toc())
        if console is not None:
            console.print(table)
        return table

    def __call__(self, event: object) -> None:
        """Be told by a trainer: end each step and begin the next.

        What runs between steps, such as a validation, is not recorded.
        """
        if isinstance(event, _Step):
            self._finish(event.step, event.spans)
            self._step, self._follows_trainer = event.step, True
            self.tic()

    # -- in the forward pass -----------------------------------------

    def _begin(self, training: bool) -> None:
        if self._active:
            with self._lock:
                self._walk().begin(training)

    def _note(self, module: str, kind: str, value: Nested) -> None:
        """Measure the tensors of ``value``; in any thread."""
        if not self._active or not self._wants_this_pass():
            return
        time_s = now_s()
        measured = list(self._measured(module, kind, value))
        seen: list[_Seen] = []
        with self._lock:
            walk = self._walk()
            for each in measured:
                walk.order += 1
                seen.append(
                    replace(
                        each,
                        forward=walk.forward,
                        order=walk.order,
                        replica=current_replica(),
                        thread=threading.get_ident(),
                        time_s=time_s,
                    )
                )
            if self._active:
                self._seen += seen
        if self._on_non_finite == "raise":
            for each in seen:
                if not each.finite:
                    raise ConfigError(str(_non_finite(each, self._step)))

    def _wants_this_pass(self) -> bool:
        """Leave out what a trainer only evaluates."""
        with self._lock:
            return self._walk().training or not self._follows_trainer

    def _walk(self) -> _Walk:
        return self._walks.setdefault(threading.get_ident(), _Walk())

    def _forget(self) -> None:
        self._seen, self._walks = [], {}

    def _measured(self, module: str, kind: str, value: Nested) -> Iterator[_Seen]:
        leaves, _ = flatten(value)
        for path, leaf in zip(leaf_paths(value), leaves, strict=True):
            name = ".".join(filter(None, (module, kind, path)))
            if isinstance(leaf, Tensor) and leaf.numel() and self._pattern.match(name):
                yield self._measure(module, name, leaf)

    def _measure(self, module: str, name: str, tensor: Tensor) -> _Seen:
        with torch.no_grad():
            values = tensor.detach()
            if values.is_sparse:
                values = values.coalesce().values()
            if not (values.is_floating_point() or values.is_complex()):
                values = values.float()
            value, finite = self._statistic(values), torch.isfinite(values).all()
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ConfigError(
                "`statistic` must return one number, but returned a tensor of shape "
                f"{tuple(value.shape)} for `{name}`."
            )
        return _Seen(
            module=module, name=name, device=str(tensor.device), value=value, finite=finite
        )

    # -- after it ----------------------------------------------------

    def _finish(self, step: int, spans: Sequence[Span] | None) -> list[Record]:
        with self._lock:
            active, self._active = self._active, False
            seen = self._seen
            self._forget()
        if not active:
            return []
        if spans is not None:
            seen = [each for each in (_placed(each, spans) for each in seen) if each is not None]
        seen += self._standing()
        seen.sort(key=lambda each: (each.name if self._sort else "", each.when()))
        told = _several_turns(seen)
        self._records = [
            Record(step, _device(each, told), each.name, float(each.value)) for each in seen
        ]
        strange = [each for each in seen if not each.finite]
        first = _non_finite(min(strange, key=_Seen.where), step) if strange else None
        self._tell(first)
        return self.records

    def _standing(self) -> list[_Seen]:
        """Measure what is there without a forward pass, by the modules' own names."""
        seen: list[_Seen] = []
        for module in self._installed:
            for name, tensor in _standing_of(module, self._which):
                if tensor.numel() and self._pattern.match(name):
                    owner = name.removesuffix(".grad").rpartition(".")[0]
                    seen.append(replace(self._measure(owner, name, tensor), order=len(seen)))
        return seen

    def _tell(self, first: NonFinite | None) -> None:
        if self._lines is not None:
            write_lines(self._records, self._lines)
        if self._open_board is not None and self._board is None:
            self._board = self._open_board()
        if self._board is not None:
            write_board(self._records, self._board)
        if first is None:
            return
        self._non_finite.append(first)
        if self._on_non_finite == "raise":
            raise ConfigError(str(first))
        if self._on_non_finite == "warn":
            warnings.warn(str(first), stacklevel=4)


# Any: a module, or what has one.
def check_monitor(given: object) -> None:
    """Refuse what is no monitor.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(given, Monitor):
        raise ConfigError(f"`monitor` must be a `Monitor`, but is {given!r:.80}. Give Monitor().")


def _module_of(target: Any) -> nn.Module:
    module = target
    if isinstance(target, DataParallel) or not isinstance(target, nn.Module):
        module = getattr(target, "module", None)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            "`target` must be an `nn.Module`, or have one as its `module`, but is "
            f"{type(target).__name__!r}."
        )
    return module


def _hook(
    root: nn.Module,
    which: Sequence[str],
    begin: Callable[[bool], None],
    note: Callable[[str, str, Nested], None],
) -> list[RemovableHandle]:
    """Register plain functions: copies of a module share them, where a method would be copied."""
    handles = [root.register_forward_pre_hook(lambda module, _: begin(module.training))]
    for name, child in root.named_modules():
        if "inputs" in which:
            handles.append(child.register_forward_pre_hook(_before(name, note), with_kwargs=True))
        if "outputs" in which:
            handles.append(child.register_forward_hook(_after(name, note)))
    return handles


# Any: whatever the module takes and returns.
def _before(name: str, note: Callable[[str, str, Nested], None]) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note(name, "input", _inputs(args, kwargs))

    return hook


def _after(name: str, note: Callable[[str, str, Nested], None]) -> Callable[..., None]:
    def hook(_: nn.Module, __: tuple[Any, ...], output: Nested) -> None:
        note(name, "output", output)

    return hook


# Any: whatever the module takes.
def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nested:
    """Return the inputs under the names that they are told by: none for one alone."""
    if len(args) == 1 and not kwargs:
        return args[0]
    return {**{str(place): each for place, each in enumerate(args)}, **kwargs}


def _standing_of(module: nn.Module, which: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    if "parameters" in which:
        yield from module.named_parameters()
    if "gradients" in which:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                yield f"{name}.grad", parameter.grad
    if "buffers" in which:
        yield from module.named_buffers()


def _placed(seen: _Seen, spans: Sequence[Span]) -> _Seen | None:
    """Find the microbatch in which something was seen; None for what is no part of the step."""
    for span in spans:
        if span.replica == seen.replica and span.start_s <= seen.time_s <= span.stop_s:
            return replace(seen, microbatch=span.microbatch)
    return None


def _several_turns(seen: Sequence[_Seen]) -> bool:
    """Tell whether one thread has run several microbatches or forward passes."""
    turns = {(each.thread, each.turn) for each in seen if each.forward is not None}
    return len(turns) > len({thread for thread, _ in turns})


def _device(seen: _Seen, told: bool) -> str:
    replica = "" if seen.replica is None else f"#{seen.replica}"
    turn = f"/{seen.turn}" if told and seen.forward is not None else ""
    return f"{seen.device}{replica}{turn}"


def _non_finite(seen: _Seen, step: int) -> NonFinite:
    return NonFinite(
        step=step,
        module=seen.module,
        name=seen.name,
        device=seen.device,
        replica=seen.replica,
        microbatch=seen.microbatch,
        forward=seen.forward,
    )
