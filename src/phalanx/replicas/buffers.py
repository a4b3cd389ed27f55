"""Buffers that a model writes while it runs, such as batch norm's running statistics.

Every microbatch starts from the buffers as they are at the start of the step, and writes its own
copies. The copies are merged along the same tree as the gradients. Floating-point buffers are
averaged: the mean is weighted by what the microbatches stand for and summed in float64. Others, and
all with ``buffers="first"`` of a container, are as the first microbatch left them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from phalanx.errors import UnsupportedError
from phalanx.memory import is_expanded
from phalanx.torch_internals import foreach_add, foreach_copy, foreach_div, foreach_mul

_NOTHING = contextlib.nullcontext()


@dataclass
class Statistic:
    """The contribution of microbatches to one buffer: their weighted sum, or the first one's."""

    value: Tensor
    weight: float
    is_mean: bool


Statistics = dict[str, Statistic]


def merge_statistics(left: Statistics, right: Statistics) -> Statistics:
    """Add ``right`` to ``left``, in place."""
    pairs = [(left[name], other) for name, other in right.items() if name in left]
    added = [(own, other) for own, other in pairs if own.is_mean]
    if added:
        foreach_add([own.value for own, _ in added], [other.value for _, other in added])
        for own, other in added:
            own.weight += other.weight
    left.update({name: other for name, other in right.items() if name not in left})
    return left


def sum_statistics(operands: Iterable[Statistics]) -> Statistics:
    """Return what all microbatches left, added in the order of their sums."""
    return functools.reduce(merge_statistics, operands, {})


def check_statistics(buffers: Mapping[str, Tensor], merged: Statistics) -> None:
    """Refuse statistics that their buffer cannot take, before anything is written."""
    for name, statistic in merged.items():
        buffer = buffers[name]
        if statistic.value.shape != buffer.shape:
            raise UnsupportedError(
                f"Buffer `{name}` must keep its shape {tuple(buffer.shape)}, but "
                f"the forward pass made it {tuple(statistic.value.shape)}. Register it in its full "
                "shape."
            )
        if is_expanded(buffer) or (buffer.is_inference() and not torch.is_inference_mode_enabled()):
            raise UnsupportedError(
                f"Buffer `{name}` must be writable where the forward pass changes it, but was made "
                "by `expand()` or in inference mode. Register a `clone()` of it."
            )


def write_statistics(buffers: Mapping[str, Tensor], merged: Statistics) -> None:
    """Write the merged statistics into ``buffers``, in place."""
    means = [each for each in merged.values() if each.is_mean]
    if means:
        foreach_div([each.value for each in means], [each.weight for each in means])
    with torch.no_grad():
        _copy_all([buffers[name] for name in merged], [each.value for each in merged.values()])


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to tensors. On an accelerator each kind is one call: it waits for calls."""
    groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        kind = None if target.is_cpu else (target.dtype, source.dtype)
        own, theirs = groups.setdefault(kind, ([], []))
        own.append(target)
        theirs.append(source)
    for own, theirs in groups.values():
        foreach_copy(own, theirs)


class ReplicaBuffers:
    """The buffers of one replica: its copies, and which of them a microbatch has written.

    A copy is replaced, never overwritten: a graph that is still to run backward may hold it.

    Args:
        source: The module whose buffers the copies start from.
        shell: The replica's module; see `Shell`.
        device: Where the copies lie.
        prefix: Comes before the buffers' names.
        averages: Whether floating-point buffers are averaged, or the first's.
    """

    def __init__(
        self,
        source: nn.Module,
        shell: nn.Module,
        device: torch.device,
        prefix: str,
        averages: bool,
    ) -> None:
        self._device = device
        self._averages = averages
        found: dict[int, _Buffer] = {}  # one that has several names has one copy
        for (path, theirs), own in zip(source.named_modules(), shell.modules(), strict=True):
            for key, buffer in theirs._buffers.items():
                if buffer is not None:
                    name = prefix + (f"{path}.{key}" if path else key)
                    new = _Buffer(name, buffer)
                    found.setdefault(id(buffer), new).places.append((own, key))
            if isinstance(theirs, _BatchNorm) and theirs.num_batches_tracked is not None:
                counter = found[id(theirs.num_batches_tracked)]
                for statistic in (theirs.running_mean, theirs.running_var):
                    if statistic is not None:  # else it was dropped, to use each batch's own
                        found[id(statistic)].counter = counter
        self._buffers = list(found.values())
        self.are_there = bool(found)

    def start(self) -> None:
        """Let the next microbatch begin with the buffers of the source."""
        stale = [each for each in self._buffers if not each.is_current()]
        if stale:
            sources = [_detached(each.source) for each in stale]
            # A copy that was made in inference mode could not be written later.
            infers = torch.is_inference_mode_enabled()
            with torch.inference_mode(False) if infers else _NOTHING:
                copies = [torch.empty_like(each, device=self._device) for each in sources]
                _copy_all(copies, sources)
            for buffer, own in zip(stale, copies, strict=True):
                buffer.set_copy(own)

    def outdate(self) -> None:
        """Copy all buffers before the next microbatch: the source's were written elsewhere."""
        for buffer in self._buffers:
            buffer.own = None

    def collect(self, weight: float) -> Statistics:
        """Return what a microbatch that stands for ``weight`` has written."""
        written = [each for each in self._buffers if each.is_written()]
        found: Statistics = {}
        values = []
        for buffer in written:
            value = buffer.take()
            is_mean = self._averages and (value.is_floating_point() or value.is_complex())
            wide = torch.complex128 if value.is_complex() else torch.float64
            own = torch.empty_like(value, dtype=wide if is_mean else None)
            found[buffer.name] = Statistic(own, weight, is_mean)
            values.append(value)
        _copy_all([each.value for each in found.values()], values)
        means = [each.value for each in found.values() if each.is_mean]
        if means:
            foreach_mul(means, weight)
        return found


class _Buffer:
    """One buffer of the source, and the replica's copy of it.

    Attributes:
        source: The source's.
        places: The modules of the replica that have it, and under which names.
        own: The copy that was given to them; None where another one is needed.
        counter: Of a statistic of batch norm, the buffer that counts its batches.
    """

    def __init__(self, name: str, source: Tensor) -> None:
        self.name = name
        self.source = source
        self.places: list[tuple[nn.Module, str]] = []
        self.own: Tensor | None = None
        self.counter: _Buffer | None = None
        self._versions = (-1, -1)  # of the source and of the copy, when it was made

    def is_current(self) -> bool:
        """Tell whether a microbatch may begin with the present copy."""
        return self.own is not None and self._versions[0] == self._source_version() >= 0

    def _source_version(self) -> int:
        return -1 if self.source.is_inference() else self.source._version  # those have none

    def set_copy(self, own: Tensor) -> None:
        """Give the replica's modules a new copy of the source."""
        self.own = own
        self._versions = self._source_version(), own._version
        for module, key in self.places:
            module._buffers[key] = own

    def is_written(self) -> bool:
        """Tell whether a microbatch has written to the copy."""
        now = self._now()
        if now is None:
            self.own = None
            return False
        if self._is_noticed(now):
            return True
        if self.counter is not None and self.counter._is_noticed(self.counter._now()):
            return True
        # Batch norm's kernel writes its statistics without raising torch's version counter.
        trains = any(module.training for module, _ in self.places)
        if not trains or not now.is_floating_point() or now.layout is not torch.strided:
            return False
        return not torch.equal(now.detach().to(self.source.device), self.source)

    def _now(self) -> Tensor | None:
        for module, key in self.places:
            value = module._buffers.get(key)
            if value is not self.own:
                return value
        return self.own

    def _is_noticed(self, now: Tensor | None) -> bool:
        """Tell whether torch has noticed that the copy was written to or replaced."""
        return now is not None and (now is not self.own or now._version != self._versions[1])

    def take(self) -> Tensor:
        """Return what a microbatch has left, on the source's device; drop the copy."""
        now = self._now()
        assert now is not None
        self.own = None
        return _detached(now).to(self.source.device)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor
