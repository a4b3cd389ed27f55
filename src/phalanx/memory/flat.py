"""All parameters of one dtype in one buffer, and all their gradients in another.

    parameters   | weight 0 ..| bias 0 | weight 1 .... | bias 1 |     one buffer per dtype, device
    gradients    | weight 0 ..| bias 0 | weight 1 .... | bias 1 |     the same places

The module's own parameters become views of the buffer, so whoever writes there trains the module.
A parameter keeps the order in which its elements lay in memory (channels_last stays channels_last).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError

__all__ = ["FlatParameters", "FlatSegment", "dense_strides", "refuse_overlap"]


@dataclass(frozen=True, eq=False)
class FlatSegment:
    """The parameters of one dtype on one device.

    Attributes:
        members: Their indices, in `FlatParameters.parameters`.
        starts: First element of each member in the buffers.
        values: The buffer of parameters, 1-D.
        gradients: The buffer of gradients, 1-D, of the same size.
    """

    members: tuple[int, ...]
    starts: tuple[int, ...]
    values: Tensor
    gradients: Tensor

    def view(self, buffer: Tensor, place: int, like: Tensor) -> Tensor:
        """Return the ``place``-th member's elements of ``buffer`` in the shape of ``like``."""
        return buffer.as_strided(like.shape, dense_strides(like), self.starts[place])


class FlatParameters:
    """Move parameters into flat buffers, in place.

    Ties inside the module are kept, because a tied parameter is one object. Frozen parameters are
    moved too, but never get a gradient.

    Args:
        parameters: Each at most once.

    Raises:
        ConfigError: Two parameters lie over each other in memory.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> flat = FlatParameters(list(layer.parameters()))
        >>> flat.segments[0].values.zero_().numel()
        8
        >>> layer(torch.ones(1, 3)).tolist()
        [[0.0, 0.0]]

    Source: Torch7's ``getParameters()``.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._keeps_gradients = False
        self.parameters = list(parameters)
        refuse_overlap(self.parameters)
        self.segments: list[FlatSegment] = []
        self._places: dict[int, tuple[FlatSegment, int]] = {}
        by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, parameter in enumerate(self.parameters):
            by_kind.setdefault((parameter.device, parameter.dtype), []).append(index)
        for (device, dtype), members in by_kind.items():
            self._add_segment(members, device, dtype)

    def _add_segment(self, members: list[int], device: torch.device, dtype: torch.dtype) -> None:
        sizes = [self.parameters[index].numel() for index in members]
        segment = FlatSegment(
            members=tuple(members),
            starts=tuple(itertools.accumulate(sizes[:-1], initial=0)),
            values=torch.zeros(sum(sizes), dtype=dtype, device=device),
            gradients=torch.zeros(sum(sizes), dtype=dtype, device=device),
        )
        self.segments.append(segment)
        for place, index in enumerate(members):
            parameter = self.parameters[index]
            view = segment.view(segment.values, place, parameter)
            view.copy_(parameter.detach())
            parameter.data = view
            self._places[index] = (segment, place)

    def intact(self) -> bool:
        """Tell whether every parameter lies in its place still (``module.to()`` moves them)."""
        return all(
            self.parameters[index].data_ptr()
            == segment.values.data_ptr() + segment.starts[place] * segment.values.itemsize
            for index, (segment, place) in self._places.items()
            if self.parameters[index].numel()
        )

    def gradient(self, index: int) -> Tensor:
        """Return the gradient of parameter ``index``, a view of its buffer."""
        segment, place = self._places[index]
        return segment.view(segment.gradients, place, self.parameters[index])

    def keep_gradients(self, values: Sequence[Tensor | None]) -> None:
        """Make every parameter's ``grad`` its place in the buffer, now and after backward passes.

        Args:
            values: The gradients to begin with; None stands for zeros.
        """
        for index, (parameter, value) in enumerate(zip(self.parameters, values, strict=True)):
            view = self.gradient(index)
            if value is None:
                view.zero_()
            else:
                view.copy_(value)
            parameter.grad = view if parameter.requires_grad else None
            if parameter.requires_grad and not self._keeps_gradients:
                parameter.register_post_accumulate_grad_hook(
                    partial(_move_gradient, parameter.data_ptr(), view)
                )
        self._keeps_gradients = True


def _move_gradient(pointer: int, view: Tensor, parameter: Tensor) -> None:
    """Move a gradient that autograd made elsewhere (after ``grad = None``) to its place."""
    gradient = parameter.grad
    if gradient is None or parameter.data_ptr() != pointer:  # the parameter has moved away
        return
    if gradient.data_ptr() != view.data_ptr():
        view.copy_(gradient)
        parameter.grad = view


def dense_strides(like: Tensor) -> tuple[int, ...]:
    """Return the strides of ``like`` in the order of its memory, without gaps."""
    return torch.empty_like(like, device="meta").stride()


def refuse_overlap(parameters: Sequence[nn.Parameter]) -> None:
    """Refuse parameters that lie over each other in memory.

    Raises:
        ConfigError: Two of them do.
    """
    spans = []
    for index, parameter in enumerate(parameters):
        if parameter.numel():
            steps = zip(parameter.shape, parameter.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)
            start = parameter.data_ptr()
            stop = start + (last + 1) * parameter.itemsize
            spans.append((str(parameter.device), start, stop, index))
    spans.sort()
    for (device, _, stop, index), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < stop:
            first, second = sorted((index, other))
            raise ConfigError(
                f"Parameters {first} and {second} must lie in memory of their own, but share it. "
                "Tie them by assigning the same `nn.Parameter` object to both places."
            )
