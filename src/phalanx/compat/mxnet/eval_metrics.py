"""MXNet's base of metrics, from which ported code inherits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


class EvalMetric:
    """The base of MXNet's metrics: a sum over what was counted, and how many that were.

    A group calls :meth:`update` once per batch, with lists of whole labels and outputs, in which
    padded rows are left out: a mean over the batch is then that of one device.

    Args:
        name: What :meth:`get` calls it.
        output_names: Which outputs it sees; default all that are no losses.
        label_names: Which labels it sees; default all.

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
    ) -> None:
        self.name = str(name)
        self.output_names = None if output_names is None else list(output_names)
        self.label_names = None if label_names is None else list(label_names)
        self.reset()

    def update(self, labels: list[Any], preds: list[Any]) -> None:
        """Count one batch; a subclass says how."""
        raise NotImplementedError(
            f"`{type(self).__name__}` must have `update(labels, preds)`, but has none."
        )

    def update_dict(self, label: Mapping[str, Any], pred: Mapping[str, Any]) -> None:
        """Count one batch whose labels and outputs go by name."""
        labels = label if self.label_names is None else self.label_names
        outputs = pred if self.output_names is None else self.output_names
        self.update([label[name] for name in labels], [pred[name] for name in outputs])

    def reset(self) -> None:
        """Forget everything."""
        self.num_inst: float = 0
        self.sum_metric: float = 0.0

    # Any: one name and value, or lists of them, as a subclass likes.
    def get(self) -> tuple[Any, Any]:
        """Return name and value, NaN where nothing was counted."""
        return self.name, self.sum_metric / self.num_inst if self.num_inst else math.nan
