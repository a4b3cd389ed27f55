"""What ported MXNet code brings along: metrics, monitors, and batches and maps of MXNet's forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phalanx.compat import mxnet
from phalanx.errors import ConfigError
from tests.contracts.containers import cpu_and_others
from tests.contracts.groups import Net

pytestmark = pytest.mark.devices
ROWS = 9


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 1)

    def forward(self, data: Tensor) -> Tensor:
        return self.fc(data)[:, 0]


class Classifier(nn.Module):
    """The loss and what MXNet gave out beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, data: Tensor, softmax_label: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.norm(self.fc(data))
        return nn.functional.cross_entropy(scores, softmax_label), scores.softmax(1)


X = torch.linspace(-1, 1, ROWS * 4).view(ROWS, 4)
Y = torch.linspace(1, 2, ROWS)
CLASSES = torch.arange(ROWS) % 3


def regression_group() -> mxnet.DataParallelExecutorGroup:
    return mxnet.DataParallelExecutorGroup(
        Regression(),
        cpu_and_others(2),
        data_shapes=[("data", (ROWS, 4))],
        label_shapes=[("label", (ROWS,))],
    )


def classifier_group() -> mxnet.DataParallelExecutorGroup:
    return mxnet.DataParallelExecutorGroup(
        Classifier(),
        cpu_and_others(2),
        data_shapes=[("data", (ROWS, 4))],
        label_shapes=[("softmax_label", (ROWS,))],
    )


class Ported(mxnet.EvalMetric):
    """An error that is not symmetric, as a script of MXNet's writes it."""

    def update(self, labels: list[Any], preds: list[Any]) -> None:
        for label, pred in zip(labels, preds, strict=True):
            self.sum_metric += float(((label - pred).abs() / label.abs()).sum())
            self.num_inst += len(label)


def expected_error() -> float:
    outputs = Regression()(X).detach()
    return float(((Y - outputs).abs() / Y.abs()).mean())


@pytest.mark.parametrize("name", ["update_metric", "updateMetric"])
def test_a_ported_metric_is_given_labels_first(name: str) -> None:
    ported = Ported("mape")
    with regression_group() as group:
        group.forward(mxnet.DataBatch([X], [Y]))
        getattr(group, name)(ported, [Y])
    assert ported.get() == ("mape", pytest.approx(expected_error(), rel=1e-5))


def test_a_metric_chooses_outputs_and_labels_by_name_without_padded_rows() -> None:
    with classifier_group() as group:
        group.forward(mxnet.DataBatch([X], [CLASSES], 2), is_train=False)
        names = [name for name, _ in group.get_output_shapes()]
        for outputs in (names[1:], names):
            metric = Shapes("shapes", output_names=outputs, label_names=["softmax_label"])
            assert math.isnan(metric.get()[1])
            group.update_metric(metric, [CLASSES])
            assert metric.found == [[(7,)], [(), (7, 3)][-len(outputs) :]]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, data: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.fc(data)
        return scores, scores[:, 0]


class Shapes(mxnet.EvalMetric):
    def update(self, labels: list[Any], preds: list[Any]) -> None:
        self.found = [[tuple(each.shape) for each in given] for given in (labels, preds)]


def test_several_outputs_and_labels_are_whole_in_a_metric() -> None:
    shapes = Shapes("shapes")
    labels = [torch.ones(ROWS), torch.ones(ROWS, 2)]
    with mxnet.DataParallelExecutorGroup(
        Pair(),
        2,
        data_shapes=[("data", (ROWS, 4))],
        label_shapes=[("a", (ROWS,)), ("b", (ROWS, 2))],
    ) as group:
        group.forward(mxnet.DataBatch([X], labels))
        group.update_metric(shapes, labels)
    assert shapes.found == [[(ROWS,), (ROWS, 2)], [(ROWS, 3), (ROWS,)]]


# --- batches, maps and shapes ---------------------------------------------------------------------


def test_labels_are_left_out_where_none_are_bound() -> None:
    net = Regression()
    with mxnet.DataParallelExecutorGroup(net, 2, data_shapes=[("data", (ROWS, 4))]) as group:
        for batch in (mxnet.DataBatch([X], [Y], 2), mxnet.DataBatch(X, Y, pad=2)):
            group.forward(batch)
            torch.testing.assert_close(group.get_outputs()[0], net(X[:7]).detach())


def test_padded_rows_are_left_out_of_the_outputs() -> None:
    net = Regression()
    with mxnet.DataParallelExecutorGroup(net, 2, data_shapes=[("data", (ROWS, 4))]) as group:
        group.forward(mxnet.DataBatch([X], None, 1))
        assert len(group.get_outputs()[0]) == ROWS - 1


def test_parameters_may_be_missing_and_arrays() -> None:
    net = Net()
    before = net.head.bias.detach().clone()
    with mxnet.DataParallelExecutorGroup(net, 2, data_shapes=[("data", (7, 5))]) as group:
        weight = np.full(net.head.weight.shape, 0.5)
        group.setParams({"head.weight": weight}, {})
        assert torch.equal(net.head.weight, torch.full_like(net.head.weight, 0.5))
        assert torch.equal(net.head.bias, before)
        group.set_params({"head.weight": weight * 2}, {})
        assert float(net.head.weight.detach().mean()) == 1.0
        with pytest.raises(ConfigError, match="are missing"):
            group.setParams({"head.weight": weight}, {}, allow_missing=False)
        with pytest.raises(ConfigError, match="is extra"):
            group.setParams({"head.weight": weight, "tail": weight}, {})
        with pytest.raises(ConfigError, match="must have shape"):
            group.setParams({"head.bias": weight}, {})


def test_parameters_are_read_into_maps_that_hold_more_and_into_arrays() -> None:
    net = Net()
    with mxnet.DataParallelExecutorGroup(net, 2, data_shapes=[("data", (7, 5))]) as group:
        kept = np.zeros(tuple(net.head.weight.shape))
        into: dict[str, Any] = {"head.weight": kept, "other": 3}
        group.getParams(into, {"more": 4})
        assert np.array_equal(kept, net.head.weight.detach().numpy())
        assert into["other"] == 3
        assert torch.equal(into["head.bias"], net.head.bias)
        frozen = np.zeros(tuple(net.head.weight.shape))
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            group.getParams({"head.weight": frozen}, {})
