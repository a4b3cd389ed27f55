"""MXNet's metrics: what ported code inherits from, called as ``update(labels, preds)`` with lists.

Shape legend: B rows of the batch; C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError

__all__ = ["Accuracy", "CustomMetric", "EvalMetric"]


class EvalMetric:
    """The base of MXNet's metrics: a sum over what was counted, and how many that were.

    A group calls :meth:`update` once per batch, with lists of whole labels and outputs, in which
    padded rows are left out: a mean over the batch is then that of one device.

    Args:
        name: What :meth:`get` calls it.
        output_names: Which outputs it sees; default all that are no losses.
        label_names: Which labels it sees; default all.

    Example:
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
        **kwargs: Any,  # Any: what MXNet keeps to describe a metric
    ) -> None:
        self.name = str(name)
        self.output_names = None if output_names is None else list(output_names)
        self.label_names = None if label_names is None else list(label_names)
        self._kwargs = kwargs
        self.reset()

    def __repr__(self) -> str:
        return f"EvalMetric: {dict(self.get_name_value())}"

    def update(self, labels: list[Any], preds: list[Any]) -> None:
        """Count one batch; a subclass says how."""
        raise NotImplementedError(
            f"`{type(self).__name__}` must have `update(labels, preds)`, but has none."
        )

    def update_dict(self, label: Mapping[str, Any], pred: Mapping[str, Any]) -> None:
        """Count one batch whose labels and outputs go by name.

        Raises:
            ConfigError: One that this metric sees is missing.
        """
        self.update(
            _picked("label_names", self.label_names, label),
            _picked("output_names", self.output_names, pred),
        )

    def reset(self) -> None:
        """Forget everything."""
        self.num_inst: float = 0
        self.sum_metric: float = 0.0

    def reset_local(self) -> None:
        """Forget everything: there are no counts beside."""
        self.reset()

    # Any: one name and value, or lists of them, as a subclass likes.
    def get(self) -> tuple[Any, Any]:
        """Return name and value, NaN where nothing was counted."""
        return self.name, self.sum_metric / self.num_inst if self.num_inst else math.nan

    def get_global(self) -> tuple[Any, Any]:
        """Return what :meth:`get` does."""
        return self.get()

    def get_name_value(self) -> list[tuple[str, Any]]:
        """Return names and values, as pairs."""
        name, value = self.get()
        if isinstance(name, (list, tuple)):
            return list(zip(name, value, strict=True))
        return [(name, value)]


class Accuracy(EvalMetric):
    """The fraction of rows whose class is the label.

    Args:
        axis: That of the classes in the outputs.

    Shapes:
        outputs [B, C, …], or [B, …] that are classes already; labels [B, …].

    Example:
        >>> metric = Accuracy()
        >>> metric.update([torch.tensor([1, 0])], [torch.tensor([[0.2, 0.8], [0.3, 0.7]])])
        >>> metric.get()
        ('accuracy', 0.5)

    Source: MXNet's ``mx.metric.Accuracy``.
    """

    def __init__(
        self,
        axis: int = 1,
        name: str = "accuracy",
        output_names: Sequence[str] | None = None,
        label_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(name, output_names, label_names, axis=axis)
        self.axis = axis

    def update(self, labels: list[Any], preds: list[Any]) -> None:
        """Count one batch.

        Raises:
            ConfigError: There are not as many labels as outputs, or as many rows.
        """
        labels, preds = _listed(labels), _listed(preds)
        _check_counts(labels, preds)
        for label, pred in zip(map(_tensor, labels), map(_tensor, preds), strict=True):
            found = pred.argmax(self.axis) if pred.shape != label.shape else pred
            if found.shape != label.shape:
                raise ConfigError(
                    f"`labels` must have one class per row of the outputs, {tuple(found.shape)}, "
                    f"but have shape {tuple(label.shape)}."
                )
            same = found.to(torch.int64) == label.to(found.device, torch.int64)
            self.sum_metric += int(same.sum())
            self.num_inst += label.numel()


class CustomMetric(EvalMetric):
    """A function of NumPy arrays as a metric: the mean of what it returns for each batch.

    Args:
        feval: (label, pred) -> value, or (sum, number of rows).
        name: Default: the function's.
        allow_extra_outputs: Whether there may be more outputs than labels; these are left out.

    Example:
        >>> metric = CustomMetric(lambda label, pred: abs(label - pred).max(), "largest")
        >>> metric.update([torch.zeros(3)], [torch.tensor([1.0, -4.0, 2.0])])
        >>> metric.get()
        ('largest', 4.0)

    Source: MXNet's ``mx.metric.CustomMetric``.
    """

    # Any: numbers, or pairs of them.
    def __init__(
        self,
        feval: Callable[[Any, Any], Any],
        name: str | None = None,
        output_names: Sequence[str] | None = None,
        label_names: Sequence[str] | None = None,
        allow_extra_outputs: bool = False,
    ) -> None:
        if not callable(feval):
            raise ConfigError(f"`feval` must be a function of (label, pred), but is {feval!r:.80}.")
        own = getattr(feval, "__name__", type(feval).__name__)
        found = (f"custom({own})" if "<" in own else own) if name is None else name
        super().__init__(found, output_names, label_names)
        self._feval = feval
        self._allow_extra_outputs = allow_extra_outputs

    def update(self, labels: list[Any], preds: list[Any]) -> None:
        """Count one batch.

        Raises:
            ConfigError: There are not as many labels as outputs.
        """
        labels, preds = _listed(labels), _listed(preds)
        if not self._allow_extra_outputs:
            _check_counts(labels, preds)
        for label, pred in zip(labels, preds, strict=False):
            value = self._feval(_array(label), _array(pred))
            total, count = value if isinstance(value, tuple) else (value, 1)
            self.sum_metric += float(total)
            self.num_inst += count


# Any, from here on: tensors, arrays, or lists of them.
def _picked(option: str, names: Sequence[str] | None, given: Mapping[str, Any]) -> list[Any]:
    if names is None:
        return list(given.values())
    for name in names:
        if name not in given:
            raise ConfigError(
                f"`{option}` must name what there is, but names {name!r}. There is "
                f"{', '.join(map(repr, given)) or 'nothing'}."
            )
    return [given[name] for name in names]


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else [values]


def _check_counts(labels: Sequence[Any], preds: Sequence[Any]) -> None:
    if len(labels) != len(preds):
        raise ConfigError(
            f"`labels` must be as many as the outputs ({len(preds)}), but are {len(labels)}. Say "
            "by `output_names` and `label_names` which belong together."
        )


def _tensor(value: Any) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)


def _array(value: Any) -> np.ndarray[Any, Any]:
    if not isinstance(value, Tensor):
        return np.asarray(value)
    plain = value.detach().cpu()
    return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
