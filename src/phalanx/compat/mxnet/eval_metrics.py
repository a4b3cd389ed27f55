"""MXNet's base of metrics: ported code inherits from it, or lets torchmetrics count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from phalanx.metrics import as_floats, update_metric
from phalanx.types import Nested


# Any, here and below: a metric of torchmetrics, and values of any form.
class EvalMetric:
    """A metric with MXNet's interface: a subclass counts, or a metric of torchmetrics does.

    A group calls :meth:`update_dict` once for each batch, with whole labels and outputs, in order
    and without padded rows. The value is that of one device.

    Args:
        name: Its name in :meth:`get`.
        output_names: The outputs that it sees; default: those with dims, else the losses.
        label_names: The labels that it sees; default: all.
        metric: A `torchmetrics.Metric` that counts. None: :meth:`update` of a subclass adds to
            `sum_metric` and `num_inst`.

    Example:
        >>> import torch
        >>> class MeanAbsoluteError(EvalMetric):
        ...     def update(self, labels, preds):
        ...         for label, pred in zip(labels, preds):
        ...             self.sum_metric += float((label - pred).abs().mean())
        ...             self.num_inst += 1
        >>> metric = MeanAbsoluteError("mae")
        >>> metric.update([torch.ones(2)], [torch.zeros(2)])
        >>> metric.get()
        ('mae', 1.0)

    Source: MXNet's ``mx.metric.EvalMetric``.
    """

    def __init__(
        self,
        name: str,
        output_names: Sequence[str] | None = None,
        label_names: Sequence[str] | None = None,
        *,
        metric: Any = None,
    ) -> None:
        self.name = name
        self.output_names = output_names
        self.label_names = label_names
        self.metric = metric
        self.reset()

    def update(self, labels: list[Any], preds: list[Any]) -> None:
        """Count one batch."""
        if self.metric is None:
            raise NotImplementedError(f"`{type(self).__name__}` must define `update`.")
        update_metric(self.metric, one_or_all(preds), one_or_all(labels))
        self.num_inst += 1

    def update_dict(self, label: Mapping[str, Any], pred: Mapping[str, Any]) -> None:
        """Count one batch, with labels and outputs by name."""
        labels = label if self.label_names is None else self.label_names
        outputs = pred if self.output_names is None else self.output_names
        self.update([label[name] for name in labels], [pred[name] for name in outputs])

    def reset(self) -> None:
        """Forget everything that was counted."""
        self.num_inst: float = 0
        self.sum_metric: float = 0.0
        if self.metric is not None:
            self.metric.reset()

    def get(self) -> tuple[Any, Any]:
        """Return the name and the value, or a list of each; NaN where nothing was counted."""
        if not self.num_inst:
            return self.name, math.nan
        if self.metric is None:
            return self.name, self.sum_metric / self.num_inst
        found = as_floats(self.name, self.metric.compute())
        if len(found) == 1:
            return next(iter(found.items()))
        return list(found), list(found.values())


def one_or_all(tensors: Iterable[Tensor]) -> Nested:
    """Return the one of ``tensors``, or a list of all; None without any."""
    found = list(tensors)
    return found[0] if len(found) == 1 else found or None
