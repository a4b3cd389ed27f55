"""Over uneven and padded slices a metric sees each batch once, whole and in order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import MeanMetric, classification, text

from phalanx.compat.mxnet import DataBatch, EvalMetric
from tests.contracts.containers import draw
from tests.contracts.groups import (
    F64,
    THREE,
    WORKLOADS,
    Loss,
    Net,
    classes,
    desc,
    group_of,
    labels_desc,
)
from tests.zoo import assert_close, gradients_of

pytestmark = [pytest.mark.devices, pytest.mark.promise("executor-groups", "mxnet")]

ROWS, PAD = 18, 3  # so that 15 rows count, and are cut to 1, 5 and 9
KINDS = 4

# float64 rounding of sums over some tens of terms
EXACT = 1e-12


class Probabilities(nn.Module):
    """Gives back what it gets: the metric sees just what the test wrote."""

    def forward(self, scores: Tensor) -> Tensor:
        return scores


def scores(seed: int, *shape: int) -> Tensor:
    return draw(*shape, seed=seed).softmax(-1)


METRICS = {
    "AUROC of logits": (  # normalized where an update is outside of [0, 1]
        lambda: classification.MulticlassAUROC(KINDS),
        lambda seed: (
            torch.cat([scores(seed, ROWS - 9, KINDS), draw(9, KINDS, seed=seed)]),
            classes(ROWS, seed),
        ),
    ),
    "perplexity": (
        lambda: text.Perplexity(ignore_index=-100),
        lambda seed: (
            scores(seed, ROWS, 5, KINDS).log(),
            with_ignored(classes(ROWS * 5, seed).view(ROWS, 5)),
        ),
    ),
}


def with_ignored(tokens: Tensor) -> Tensor:
    """Ignore other tokens in every row, so that rows do not weigh the same."""
    kept = torch.arange(tokens.shape[1]) < (1 + torch.arange(len(tokens)) % 5).unsqueeze(1)
    return tokens.where(kept, -100)


def made(name: str) -> torchmetrics.Metric:
    return METRICS[name][0]().set_dtype(F64)


def padded(values: Tensor) -> Tensor:
    """Return the values with nonsense in the padded rows, which must count nowhere."""
    spoilt = values.clone()
    spoilt[-PAD:] = spoilt[:PAD].flip(-1) if spoilt.dim() > 1 else spoilt[:PAD]
    return spoilt


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("batches", [1, 3])
def test_padded_rows_on_uneven_slices_equal_the_single_device(name, batches):
    metric, expected = made(name), made(name)
    first, labels = METRICS[name][1](0)
    data = desc("scores", *first.shape)
    label = desc("label", *labels.shape, dtype=labels.dtype)
    with group_of(Probabilities(), data, label_shapes=[label]) as group:
        for seed in range(batches):
            x, y = METRICS[name][1](seed)
            group.forward(DataBatch(padded(x), padded(y), pad=PAD), is_train=False)
            assert [part.stop - part.start for part in group.slices] == WORKLOADS
            group.update_metric(metric, DataBatch(padded(x), padded(y), pad=PAD).label)
            expected.update(x[:-PAD], y[:-PAD])
    assert abs(float(metric.compute()) - float(expected.compute())) < EXACT


def test_padded_rows_enter_no_gradient_and_no_statistic():
    class Normed(Loss):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5).double()

        def forward(self, data: Tensor, label: Tensor) -> Tensor:
            self.norm(data)
            return super().forward(data, label)

    net, twin = Normed(), Loss()
    x, y = draw(ROWS, 5), classes(ROWS)
    spoilt = x.clone()
    spoilt[-PAD:] = float("nan")
    with group_of(
        net,
        desc("data", ROWS, 5),
        label_shapes=[labels_desc(ROWS)],
        workload=[0, 0, 1],
        devices=THREE,
    ) as group:
        group.forward(DataBatch(spoilt, y, pad=PAD))
        group.backward()
        expected = twin(x[:-PAD], y[:-PAD])
        assert_close(group.get_outputs()[0], expected.detach(), F64)
    expected.backward()
    assert_close(gradients_of(net)[:4], gradients_of(twin), F64)
    assert_close(net.norm.running_mean, 0.1 * x[:-PAD].mean(0), F64)


def test_outputs_have_no_padded_rows():
    x = draw(ROWS, 5)
    with group_of(nn.Tanh(), desc("input", ROWS, 5), inputs_need_grad=True) as group:
        group.forward(DataBatch(x, pad=PAD))
        assert torch.equal(group.get_outputs()[0].cpu(), x[:-PAD].tanh())
        group.backward([torch.ones(ROWS - PAD, 5, dtype=F64)])
        grad = group.get_input_grads()[0]
        assert_close(grad, 1 - x[:-PAD].tanh().square(), F64)


# --- outputs and labels ---------------------------------------------------------------------------


def test_a_loss_stands_for_its_rows_where_labels_have_them_in_another_dim():
    class Mean(nn.Module):
        def forward(self, data: Tensor, label: Tensor) -> Tensor:
            return (data * label).mean()

    x, y, mean = draw(3, 15), draw(3, 15, seed=1), MeanMetric().set_dtype(F64)
    labels = [desc("mask", 3, layout="C"), desc("label", 3, 15, layout="TN")]
    with group_of(Mean(), desc("data", 3, 15, layout="TN"), label_shapes=labels) as group:
        group.forward(DataBatch(x, {"label": y, "mask": draw(3)}))
        group.update_metric(mean)
    assert_close(mean.compute(), (x * y).mean(), F64)


def test_labels_are_left_out_where_none_are_bound():
    x, y, net = draw(ROWS, 5), classes(ROWS), Net()
    with group_of(net, desc("data", ROWS, 5)) as group:
        for batch in (DataBatch([x], [y], PAD), DataBatch(x, y, pad=PAD)):
            group.forward(batch)
            assert_close(group.get_outputs()[0], net(x[:-PAD]).detach(), F64)


# --- MXNet's own metrics --------------------------------------------------------------------------


class Both(Loss):
    """The loss, and the output that MXNet gave beside it."""

    def forward(self, data: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        scores = Net.forward(self, data)
        return nn.functional.cross_entropy(scores, label), scores.softmax(1)


class Ported(EvalMetric):
    """An asymmetric error, as a script for MXNet writes it, and the shapes that it was given."""

    def reset(self) -> None:
        super().reset()
        self.found: list[list[tuple[int, ...]]] = []

    def update(self, labels: list[Any], preds: list[Any]) -> None:
        self.found += [[tuple(each.shape) for each in given] for given in (labels, preds)]
        for label, pred in zip(labels, preds, strict=False):
            values = pred[:, 0] if pred.dim() else pred
            self.sum_metric += float((values / (1 + label)).sum())
            self.num_inst += len(label)


def error_of(x: Tensor, y: Tensor) -> float:
    return float((Both()(x, y)[1][:, 0] / (1 + y)).mean().detach())


@pytest.mark.parametrize("name", ["update_metric", "updateMetric"])
def test_a_ported_metric_is_given_whole_labels_and_outputs_without_padded_rows(name):
    x, y, metric = draw(ROWS, 5), classes(ROWS), Ported("error")
    assert math.isnan(metric.get()[1])
    with group_of(Both(), desc("data", ROWS, 5), label_shapes=[labels_desc(ROWS)]) as group:
        group.forward(DataBatch(padded(x), padded(y), pad=PAD))
        getattr(group, name)(metric, padded(y))
    assert metric.found == [[(ROWS - PAD,)], [(ROWS - PAD, KINDS)]]
    assert metric.get() == ("error", pytest.approx(error_of(x[:-PAD], y[:-PAD]), rel=EXACT))
    metric.reset()
    assert math.isnan(metric.get()[1])


def test_a_metric_chooses_outputs_and_labels_by_name():
    x, y = draw(ROWS, 5), classes(ROWS)
    labels = [labels_desc(ROWS), desc("weights", ROWS, 2)]
    with group_of(Both(), desc("data", ROWS, 5), label_shapes=labels) as group:
        group.reshape([desc("data", ROWS, 5)])  # labels stay bound
        group.forward(DataBatch(x, [y, draw(ROWS, 2)]))
        loss, _ = (name for name, _ in group.get_output_shapes())
        metric = Ported("error", [loss], ["weights"])
        group.update_metric(metric)
        assert metric.found == [[(ROWS, 2)], [()]]


def test_torchmetrics_counts_behind_mxnets_names():
    made = [classification.MulticlassRecall(KINDS, average=average) for average in ("macro", None)]
    metrics = [EvalMetric("recall", metric=each) for each in made]
    x, y = draw(ROWS, 5), classes(ROWS)
    with group_of(Both(), desc("data", ROWS, 5), label_shapes=[labels_desc(ROWS)]) as group:
        for inputs, labels in ((draw(ROWS, 5, seed=1), classes(ROWS, 1)), (padded(x), padded(y))):
            group.forward(DataBatch(inputs, labels, pad=PAD))
            for metric in metrics:
                metric.reset()
                assert math.isnan(metric.get()[1])
                group.update_metric(metric)
    expected = classification.MulticlassRecall(KINDS, average=None)
    values = expected(Both()(x, y)[1][:-PAD], y[:-PAD]).tolist()
    assert metrics[0].get() == ("recall", pytest.approx(sum(values) / KINDS))
    assert metrics[1].get() == ([f"recall.{k}" for k in range(KINDS)], pytest.approx(values))
