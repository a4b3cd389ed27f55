"""Buffers that a model writes while it runs, such as batch norm's running statistics.

Every microbatch starts from the step's starting statistics and writes its own copy. The copies are
merged along the same tree as the gradients, each buffer by its rule (`plan.BufferRules`): a mean is
weighted by what the microbatches stand for and summed in float64; a counter is as the first
microbatch left it; of a sum, each microbatch brings what it has added.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx.errors import UnsupportedError
from phalanx.plan import BufferRules
from phalanx.replicas.tensor_version import TensorVersion

__all__ = [
    "Statistic",
    "StatisticSpec",
    "Statistics",
    "StatisticsOfReplica",
    "check_statistics",
    "merge_statistics",
    "statistic_specs",
    "sum_statistics",
    "write_statistics",
]


@dataclass
class Statistic:
    """What microbatches left in one buffer: by rule a weighted sum, the first's, or what was added.

    Rules are ``mean``, ``first``, ``sum``, and ``any`` for a sum of flags.
    """

    value: Tensor
    weight: float
    rule: str

    def add(self, other: Statistic) -> None:
        """Take the next microbatches' statistic in, in place."""
        if self.rule == "any":
            self.value |= other.value
        elif self.rule != "first":
            self.value += other.value
            self.weight += other.weight

    def write_to(self, buffer: Tensor) -> None:
        """Make ``buffer`` what this statistic says."""
        if self.rule == "sum":
            buffer.add_(self.value)
        else:
            buffer.copy_(self.value / self.weight if self.rule == "mean" else self.value)


Statistics = dict[str, Statistic]


class StatisticSpec(NamedTuple):
    """What a statistic is, its numbers aside."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rule: str

    def fits(self, statistic: Statistic) -> bool:
        """Tell whether ``statistic`` is of this kind."""
        value = statistic.value
        return (value.dtype, tuple(value.shape), statistic.rule) == self[1:]


def statistic_specs(source: nn.Module, rules: BufferRules) -> list[StatisticSpec]:
    """Return what microbatches leave in buffers that keep their shape and dtype."""
    found = []
    for path, owner in source.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                name = _name_of(path, key)
                rule, dtype = _brought(rules.of(name), buffer)
                found.append(StatisticSpec(name, dtype, tuple(buffer.shape), rule))
    return found


def _name_of(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _brought(rule: str, value: Tensor) -> tuple[str, torch.dtype]:
    """Return the rule and the dtype of the statistic that ``value`` makes."""
    if rule == "mean" and (value.is_floating_point() or value.is_complex()):
        return "mean", torch.complex128 if value.is_complex() else torch.float64
    if rule == "sum":
        return "any" if value.dtype == torch.bool else "sum", value.dtype
    return "first", value.dtype


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
    merged: Statistics = {}
    for statistics in operands:
        merge_statistics(merged, statistics)
    return merged


def check_statistics(buffers: Mapping[str, Tensor], merged: Statistics) -> None:
    """Refuse statistics that have not the shape of their buffer, before anything is written."""
    for name, statistic in merged.items():
        if statistic.value.shape != buffers[name].shape:
            raise UnsupportedError(
                f"Buffer `{name}` must keep its shape {tuple(buffers[name].shape)}, but "
                f"the forward pass made it {tuple(statistic.value.shape)}. Register it in its full "
                "shape."
            )


class _Merging:
    """How often merged statistics were written in this process: begun, and done."""

    lock = threading.Lock()
    begun = 0
    done = 0


def write_statistics(buffers: Mapping[str, Tensor], merged: Statistics) -> None:
    """Write the merged statistics into ``buffers``, in place."""
    if not merged:
        return
    with _Merging.lock:
        _Merging.begun += 1
    try:
        with torch.no_grad():
            for name, statistic in merged.items():
                statistic.write_to(buffers[name])
    finally:
        with _Merging.lock:
            _Merging.done += 1


class StatisticsOfReplica:
    """The buffers of one replica: which were written, and how to put the start back.

    A buffer is never overwritten but replaced: graphs that are still to run backward may hold it.

    Args:
        source: The module whose buffers hold the step's starting statistics.
        replica: The replica, of the same structure.
        prefix: What stands before the buffers' names.
        rules: What becomes of which buffer.
    """

    def __init__(
        self, source: nn.Module, replica: nn.Module, prefix: str, rules: BufferRules
    ) -> None:
        self._homes = [
            _Home(prefix + _name_of(path, key), key, theirs, own, rules)
            for (path, theirs), own in zip(source.named_modules(), replica.modules(), strict=True)
            for key in theirs._buffers
        ]
        first: dict[int, _Home] = {}  # of buffers that are one under several names
        for home in self._homes:
            if home.source is not None and first.setdefault(id(home.source), home) is not home:
                home.share(first[id(home.source)])
        self._done = -1  # of `_Merging`, at the last refresh

    def outdate(self) -> None:
        """Make the next :meth:`refresh` copy all buffers, whatever their versions say."""
        for home in self._homes:
            home.seen = TensorVersion()

    def refresh(self) -> None:
        """Give the replica the source's buffers where either's have changed since."""
        if not self._homes:
            return
        self._done = _Merging.done
        with torch.inference_mode(False):  # a buffer made under it could not be written later
            for home in self._homes:
                source = home.source
                if source is not None and not home.seen.is_still(source):
                    home.start_from(source)

    def check_source(self) -> None:
        """Refuse writes to the source's own buffers since the last :meth:`refresh`.

        Where another thread's run of the same container has merged statistics meanwhile, nothing
        can be told.

        Raises:
            UnsupportedError: Somebody wrote there; the buffer is called by its name.
        """
        for home in self._homes:
            source = home.source
            if source is None or home.seen.is_still(source) or source.is_inference():
                continue
            if self._done == _Merging.begun:  # looked at last: a merge may begin at any moment
                raise UnsupportedError(
                    f"Buffer `{home.name}` of the module itself must stay as it is while replicas "
                    "run, but was changed: a function that holds the module (a lambda with `self`, "
                    "a wrapped method, a loss that is its method) wrote to it past the replica. "
                    "Write to buffers in `forward()`, or compute the loss there with `forward=`."
                )

    def collect(self, weight: float) -> Statistics:
        """Return what a microbatch wrote, weighted; :meth:`refresh` puts the start back."""
        found: Statistics = {}
        for home in self._homes:
            source = home.source
            if source is None:
                home.refuse_new()
            elif home.owner._buffers[home.key] is None:
                home.seen = TensorVersion()
            elif (written := home.written(source)) is not None:
                if not home.was_collected():
                    found[home.name] = home.statistic(written, weight, source)
                home.seen = TensorVersion()
        return found


class _Home:
    """One buffer: where the source keeps it, and where the replica does."""

    def __init__(
        self, name: str, key: str, source: nn.Module, owner: nn.Module, rules: BufferRules
    ) -> None:
        self.name = name
        self.key = key
        self._rule = rules.of(name)
        self.owner = owner
        self.seen = TensorVersion()  # what it was copied from
        self._source = source
        self._start: Tensor | None = None
        self._version = -1
        self.first: _Home | None = None  # where the same buffer is kept under its first name
        self._owners = [owner]  # under all its names

    @property
    def source(self) -> Tensor | None:
        return self._source._buffers[self.key]

    def share(self, first: _Home) -> None:
        """Note that this is the same buffer as ``first`` has."""
        self.first, self._owners = first, first._owners
        self._owners.append(self.owner)

    def start_from(self, source: Tensor) -> None:
        """Give the replica a fresh copy of ``source``, one for all its names."""
        first = self.first
        if first is not None and first.seen.is_still(source) and first.written(source) is None:
            self.owner._buffers[self.key] = self._start = first._start
            self._version, self.seen = first._version, TensorVersion(source)
            return
        before = self.owner._buffers[self.key]
        own = source.detach().clone()
        own = own if before is None else own.to(before.device)
        self.owner._buffers[self.key] = own
        self._start, self._version = own, own._version
        self.seen = TensorVersion(source)

    def was_collected(self) -> bool:
        """Tell whether the buffer was read just before, under its first name."""
        now = self.owner._buffers[self.key]
        if self.first is None or now is not self.first.owner._buffers[self.first.key]:
            return False
        source = self.source
        return source is None or not self.first.seen.is_still(source)  # `collect` forgets it

    def statistic(self, value: Tensor, weight: float, source: Tensor) -> Statistic:
        """Return what a microbatch that left ``value`` brings."""
        rule, dtype = _brought(self._rule, value)
        if rule == "mean":
            return Statistic(value.to(dtype) * weight, weight, rule)
        if rule == "sum" and value.shape == source.shape:
            return Statistic(value - source.detach(), weight, rule)
        return Statistic(value.clone(), weight, rule if rule == "any" else "first")

    def refuse_new(self) -> None:
        """Refuse a buffer that the forward pass made: the source has no place for it."""
        if self.owner._buffers[self.key] is not None:
            self.owner._buffers[self.key] = None
            raise UnsupportedError(
                f"Buffer `{self.name}` must hold a tensor before it is used on replicas, but is "
                "None until the first forward pass. Register it with a tensor."
            )

    def written(self, source: Tensor) -> Tensor | None:
        """Return the replica's buffer on the source's device, or None if it is as it was started.

        It travels there once, whether to be compared or to be returned.
        """
        now = self.owner._buffers[self.key]
        if now is None:
            return None
        told = now is not self._start or now._version != self._version
        # Batch norm's kernel writes its statistics without telling torch's version counter.
        trains = any(owner.training for owner in self._owners)
        if not told and not (trains and now.layout is torch.strided):
            return None
        value = now.detach().to(source.device)
        return value if told or not torch.equal(value, source) else None
