"""All parameters of one dtype in one buffer, and all their gradients in another.

    parameters   | weight 0 ..|pad| bias 0 |pad| weight 1 .... |pad|     one buffer per group, dtype
    gradients    | weight 0 ..|pad| bias 0 |pad| weight 1 .... |pad|     and device; the same places

The module's own parameters become views of the buffer, so whoever writes there trains the module,
and sums, steps and copies are one pass over memory. Every parameter starts at 64 bytes, every
buffer is a whole number of `BLOCK_BYTES`. Padding holds zeros and stays zero under every
elementwise optimizer. A parameter keeps the order in which its elements lay in memory
(channels_last stays channels_last).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.ipc import ALIGN_BYTES
from phalanx.plan import overlaps, part_bounds

__all__ = [
    "BLOCK_BYTES",
    "Allocate",
    "FlatParameters",
    "Part",
    "Range",
    "Segment",
    "dense_strides",
    "in_memory_order",
    "zeros",
]

BLOCK_BYTES = 256  # no vector loop of torch's kernels is wider, so whole blocks leave no tail


Allocate = Callable[[int, torch.dtype, torch.device], Tensor]


def zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in memory of this process: what an `Allocate` is by default."""
    return torch.zeros(num_elements, dtype=dtype, device=device)


def in_memory_order(gradient: Tensor, like: Tensor) -> Tensor:
    """Return ``gradient`` as one run of elements, in the order in which ``like`` lies in memory."""
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.stride() != like.stride() or gradient.dtype != like.dtype:
        gradient = torch.empty_like(like).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


@dataclass(frozen=True, eq=False)
class Segment:
    """The parameters of one group and one dtype.

    Attributes:
        group: Index of the group.
        members: Indices of its parameters, in `FlatParameters.parameters`.
        starts: First element of each member in the buffers.
        sizes: Elements of each member.
        values: The buffer of parameters, 1-D.
        gradients: The buffer of gradients, 1-D, of the same size.
    """

    group: int
    members: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Tensor
    gradients: Tensor

    def view(self, buffer: Tensor, place: int, like: Tensor) -> Tensor:
        """Return the ``place``-th member's elements of ``buffer`` in the shape of ``like``."""
        return buffer.as_strided(like.shape, dense_strides(like), self.starts[place])

    def pieces(self, start: int, stop: int, out: Tensor) -> list[tuple[int, int, int, Tensor]]:
        """Return what of which member lies between ``start`` and ``stop``.

        Args:
            out: What stands for these elements: 1-D, of their number.

        Returns:
            By member: its index, its own first and last element there, and their place in ``out``.
        """
        found = []
        for place, low, high in overlaps(self.starts, self.sizes, start, stop):
            first = self.starts[place] - start
            found.append((self.members[place], low, high, out[first + low : first + high]))
        return found


class FlatParameters:
    """Move parameters into flat buffers, in place, until :meth:`release`.

    Ties inside the module are kept, because a tied parameter is one object. Frozen parameters are
    moved too, but never get a gradient.

    Args:
        groups: The parameters, by optimizer group; each at most once.
        tight: Leave the padding out; then parameters begin anywhere.
        allocate: Makes zeros for the buffers: (elements, dtype, device) -> tensor.

    Raises:
        ConfigError: A parameter stands twice, or two parameters lie over each other in memory.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> flat = FlatParameters([list(layer.parameters())])
        >>> flat.segments[0].values.zero_().numel()
        64
        >>> layer(torch.ones(1, 3)).tolist()
        [[0.0, 0.0]]

    Source: Torch7's ``getParameters()``.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        *,
        tight: bool = False,
        allocate: Allocate = zeros,
    ) -> None:
        self._tight = tight
        self._allocate = allocate
        self._keeps_gradients = False
        self.parameters = [parameter for group in groups for parameter in group]
        _refuse_overlap(self.parameters)
        self.segments: list[Segment] = []
        self._places: dict[int, tuple[Segment, int]] = {}
        first = 0
        for index, group in enumerate(groups):
            self._add_group(index, range(first, first + len(group)))
            first += len(group)

    def _add_group(self, group: int, indices: range) -> None:
        by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index in indices:
            parameter = self.parameters[index]
            by_kind.setdefault((parameter.device, parameter.dtype), []).append(index)
        for (device, dtype), members in by_kind.items():
            self._add_segment(group, members, device, dtype)

    def _add_segment(
        self, group: int, members: list[int], device: torch.device, dtype: torch.dtype
    ) -> None:
        align = 1 if self._tight else max(1, ALIGN_BYTES // dtype.itemsize)
        block = 1 if self._tight else max(1, BLOCK_BYTES // dtype.itemsize)
        starts, total = [], 0
        for index in members:
            starts.append(total)
            total += -(-self.parameters[index].numel() // align) * align
        total = -(-total // block) * block
        segment = Segment(
            group=group,
            members=tuple(members),
            starts=tuple(starts),
            sizes=tuple(self.parameters[index].numel() for index in members),
            values=self._allocate(total, dtype, device),
            gradients=self._allocate(total, dtype, device),
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
            if segment.sizes[place]
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

    def parts(self, num_parts: int) -> list[Part]:
        """Divide all buffers into ``num_parts`` shares of nearly equal size, at whole blocks."""
        bounds = self.bounds(num_parts)
        return [
            Part([Range(s, *b[part]) for s, b in zip(self.segments, bounds, strict=True)])
            for part in range(num_parts)
        ]

    def bounds(self, num_parts: int) -> list[list[tuple[int, int]]]:
        """Return, by segment, the first and last element of each of ``num_parts`` shares."""
        return [
            part_bounds(
                segment.values.numel(), num_parts, max(1, BLOCK_BYTES // segment.values.itemsize)
            )
            for segment in self.segments
        ]

    def release(self) -> None:
        """Give every parameter memory of its own again and drop its gradient; the values stay."""
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()
            parameter.grad = None


class Range:
    """Elements ``start`` to ``stop`` of one segment."""

    def __init__(self, segment: Segment, start: int, stop: int) -> None:
        self.segment = segment
        self.start = start
        self.stop = stop
        self.values = segment.values[start:stop]
        self.gradients = segment.gradients[start:stop]
        self._pieces = segment.pieces(start, stop, self.gradients)
        size = segment.values.itemsize
        first_byte = {i: at * size for i, at in zip(segment.members, segment.starts, strict=True)}
        self._first_bytes = [(index, first_byte[index]) for index, _, _, _ in self._pieces]
        self._used = _covered(segment, start, stop)

    def sum_gradients(
        self, operands: Sequence[Sequence[Tensor | None]], *, alike: bool = False
    ) -> None:
        """Write the sum of one or two sets of gradients to the buffer.

        Each set holds the parameters' gradients in memory order; None stands for no gradient.

        Args:
            alike: Sets may lie as the buffer does, with zeros between, and are added at once then.
        """
        wholes = [self._whole(operand) for operand in operands] if alike else []
        if len(wholes) == 2 and wholes[0] is not None and wholes[1] is not None:
            low, high = self._used
            out = self.gradients[low - self.start : high - self.start]
            torch.add(wholes[0], wholes[1], out=out)
            return
        for index, start, stop, out in self._pieces:
            present = [g[index] for g in operands if g[index] is not None]
            terms = [gradient[start:stop] for gradient in present if gradient is not None]
            if len(terms) == 2:
                torch.add(terms[0], terms[1], out=out)
            elif terms:
                out.copy_(terms[0])
            else:
                out.zero_()

    def _whole(self, operand: Sequence[Tensor | None]) -> Tensor | None:
        """Return the gradients from the first to the last in one piece, if they lie as there."""
        first: Tensor | None = None
        base = 0
        for index, first_byte in self._first_bytes:
            gradient = operand[index]
            if gradient is None:
                return None
            if first is None:
                first, base = gradient, gradient.data_ptr() - first_byte
            elif gradient.data_ptr() - first_byte != base:
                return None
        if first is None or len(self._first_bytes) == 1:
            return None
        size, storage, (low, high) = first.itemsize, first.untyped_storage(), self._used
        start_byte = base + low * size - storage.data_ptr()
        if start_byte < 0 or start_byte + (high - low) * size > storage.nbytes():
            return None
        return first.as_strided((high - low,), (1,), start_byte // size)


class Part:
    """One thread's share of all buffers."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.ranges = [each for each in ranges if each.start < each.stop]

    def sum_gradients(
        self, operands: Sequence[Sequence[Tensor | None]], *, alike: bool = False
    ) -> None:
        """Write this part of the sum of ``operands`` to the gradient buffers."""
        for each in self.ranges:
            each.sum_gradients(operands, alike=alike)


def _covered(segment: Segment, start: int, stop: int) -> tuple[int, int]:
    """Return the first and the last element between these two that is a member's."""
    found = [
        (first + low, first + high)
        for place, low, high in overlaps(segment.starts, segment.sizes, start, stop)
        for first in [segment.starts[place]]
    ]
    return (found[0][0], found[-1][1]) if found else (start, start)


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


def _refuse_overlap(parameters: Sequence[nn.Parameter]) -> None:
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
