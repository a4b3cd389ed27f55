"""Buffers that a model writes while it runs, such as batch norm's running statistics.

Every microbatch starts from the step's starting statistics and writes its own copy. The copies are
merged along the same tree as the gradients: floating ones as the mean weighted by what the
microbatches stand for (summed in float64), others (counters) as the first microbatch left them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Statistic", "StatisticsOfReplica", "merge_statistics", "write_statistics"]


@dataclass
class Statistic:
    """What microbatches left in one buffer: a weighted sum, or the first one's value."""

    value: Tensor
    weight: float

    def mean(self) -> Tensor:
        """Return what the buffer becomes."""
        return self.value / self.weight if self.value.is_floating_point() else self.value


Statistics = dict[str, Statistic]


def merge_statistics(left: Statistics, right: Statistics) -> Statistics:
    """Add ``right`` to ``left``, in place."""
    for name, statistic in right.items():
        if name not in left:
            left[name] = statistic
        elif statistic.value.is_floating_point():
            left[name].value += statistic.value
            left[name].weight += statistic.weight
    return left


def write_statistics(buffers: Mapping[str, Tensor], merged: Statistics) -> None:
    """Write the merged statistics into ``buffers``, in place."""
    with torch.no_grad():
        for name, statistic in merged.items():
            buffers[name].copy_(statistic.mean())


class StatisticsOfReplica:
    """The buffers of one replica: which were written, and how to put the start back.

    A buffer is never overwritten but replaced: graphs that are still to run backward may hold it.

    Args:
        source: The module whose buffers hold the step's starting statistics.
        replica: The replica, of the same structure.
    """

    def __init__(self, source: nn.Module, replica: nn.Module) -> None:
        self._source = source
        self._homes = {
            name: (owner, key)
            for name, owner, key in _buffers_of(replica)
            if owner._buffers[key] is not None
        }
        self._start: dict[str, tuple[Tensor, int]] = {}  # what was put in, and its version then
        self._seen: dict[
            str, tuple[Tensor, int]
        ] = {}  # what it was copied from, and its version then

    def refresh(self) -> None:
        """Take over the source's buffers where they have changed since the last time."""
        for name, source in self._source.named_buffers(remove_duplicate=False):
            seen, version = self._seen.get(name, (None, -1))
            if seen is not source or version != source._version:
                self._put(name, source)

    def collect(self, weight: float) -> Statistics:
        """Return what a microbatch wrote, weighted, and put the starting statistics back."""
        found: Statistics = {}
        for name, source in self._source.named_buffers(remove_duplicate=False):
            owner, key = self._homes[name]
            now = owner._buffers[key]
            if self._was_written(name, now, source, owner.training):
                if now is not None:
                    found[name] = _weighted(now, weight, source.device)
                self._put(name, source)
        return found

    def _put(self, name: str, source: Tensor) -> None:
        owner, key = self._homes[name]
        before = owner._buffers[key]
        with torch.inference_mode(False):  # a buffer made under it could not be written later
            own = source.detach().clone()
            own = own if before is None else own.to(before.device)
        owner._buffers[key] = own
        self._start[name] = (own, own._version)
        self._seen[name] = (source, source._version)

    def _was_written(self, name: str, now: Tensor | None, source: Tensor, training: bool) -> bool:
        own, version = self._start[name]
        if now is not own or now._version != version:
            return True
        # Batch norm's kernel writes its statistics without telling torch's version counter.
        return training and not torch.equal(now.to(source.device), source)


def _weighted(value: Tensor, weight: float, home: torch.device) -> Statistic:
    value = value.detach().to(home)
    if value.is_floating_point():
        return Statistic(value.double() * weight, weight)
    return Statistic(value.clone(), weight)


def _buffers_of(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    return [
        (f"{prefix}.{key}" if prefix else key, owner, key)
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for key in owner._buffers
    ]
