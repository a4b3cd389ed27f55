"""The optimizer's step on flat memory, every replica's thread its part.

An elementwise optimizer does to each element what that element's own history says. So it may be run
on any part of the flat buffers, and the parts together are the whole:

    flat values   | part 0 ...... | part 1 ...... |     a small torch optimizer each, of the same
    flat moments  | part 0 ...... | part 1 ...... |     class and options, stepped by one thread

The user's own optimizer stays the owner: options (learning rate, …) are read from it before each
step, and its state tensors are views of the flat moments, so its `state_dict()` is at all times
what plain torch would have. Parts end at whole blocks: bits do not depend on their number.
"""

from __future__ import annotations

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from phalanx.execution.elementwise import STEP, is_elementwise, state_is_uniform
from phalanx.memory import Allocate, FlatParameters, Part, Range, Segment, zeros

__all__ = [
    "FlatStepper",
    "Stepper",
    "WholeStepper",
    "norm_of_gradients",
    "open_stepper",
]

_FUSED_ON_CPU = (SGD, Adam, AdamW, Adagrad)
_EachThread = Callable[[Callable[[int, int], None]], object]


class Stepper(ABC):
    """What steps the user's optimizer: in parts, one for each replica, or as it is.

    Attributes:
        whole: Whether the optimizer is stepped as it is, on the module's own parameters.
    """

    whole: bool

    @abstractmethod
    def prepare(
        self, missing: Sequence[int], gradients: Sequence[Tensor | None] | None = None
    ) -> None:
        """Get ready in the caller's thread.

        Args:
            missing: Parameters that got no gradient.
            gradients: In memory order, for a step on the whole; default: the flat buffers'.
        """

    @abstractmethod
    def step_part(self, part: int) -> None:
        """Step one part, in that part's thread."""

    def finish(self) -> None:  # noqa: B027 - nothing to be done where it is whole; so below
        """Finish in the thread that is last."""

    def fits(self) -> bool:
        """Tell whether the optimizer still has the state and the groups that this was made for."""
        return True

    def is_untouched(self) -> bool:
        """Tell whether nobody has changed the optimizer so that it can be cut no longer."""
        return True

    def complete(self) -> None:  # noqa: B027
        """Bring all of the optimizer's state into this process."""

    def dissolve(self) -> None:  # noqa: B027
        """Leave the user's optimizer with state of its own for every parameter."""


def open_stepper(
    optimizer: Optimizer,
    flat: FlatParameters,
    sharing: Callable[[Optimizer, FlatParameters], FlatStepper],
) -> Stepper:
    """Return the stepper that shares the work, or else the one that leaves it whole."""
    if is_elementwise(optimizer) and state_is_uniform(optimizer, flat):
        return sharing(optimizer, flat)
    return WholeStepper(optimizer, flat)


class WholeStepper(Stepper):
    """Any torch optimizer as it is, on the module's own parameters.

    Gradients are those of the flat buffers, or the ones given where there is nothing to add: they
    may then stay where autograd made them.
    """

    whole = True

    def __init__(self, optimizer: Optimizer, flat: FlatParameters) -> None:
        self._optimizer = optimizer
        self._parameters = flat.parameters
        self._gradients = [flat.gradient(index) for index in range(len(flat.parameters))]

    def prepare(
        self, missing: Sequence[int], gradients: Sequence[Tensor | None] | None = None
    ) -> None:
        for index, (parameter, own) in enumerate(
            zip(self._parameters, self._gradients, strict=True)
        ):
            gradient = None if gradients is None else gradients[index]
            if index in missing:
                parameter.grad = None
            elif gradient is None:
                parameter.grad = own
            else:
                parameter.grad = gradient.as_strided(own.shape, own.stride())

    def step_part(self, part: int) -> None:
        if part == 0:
            self._optimizer.step()


class FlatStepper(Stepper):
    """An elementwise optimizer, cut into parts.

    Args:
        optimizer: The user's; its options and state stay the truth.
        flat: The parameters, grouped as the optimizer groups them.
        num_parts: Number of threads.
        own: Which parts are this process's, where others have the rest; default: all.
        allocate: Makes zeros for the state, beside the parameters.
    """

    whole = False

    def __init__(
        self,
        optimizer: Optimizer,
        flat: FlatParameters,
        num_parts: int,
        *,
        own: range | None = None,
        allocate: Allocate = zeros,
    ) -> None:
        self._own = range(num_parts) if own is None else own
        self._allocate = allocate
        self._optimizer = optimizer
        self._flat = flat
        self._pieces = [_PieceOptimizer(optimizer, part) for part in flat.parts(num_parts)]
        self._gradients = [flat.gradient(index) for index in range(len(flat.parameters))]
        # Of the user's groups, as the parts have them.
        self._known_options: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
        self._is_settled = False  # whether steps under these options make no more state
        self._bound: tuple[Any, ...] = ()
        # By segment: every member's own count of steps, which users see, and what it should be.
        self._counters: dict[int, Tensor] = {}
        self._counted: dict[int, Tensor] = {}
        # For state that a step is about to make, by segment, name and dtype.
        self._rooms: dict[tuple[int, str, torch.dtype], Tensor] = {}
        if optimizer.state:
            self._scatter_state()
        self._remember()

    def prepare(
        self,
        missing: Sequence[int],  # noqa: ARG002 - with some, the engine steps it as it is
        gradients: Sequence[Tensor | None] | None = None,  # noqa: ARG002
    ) -> None:
        options = [_options(group) for group in self._optimizer.param_groups]
        if not all(map(_are_identical, options, self._known_options)):
            for piece in self._pieces:
                piece.take_options(options)
            self._known_options = options
            self._is_settled = False
        for parameter, gradient in zip(self._flat.parameters, self._gradients, strict=True):
            if parameter.grad is not gradient:  # after the user's `zero_grad()`
                parameter.grad = gradient
        if not self._is_settled:
            self._reserve_state()

    def _reserve_state(self) -> None:
        """Take the memory for state that the coming step makes: after it nothing is refused."""
        pieces = [self._pieces[part] for part in self._own]
        if not any(piece.lacks_state() for piece in pieces):
            return
        for place, segment in enumerate(self._flat.segments):
            for piece in pieces:
                for key, dtype in piece.state_to_come(segment).items():
                    if (place, key, dtype) not in self._rooms:
                        room = self._allocate(segment.values.numel(), dtype, segment.values.device)
                        self._rooms[place, key, dtype] = room

    def _room(self, segment: Segment, key: str, dtype: torch.dtype) -> Tensor:
        """Return the memory that was taken for this state."""
        room = self._rooms.pop((self._flat.segments.index(segment), key, dtype), None)
        if room is None:
            room = self._allocate(segment.values.numel(), dtype, segment.values.device)
        return room

    def step_part(self, part: int) -> None:
        self._pieces[self._own[part]].step()

    def finish(self) -> None:
        """Make the state that a first step created visible in the user's optimizer."""
        if not self._is_settled and self._signature() != self._bound:
            self._gather_state()
            self._bound = self._signature()
            self._remember()
        self._is_settled = True
        self._count()

    def _signature(self) -> tuple[Any, ...]:
        return tuple(tuple(piece.signature()) for piece in self._pieces)

    def _count(self) -> None:
        """Tell the user's optimizer of one more step."""
        for place, counters in self._counters.items():
            owned = self._owned(self._flat.segments[place])
            if owned:
                counters.copy_(owned[0][1][STEP])
            else:  # the segment is another process's
                counters.add_(1)
            self._counted[place].copy_(counters)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for

    def fits(self) -> bool:
        state, groups, *_ = self._held
        return self._optimizer.state is state and self._optimizer.param_groups is groups

    def is_untouched(self) -> bool:
        """Tell whether nobody has replaced `step` or what the state holds, or added hooks.

        Moments that are written in place are the parts' own, and need no telling.
        """
        held = _held_by(self._optimizer)
        return (
            len(held) == len(self._held)
            and all(map(operator.is_, held, self._held))
            and _addresses(held) == self._addresses  # else `exp_avg.data = ...`
            and all(torch.equal(self._counters[at], each) for at, each in self._counted.items())
            and is_elementwise(self._optimizer)
        )

    def _remember(self) -> None:
        """Note what the user's optimizer holds now, to see later whether it was changed."""
        self._held = _held_by(self._optimizer)
        self._addresses = _addresses(self._held)

    def dissolve(self) -> None:
        """Leave the user's optimizer with state of its own for every parameter."""
        ours = {_memory_of(value) for value in self._held if isinstance(value, Tensor)}
        for entry in _filled(self._optimizer.state):
            for key, value in entry.items():
                if isinstance(value, Tensor) and _memory_of(value) in ours:
                    entry[key] = value.clone()

    def _scatter_state(self) -> None:
        """Cut the user's optimizer's state into the parts."""
        for segment in self._flat.segments:
            states = [self._optimizer.state[self._flat.parameters[i]] for i in segment.members]
            for key in states[0] if states else ():
                values = [state[key] for state in states]
                self._install(segment, key, self._whole(segment, key, values))
        self._bound = self._signature()

    def _gather_state(self) -> None:
        """Join the parts' state to one run of memory, of which the user's optimizer sees views."""
        for segment in self._flat.segments:
            parts = self._owned(segment)
            for key in list(parts[0][1]) if parts else ():
                value = parts[0][1][key]
                if isinstance(value, Tensor) and key != STEP:
                    whole = self._room(segment, key, value.dtype)
                    for where, state in parts:
                        whole[where.start : where.stop] = state[key]
                    value = whole
                self._install(segment, key, value)

    def _whole(self, segment: Segment, key: str, values: Sequence[Any]) -> Any:
        if not isinstance(values[0], Tensor) or key == STEP:
            return values[0]
        whole = self._allocate(segment.values.numel(), values[0].dtype, segment.values.device)
        for place, value in enumerate(values):
            like = self._flat.parameters[segment.members[place]]
            segment.view(whole, place, like).copy_(value)
        return whole

    def _owned(self, segment: Segment) -> list[tuple[Range, dict[str, Any]]]:
        """Return this process's parts of ``segment``, with their state."""
        found = [self._pieces[part].owned(segment) for part in self._own]
        return [each for each in found if each is not None]

    def _install(self, segment: Segment, key: str, value: Any) -> None:
        """Give ``value`` to the parts (cut) and to the user's optimizer (as views of it)."""
        is_whole = isinstance(value, Tensor) and key != STEP
        for piece in self._pieces:
            own = piece.owned(segment)
            if own is None:
                continue
            where, state = own
            if is_whole:
                state[key] = value[where.start : where.stop]
            else:
                state[key] = value.clone() if isinstance(value, Tensor) else value
        views: Sequence[Any] = [value] * len(segment.members)
        if is_whole:
            parameters = [self._flat.parameters[index] for index in segment.members]
            views = [segment.view(value, place, p) for place, p in enumerate(parameters)]
        elif isinstance(value, Tensor):
            counters = value.detach().reshape(1).repeat(len(segment.members))
            place = self._flat.segments.index(segment)
            self._counters[place], self._counted[place] = counters, counters.clone()
            views = counters.unbind()
        for index, view in zip(segment.members, views, strict=True):
            self._optimizer.state[self._flat.parameters[index]][key] = view


class _PieceOptimizer:
    """A torch optimizer of the user's class over one part of the flat buffers."""

    def __init__(self, optimizer: Optimizer, part: Part) -> None:
        self._ranges: list[tuple[Range, nn.Parameter]] = []
        groups = []
        for each in part.ranges:
            parameter = nn.Parameter(each.values)
            parameter.grad = each.gradients
            self._ranges.append((each, parameter))
            options = _options(optimizer.param_groups[each.segment.group])
            groups.append({**options, "params": [parameter]})
        self._optimizer = type(optimizer)(groups) if groups else None  # type: ignore[call-arg]
        if self._optimizer is not None:
            self._optimizer.state.clear()  # Adagrad made some; ours comes from the user's
            self._fuse()

    def _fuse(self) -> None:
        """One pass over memory instead of several, where the user did not choose otherwise."""
        assert self._optimizer is not None
        if type(self._optimizer) not in _FUSED_ON_CPU:
            return
        for group in self._optimizer.param_groups:
            values = group["params"][0]
            unchosen = group.get("fused") is None and group.get("foreach") is None
            fusible = values.device.type == "cpu" and values.is_floating_point()
            if type(self._optimizer) is SGD and values.itemsize < 4:
                fusible = False  # torch 2.13's kernel computes some of them wrongly
            if unchosen and fusible:
                group["fused"] = True

    def take_options(self, options: Sequence[dict[str, Any]]) -> None:
        """Take over the user's options, by group; but whether to fuse was decided before."""
        if self._optimizer is None:
            return
        for (each, _), group in zip(self._ranges, self._optimizer.param_groups, strict=True):
            own = options[each.segment.group].items()
            group.update({key: value for key, value in own if key != "fused"})

    def step(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()

    def options(self) -> list[tuple[tuple[int, torch.dtype], dict[str, Any]]]:
        """Return the options of every group and dtype that this part has something of."""
        if self._optimizer is None:
            return []
        return [
            (
                (each.segment.group, each.values.dtype),
                {k: v for k, v in group.items() if k != "params"},
            )
            for (each, _), group in zip(self._ranges, self._optimizer.param_groups, strict=True)
        ]

    def lacks_momentum(self) -> bool:
        """Tell whether some of it is still to be made, as where it was 0 in the steps before."""
        if self._optimizer is None:
            return False
        for (_, parameter), group in zip(self._ranges, self._optimizer.param_groups, strict=True):
            state = self._optimizer.state[parameter]
            if group.get("momentum") and state.get("momentum_buffer") is None:
                return True
        return False

    def lacks_state(self) -> bool:
        """Tell whether the next step makes state that is not there."""
        if type(self._optimizer) is SGD:
            return self.lacks_momentum()
        return any(not state for _, state in self.everything())

    def state_to_come(self, segment: Segment) -> dict[str, torch.dtype]:
        """Return which state of ``segment`` there is here after the next step, and its dtypes.

        A step on one element shows what an optimizer of this class, with these options, makes.
        """
        if self._optimizer is None:
            return {}
        for (each, _), group in zip(self._ranges, self._optimizer.param_groups, strict=True):
            if each.segment is segment:
                one = nn.Parameter(each.values.new_zeros(1))
                one.grad = torch.zeros_like(one)
                trial = type(self._optimizer)([{**group, "params": [one]}])  # type: ignore[call-arg]
                trial.step()
                state = trial.state[one].items()
                return {k: v.dtype for k, v in state if isinstance(v, Tensor) and k != STEP}
        return {}

    def everything(self) -> list[tuple[Range, dict[str, Any]]]:
        """Return all ranges with their state."""
        if self._optimizer is None:
            return []
        return [(each, self._optimizer.state[parameter]) for each, parameter in self._ranges]

    def owned(self, segment: Segment) -> tuple[Range, dict[str, Any]] | None:
        """Return this part's range of ``segment`` and the state there, or None."""
        for each, parameter in self._ranges:
            if each.segment is segment:
                assert self._optimizer is not None
                return each, self._optimizer.state[parameter]
        return None

    def signature(self) -> list[tuple[str, ...]]:
        """Return which state there is, by range."""
        if self._optimizer is None:
            return []
        return [
            tuple(
                key for key, value in self._optimizer.state[parameter].items() if value is not None
            )
            for _, parameter in self._ranges
        ]


def _held_by(optimizer: Optimizer) -> list[Any]:
    """Return what an optimizer keeps: its state, its groups, the entries, and what is in them."""
    entries = _filled(optimizer.state)
    values = itertools.chain.from_iterable(map(dict.values, entries))
    return [optimizer.state, optimizer.param_groups, *entries, *values]


def _filled(state: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Return the entries of parameters that have some; to ask for one's makes an empty one."""
    return [entry for entry in state.values() if isinstance(entry, dict) and entry]


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -1


def _addresses(values: Sequence[Any]) -> list[int]:
    return [value.data_ptr() for value in values if isinstance(value, Tensor)]


def _are_identical(options: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Compare by identity: what users add to a group may have no plain equality."""
    return options.keys() == known.keys() and all(
        map(operator.is_, options.values(), map(known.__getitem__, options))
    )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def norm_of_gradients(flat: FlatParameters, each: _EachThread) -> Tensor:
    """Return the 2-norm of all gradients; ``each`` runs a function of (thread, threads)."""
    norms: list[Tensor | None] = [None] * len(flat.parameters)
    spans = list(_spans(flat))

    def work(thread: int, num_threads: int) -> None:
        for index, gradient in itertools.islice(spans, thread, None, num_threads):
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            norms[index] = torch.linalg.vector_norm(real, dtype=torch.float64)

    each(work)
    total: Tensor = torch.linalg.vector_norm(torch.stack([n for n in norms if n is not None]))
    return total


def _spans(flat: FlatParameters) -> list[tuple[int, Tensor]]:
    return [
        (index, segment.gradients[start : start + size])
        for segment in flat.segments
        for index, start, size in zip(segment.members, segment.starts, segment.sizes, strict=True)
    ]
