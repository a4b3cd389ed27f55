"""Whole passes over a loader: what MXNet's Module did on top of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.clock import now_s
from phalanx.executor_group.batches import DataBatch, DataDesc
from phalanx.executor_group.binding import is_batch
from phalanx.executor_group.group_arguments import (
    check_loader,
    check_metrics,
    check_yielded,
    read_optimizer,
)
from phalanx.executor_group.monitor import Monitor, check_monitor
from phalanx.plan import check_function, read_count

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["Epoch", "Looping", "fit", "predict", "score"]

# Any: a metric's own value.
Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What one epoch of :meth:`DataParallelExecutorGroup.fit` came to.

    Attributes:
        epoch: Which one, from 1.
        batches: How many it had.
        metrics: Their values over the epoch's training batches, as the model was at each.
        validation: Their values over the validation data after it; empty without.
        seconds: What the training took.
    """

    epoch: int
    batches: int
    metrics: Values
    validation: Values
    seconds: float


class Looping(Protocol):
    """What the loops need of a group."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def data_shapes(self) -> tuple[DataDesc, ...]: ...

    @property
    def label_shapes(self) -> tuple[DataDesc, ...]: ...

    @property
    def output_axes(self) -> list[int | None]: ...

    def forward(self, batch: Any, is_train: bool | None = None) -> None: ...

    def backward(self, out_grads: Any = None) -> None: ...

    def outputs(self, merge: bool = True, begin: int = 0, end: int | None = None) -> list[Any]: ...

    def update(self, optimizer: Optimizer) -> None: ...

    def update_metric(self, metric: Any) -> bool: ...

    def install_monitor(self, monitor: Monitor) -> None: ...


def fit(
    group: Looping,
    loader: Iterable[Any],
    *,
    optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer],
    epochs: int,
    metrics: Mapping[str, Any] | None,
    validate: Iterable[Any] | None,
    monitor: Monitor | None,
    on_epoch: Callable[[Epoch], object] | None,
) -> list[Epoch]:
    """Train; see :meth:`DataParallelExecutorGroup.fit`."""
    check_loader("loader", loader)
    check_metrics({} if metrics is None else metrics)
    read_count("epochs", epochs, 1)
    if validate is not None:
        check_loader("validate", validate)
    if monitor is not None:
        check_monitor(monitor)
    if on_epoch is not None:
        check_function("on_epoch", on_epoch)
    optimizer = read_optimizer(
        optimizer, lambda: [p for p in group.module.parameters() if p.requires_grad]
    )
    if monitor is not None:
        group.install_monitor(monitor)
    history: list[Epoch] = []
    try:
        for number in range(1, epochs + 1):
            counted, start_s, batches = _Counted(metrics), now_s(), 0
            for batch in _batches(group, loader):
                if monitor is not None:
                    monitor.tic()
                group.forward(batch, is_train=True)
                group.backward()
                group.update(optimizer)
                counted.update(group)
                if monitor is not None:
                    monitor.toc()
                batches += 1
            check_yielded("loader", batches)
            seconds = now_s() - start_s
            held = {} if validate is None else _measured(group, "validate", validate, metrics)
            epoch = Epoch(
                epoch=number,
                batches=batches,
                metrics=counted.values(),
                validation=held,
                seconds=seconds,
            )
            history.append(epoch)
            if on_epoch is not None:
                on_epoch(epoch)
    finally:
        if monitor is not None:
            monitor.remove()
    return history


def score(group: Looping, loader: Iterable[Any], metrics: Mapping[str, Any]) -> Values:
    """Measure; see :meth:`DataParallelExecutorGroup.score`."""
    check_loader("loader", loader)
    check_metrics(metrics)
    return _measured(group, "loader", loader, metrics)


def _measured(
    group: Looping, name: str, loader: Iterable[Any], metrics: Mapping[str, Any] | None
) -> Values:
    counted, batches = _Counted(metrics), 0
    for batch in _batches(group, loader):
        group.forward(batch, is_train=False)
        counted.update(group)
        batches += 1
    check_yielded(name, batches)
    return counted.values()


def predict(group: Looping, loader: Iterable[Any]) -> Any:  # Any: a tensor or several
    """Collect outputs; see :meth:`DataParallelExecutorGroup.predict`."""
    check_loader("loader", loader)
    columns: list[list[Any]] = []
    axes: list[int | None] = []
    for batch in _batches(group, loader):
        group.forward(batch, is_train=False)
        outputs = group.outputs()
        columns, axes = columns or [[] for _ in outputs], group.output_axes
        for column, output in zip(columns, outputs, strict=True):
            column.append(output)
    whole = [_joined(column, axis) for column, axis in zip(columns, axes, strict=True)]
    return whole[0] if len(whole) == 1 else whole


# Any: a tensor, or a list with what each batch gave.
def _joined(column: list[Any], axis: int | None) -> Any:
    return column if axis is None else torch.cat(column, axis)


class _Counted:
    """Copies of metrics, which have counted nothing, and which of them have since.

    The record is kept here: `update_called` of a metric with others inside stays False.
    """

    # Any: metrics, and functions.
    def __init__(self, metrics: Mapping[str, Any] | None) -> None:
        self._metrics: dict[str, Metric] = {}
        if metrics:
            from phalanx.metrics import group_metrics  # slow: see `replica_metrics`

            self._metrics = {
                name: group_metrics.uncounted(metric) for name, metric in metrics.items()
            }
        self._names: set[str] = set()

    def update(self, group: Looping) -> None:
        """Count the group's last batch."""
        for name, metric in self._metrics.items():
            if group.update_metric(metric):
                self._names.add(name)

    def values(self) -> Values:
        """Return the values of those that have counted anything, numbers as such."""
        found = {name: m.compute() for name, m in self._metrics.items() if name in self._names}
        return {
            name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            for name, value in found.items()
        }


# Any: batches in any of their forms.
def _batches(group: Looping, loader: Iterable[Any]) -> Iterator[Any]:
    """Yield batches; a loader's (data, labels) become one."""
    num_data, num_labels = len(group.data_shapes), len(group.label_shapes)
    for item in loader:
        plain = isinstance(item, (tuple, list)) and not is_batch(item)
        if plain and num_labels and not any(is_batch(each) for each in item):
            if len(item) == num_data + num_labels:
                yield DataBatch(tuple(item[:num_data]), tuple(item[num_data:]))
                continue
            if len(item) == 2:
                yield DataBatch(item[0], item[1])
                continue
        yield item
