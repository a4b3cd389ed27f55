"""Shared memory for the gradients of one microbatch.

Every slot has the same layout, so an answer only says which parts were written.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from phalanx.ipc import aligned, fail_point
from phalanx.memory import SharedMemoryPool, copy_to, dense_strides
from phalanx.torch_internals import foreach_copy

_MOVED_BYTES = 1 << 20  # a hook takes 13 µs, which counts beside the copy of a smaller gradient


@dataclass(eq=False)
class GradientSlot:
    """Shared memory of one microbatch; free again when the object is collected.

    Attributes:
        start: Where it begins in the pool.
        gradients: By parameter, laid out as it.
    """

    start: int
    gradients: list[Tensor]

    def written(self, present: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients that are ``present``, by parameter."""
        pairs = zip(self.gradients, present, strict=True)
        return [gradient if there else None for gradient, there in pairs]


class GradientSlots:
    """The slots of an executor, made when none is free.

    Args:
        parameters: In whose order gradients lie in a slot, each laid out as its parameter.
        pool: Where slots lie.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], pool: SharedMemoryPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._free: list[GradientSlot] = []
        self._taken: dict[weakref.ref[GradientSlot], GradientSlot] = {}
        # Of slots that were collected. Only C runs then: a Ctrl-C in Python would be ignored there.
        self._gone: deque[weakref.ref[GradientSlot]] = deque()
        self._parameters = parameters
        sizes = [aligned(parameter.nbytes) for parameter in parameters]
        *self._starts, self._nbytes = accumulate(sizes, initial=0)

    def at(self, start: int) -> GradientSlot:
        """Return the slot that begins there in the pool."""
        gradients = []
        for like, offset in zip(self._parameters, self._starts, strict=True):
            flat = torch.empty(0, dtype=like.dtype, device="cpu")
            if like.numel():
                flat = self._pool.tensor(like.dtype, like.numel(), start + offset)
            gradients.append(flat.as_strided(like.shape, dense_strides(like)))
        return GradientSlot(start, gradients)

    def allocate(self) -> GradientSlot:
        """Return a free slot; it is free again when the object is collected."""
        with self._lock:
            while self._gone:
                self._free.append(self._taken.pop(self._gone.popleft()))
            kept = self._free.pop() if self._free else self.at(self._pool.allocate(self._nbytes))
            slot = replace(kept)  # for the caller alone, so that its collection frees the slot
            self._taken[weakref.ref(slot, self._gone.append)] = kept
        return slot


class SlotWriter:
    """Writes to slots, in a worker process.

    A large gradient moves to the slot as soon as autograd has accumulated it: else the worker would
    hold all gradients of the model twice.

    Args:
        slots: The program's.
        leaves: The parameters of the replica, which get the gradients.
    """

    def __init__(self, slots: GradientSlots, leaves: Sequence[Tensor]) -> None:
        self._at = functools.cache(slots.at)
        self._slot: GradientSlot | None = None
        for place, leaf in enumerate(leaves):
            if leaf.requires_grad and leaf.nbytes >= _MOVED_BYTES:
                leaf.register_post_accumulate_grad_hook(functools.partial(self._move, place))

    def write_to(self, start: int | None) -> None:
        """Write to the slot that begins at ``start``; None where no gradients are wanted."""
        self._slot = None if start is None else self._at(start)

    def _move(self, place: int, leaf: Tensor) -> None:
        target = None if self._slot is None else self._slot.gradients[place]
        gradient = leaf.grad
        if target is None or gradient is None or gradient.requires_grad:
            return
        is_alike = gradient.stride() == target.stride() and gradient.dtype == target.dtype
        if is_alike and gradient.data_ptr() != target.data_ptr():  # else more was added to it
            copy_to(gradient, target)
            leaf.grad = target

    def finish(self, gradients: Sequence[Tensor | None]) -> list[bool]:
        """Write the gradients that are not in the slot yet; return which parameters have got one.

        Args:
            gradients: By parameter, laid out as it.
        """
        if self._slot is not None:
            pairs = [
                (own, gradient)
                for own, gradient in zip(self._slot.gradients, gradients, strict=True)
                if gradient is not None and own.data_ptr() != gradient.data_ptr()
            ]
            half = len(pairs) // 2
            _copy(pairs[:half])
            fail_point("gradients half written")
            _copy(pairs[half:])
            fail_point("gradients written")
        return [gradient is not None for gradient in gradients]


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        foreach_copy([own for own, _ in pairs], [value for _, value in pairs])
