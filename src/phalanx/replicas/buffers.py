"""Buffers that a model writes while it runs, such as batch norm's running statistics.

Every microbatch starts from the buffers as they are at the start of the step, and writes its own
copies. The copies are merged along the same tree as the gradients, each buffer by its rule
(`plan.BufferRules`): a mean is weighted by what the microbatches stand for and summed in float64; a
counter is as the first microbatch left it; of a sum, each microbatch brings what it has added.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.errors import UnsupportedError
from phalanx.plan import BufferRules


@dataclass
class Statistic:
    """What microbatches left in one buffer: by rule a weighted sum, the first's, or what was added.

    Rules are ``mean``, ``first`` and ``sum``.
    """

    value: Tensor
    weight: float
    rule: str

    def add(self, other: Statistic) -> None:
        """Take the next microbatches' statistic in, in place."""
        if self.rule != "first":
            self.value += other.value
            self.weight += other.weight

    def write_to(self, buffer: Tensor) -> None:
        """Make ``buffer`` what this statistic says."""
        if self.rule == "sum":
            buffer.add_(self.value)
        else:
            buffer.copy_(self.value / self.weight if self.rule == "mean" else self.value)


Statistics = dict[str, Statistic]


def _name_of(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def merge_statistics(left: Statistics, right: Statistics) -> Statistics:
    """Add ``right`` to ``left``, in place."""
    for name, statistic in right.items():
        if name in left:
            left[name].add(statistic)
        else:
            left[name] = statistic
    return left


def sum_statistics(operands: Iterable[Statistics]) -> Statistics:
    """Return what all microbatches left, added in the order of their sums."""
    return functools.reduce(merge_statistics, operands, {})


def check_statistics(buffers: Mapping[str, Tensor], merged: Statistics) -> None:
    """Refuse statistics that have not the shape of their buffer, before anything is written."""
    for name, statistic in merged.items():
        if statistic.value.shape != buffers[name].shape:
            raise UnsupportedError(
                f"Buffer `{name}` must keep its shape {tuple(buffers[name].shape)}, but "
                f"the forward pass made it {tuple(statistic.value.shape)}. Register it in its full "
                "shape."
            )


def write_statistics(buffers: Mapping[str, Tensor], merged: Statistics) -> None:
    """Write the merged statistics into ``buffers``, in place."""
    with torch.no_grad():
        for name, statistic in merged.items():
            statistic.write_to(buffers[name])


class ReplicaBuffers:
    """The buffers of one replica: its copies, and which of them a microbatch has written.

    A buffer is never overwritten but replaced: graphs that are still to run backward may hold it.

    Args:
        source: The module whose buffers the copies start from.
        shell: The replica's module; see `Shell`.
        device: Where the copies lie.
        prefix: Comes before the buffers' names.
        rules: How each buffer is merged.
    """

    def __init__(
        self,
        source: nn.Module,
        shell: nn.Module,
        device: torch.device,
        prefix: str,
        rules: BufferRules,
    ) -> None:
        found: dict[int, _Buffer] = {}  # one that has several names has one copy
        for (path, theirs), own in zip(source.named_modules(), shell.modules(), strict=True):
            for key, buffer in theirs._buffers.items():
                if buffer is not None:
                    name = prefix + _name_of(path, key)
                    new = _Buffer(name, buffer, device, rules.of(name))
                    found.setdefault(id(buffer), new).places.append((own, key))
        self._buffers = list(found.values())
        self.are_there = bool(found)

    def start(self) -> None:
        """Let the next microbatch begin with the buffers of the source."""
        if self._buffers:
            with torch.inference_mode(False):  # a copy made under it could not be written later
                for buffer in self._buffers:
                    buffer.start()

    def outdate(self) -> None:
        """Copy all buffers before the next microbatch: the source's were written elsewhere."""
        for buffer in self._buffers:
            buffer.own = None

    def collect(self, weight: float) -> Statistics:
        """Return what a microbatch that stands for ``weight`` has written."""
        found: Statistics = {}
        for buffer in self._buffers:
            value = buffer.written()
            if value is not None:
                found[buffer.name] = buffer.statistic(value, weight)
        return found


class _Buffer:
    """One buffer of the source, and the replica's copy of it.

    Attributes:
        places: The modules of the replica that have it, and under which names.
        own: The copy that was given to them; None where another one is needed.
    """

    def __init__(self, name: str, source: Tensor, device: torch.device, rule: str) -> None:
        self.name = name
        self.places: list[tuple[nn.Module, str]] = []
        self.own: Tensor | None = None
        self._source = source
        self._device = device
        self._rule = rule
        self._versions = (-1, -1)  # of the source and of the copy, when it was made

    def start(self) -> None:
        source = self._source
        version = -1 if source.is_inference() else source._version  # those have none
        if self.own is not None and self._versions[0] == version >= 0:
            return
        self.own = source.detach().to(self._device, copy=True)
        self._versions = version, self.own._version
        for module, key in self.places:
            module._buffers[key] = self.own

    def written(self) -> Tensor | None:
        """Return the copy, on the source's device, if a microbatch has written to it."""
        values = [module._buffers.get(key) for module, key in self.places]
        now = next((value for value in values if value is not self.own), self.own)
        if now is None:
            self.own = None
            return None
        told = now is not self.own or now._version != self._versions[1]
        # Batch norm's kernel writes its statistics without raising torch's version counter.
        trains = any(module.training for module, _ in self.places)
        silent = trains and now.is_floating_point() and now.layout is torch.strided
        if not told and not silent:
            return None
        value = now.detach().to(self._source.device)  # once, to be compared and to be returned
        if not told and torch.equal(value, self._source):
            return None
        self.own = None
        return value

    def statistic(self, value: Tensor, weight: float) -> Statistic:
        """Return what a microbatch that left ``value`` brings."""
        rule = self._rule
        if rule == "mean" and (value.is_floating_point() or value.is_complex()):
            wide = torch.complex128 if value.is_complex() else torch.float64
            return Statistic(value.to(wide) * weight, weight, rule)
        if rule == "sum" and value.dtype != torch.bool and value.shape == self._source.shape:
            return Statistic(value - self._source.detach(), weight, rule)
        return Statistic(value.clone(), weight, "first")
