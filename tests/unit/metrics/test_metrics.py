"""Metrics over unequal slices against one metric that sees the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    PearsonCorrCoef,
    SumMetric,
)
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryAveragePrecision,
    MulticlassAccuracy,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.text import Perplexity

from phalanx import Trainer
from phalanx.errors import CheckpointError, ConfigError
from phalanx.executor_group import Collected, GroupMetrics, ReplicaMetrics
from phalanx.metrics.accumulator import move

pytestmark = pytest.mark.promise("whole-batch-metrics")

SIZES = (1, 5, 9)
PAD = 3
KINDS = 4
EXACT = 1e-12


def scores(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def classes(seed: int, *shape: int, kinds: int = KINDS) -> Tensor:
    return torch.randint(kinds, shape, generator=torch.Generator().manual_seed(100 + seed))


ROWS = sum(SIZES) + PAD

Case = tuple[Callable[[], Metric], Callable[[int], tuple[Tensor, Tensor]]]
CASES: dict[str, Case] = {
    "accuracy": (
        lambda: MulticlassAccuracy(KINDS, average="micro"),
        lambda seed: (scores(seed, ROWS, KINDS), classes(seed, ROWS)),
    ),
    "macro F1": (
        lambda: MulticlassF1Score(KINDS, average="macro"),
        lambda seed: (scores(seed, ROWS, KINDS), classes(seed, ROWS)),
    ),
    "AUROC": (
        BinaryAUROC,
        lambda seed: (scores(seed, ROWS).sigmoid(), classes(seed, ROWS, kinds=2)),
    ),
    "MSE": (MeanSquaredError, lambda seed: (scores(seed, ROWS), scores(seed + 50, ROWS))),
    "perplexity": (
        lambda: Perplexity(ignore_index=0),
        lambda seed: (scores(seed, ROWS, 5, KINDS), classes(seed, ROWS, 5)),
    ),
    "Pearson": (PearsonCorrCoef, lambda seed: (scores(seed, ROWS), scores(seed + 50, ROWS))),
    "sum": (SumMetric, lambda seed: (scores(seed, ROWS), scores(seed, ROWS))),
    "maximum": (MaxMetric, lambda seed: (scores(seed, ROWS), scores(seed, ROWS))),
    "mean of states": (
        lambda: MeanOfBatches(),
        lambda seed: (scores(seed, ROWS), scores(seed + 50, ROWS)),
    ),
    "metric of metrics": (
        lambda: MeanSquaredError() * 2,
        lambda seed: (scores(seed, ROWS), scores(seed + 50, ROWS)),
    ),
    "function": (
        lambda: Collected(lambda x, y: (x - y).abs().median()),
        lambda seed: (scores(seed, ROWS), scores(seed + 50, ROWS)),
    ),
}
MERGED = ("accuracy", "macro F1", "AUROC", "MSE", "perplexity", "sum", "function")


def update(name: str, metric: Metric, x: Tensor, y: Tensor) -> None:
    """Count a batch without its padded rows, as one device would."""
    metric.update(x[:-PAD]) if name in ("maximum", "sum") else metric.update(x[:-PAD], y[:-PAD])


class MeanOfBatches(Metric):
    """The mean over batches of their mean error: merging its states would weigh slices alike."""

    full_state_update = False
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        before = self.mean * (self.update_count - 1)
        self.mean = (before + (outputs - labels).abs().mean()) / self.update_count

    def compute(self) -> Tensor:
        return self.mean


def cut(*columns: Tensor, sizes: Sequence[int] = SIZES) -> list[Any]:
    """Return what a group gives of each device: padded rows are the last ones, and gone."""
    rows = sum(sizes)
    parts = [column[:rows].split(list(sizes)) for column in columns]
    parts += [(None,) * len(sizes)] * (3 - len(parts))
    return list(zip(*parts, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_three_unequal_slices_give_the_value_of_the_whole(name: str) -> None:
    make, draw = CASES[name]
    metric, expected = make().set_dtype(torch.float64), make().set_dtype(torch.float64)
    group = GroupMetrics()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seed in range(3):
            x, y = draw(seed)
            group.update_metric(metric, cut(x, y))
            update(name, expected, x, y)
            assert abs(float(metric.compute()) - float(expected.compute())) < EXACT
    assert len(told) == (name not in MERGED)


@pytest.mark.parametrize("name", MERGED)
def test_parts_do_not_meet_before_they_are_merged(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: these are merged, not gathered."""
    monkeypatch.setattr("phalanx.metrics.accumulator.gather", None)
    make, draw = CASES[name]
    GroupMetrics().update_metric(make(), cut(*draw(0)))


def test_rows_in_lists_keep_their_order() -> None:
    metric, values = CatMetric(), scores(0, 15).float()
    GroupMetrics().update_metric(metric, cut(values))
    GroupMetrics().update_metric(metric, cut(values + 1))
    assert torch.equal(metric.compute(), torch.cat([values, values + 1]))


def test_counts_are_the_same_bits() -> None:
    x, y = scores(0, 15, KINDS), classes(0, 15)
    metric, expected = MulticlassF1Score(KINDS), MulticlassF1Score(KINDS)
    GroupMetrics().update_metric(metric, cut(x, y))
    expected.update(x, y)
    for name, state in expected.metric_state.items():
        assert torch.equal(getattr(metric, name), state)


def test_devices_without_rows_are_left_out() -> None:
    x, y = scores(0, 4), scores(1, 4)
    metric = MeanSquaredError().set_dtype(torch.float64)
    parts = [None, *cut(x, y, sizes=(0, 3, 1))]
    GroupMetrics().update_metric(metric, parts)
    assert abs(metric.compute() - (x - y).square().mean()) < EXACT
    GroupMetrics().update_metric(metric, [None, (x[:0], y[:0], None)])
    assert metric.update_count == 2  # the two parts that had rows


def test_what_a_metric_learns_beside_states_is_kept() -> None:
    class Remembers(SumMetric):
        width: int | None = None

        def update(self, value: Tensor) -> None:
            self.width = value.shape[1]
            super().update(value)

    metric = Remembers()
    GroupMetrics().update_metric(metric, cut(scores(0, 15, 7)))
    assert metric.width == 7


def test_a_collection_is_counted_member_by_member() -> None:
    def make() -> MetricCollection:
        return MetricCollection([MulticlassPrecision(KINDS), MulticlassF1Score(KINDS)])

    collection, expected = make(), make()
    for seed in range(3):
        x, y = scores(seed, 15, KINDS), classes(seed, 15)
        GroupMetrics().update_metric(collection, cut(x, y))
        expected.update(x, y)
        assert collection.compute() == expected.compute()


def test_members_that_share_their_lists_do_not_count_twice() -> None:
    members = {"auroc": BinaryAUROC(), "precision": BinaryAveragePrecision()}
    collection = MetricCollection(dict(members), compute_groups=[["auroc", "precision"]])
    for seed in range(3):
        x, y = scores(seed, 15).sigmoid(), classes(seed, 15, kinds=2)
        GroupMetrics().update_metric(collection, cut(x, y))
        collection.compute()
    assert sum(map(len, collection["precision"].preds)) == 45


def test_a_metric_with_a_metric_inside_is_gathered() -> None:
    class Outer(MeanSquaredError):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MeanMetric()

        def update(self, outputs: Tensor, labels: Tensor) -> None:
            self.inner.update(outputs)
            super().update(outputs, labels)

    metric, x = Outer(), scores(0, 15).float()
    with pytest.warns(UserWarning, match="it has other metrics inside"):
        GroupMetrics().update_metric(metric, cut(x, x))
    assert float(metric.inner.compute()) == pytest.approx(float(x.mean()))


def test_what_was_counted_is_not_copied_for_every_batch() -> None:
    class Heavy(Tensor):
        def __deepcopy__(self, memo: object) -> Heavy:
            raise AssertionError("copied")

    metric = CatMetric()
    metric.value.append(torch.ones(2).as_subclass(Heavy))
    GroupMetrics().update_metric(metric, cut(scores(0, 15).float()))
    assert len(metric.compute()) == 17


def test_a_metric_that_is_moved_keeps_its_dtype() -> None:
    metric = MeanMetric().set_dtype(torch.float64)
    move(metric, torch.device("meta"))
    assert (metric.dtype, metric.device.type) == (torch.float64, "meta")


@pytest.mark.parametrize("dims", [(1, 0), (0, 1)])
def test_rows_may_lie_along_another_dim_where_they_are_gathered(dims: tuple[int, int]) -> None:
    class Seen:
        def update(self, outputs: Tensor, labels: Tensor) -> None:
            self.outputs, self.labels = outputs, labels

    x, y, seen = scores(0, 15, 15, 3), classes(0, 15, 15), Seen()
    parts = list(zip(x.split(SIZES, dims[0]), y.split(SIZES, dims[1]), (None,) * 3, strict=True))
    with pytest.warns(UserWarning, match=r"`Seen` cannot be merged .* no `torchmetrics.Metric`"):
        GroupMetrics().update_metric(seen, parts, dims=dims)
    assert torch.equal(seen.outputs, x)
    assert torch.equal(seen.labels, y)


def test_nested_outputs_and_lists_of_rows_are_gathered() -> None:
    class Seen:
        def update(self, outputs: Any, labels: Any) -> None:
            self.outputs, self.labels = outputs, labels

    seen = Seen()
    parts = [
        ({"a": torch.ones(1), "b": (torch.zeros(1, 2),)}, ["x"], None),
        ({"a": torch.ones(2), "b": (torch.zeros(2, 2),)}, ["y", "z"], None),
    ]
    with pytest.warns(UserWarning, match="cannot be merged"):
        GroupMetrics().update_metric(seen, parts)
    assert seen.outputs["a"].shape == (3,)
    assert seen.outputs["b"][0].shape == (3, 2)
    assert seen.labels == ["x", "y", "z"]


# -- weights ---------------------------------------------------------


def test_rows_weigh_what_they_are_given() -> None:
    values, weights = scores(0, 15), scores(1, 15).abs()
    metric = MeanMetric().set_dtype(torch.float64)
    parts = [(x, None, w) for x, w in zip(values.split(SIZES), weights.split(SIZES), strict=True)]
    GroupMetrics().update_metric(metric, parts)
    assert abs(metric.compute() - (values * weights).sum() / weights.sum()) < EXACT


def test_a_row_weighs_the_same_in_all_its_columns() -> None:
    values, weights = scores(0, 15, 2), scores(1, 15).abs()
    metric = MeanMetric().set_dtype(torch.float64)
    parts = [(x, None, w) for x, w in zip(values.split(SIZES), weights.split(SIZES), strict=True)]
    GroupMetrics().update_metric(metric, parts)
    expected = (values * weights[:, None]).sum() / (2 * weights.sum())
    assert abs(metric.compute() - expected) < EXACT


@pytest.mark.parametrize("by", ["weights", "labels"])
def test_one_loss_per_device_weighs_as_many_rows_as_it_stands_for(by: str) -> None:
    rows = scores(0, 15)
    metric = MeanMetric().set_dtype(torch.float64)
    parts = [
        (part.mean(), part if by == "labels" else None, torch.ones(len(part)))
        if by == "weights"
        else (part.mean(), part, None)
        for part in rows.split(SIZES)
    ]
    GroupMetrics().update_metric(metric, parts)
    assert abs(metric.compute() - rows.mean()) < EXACT


def test_labels_are_not_taken_for_weights() -> None:
    values = scores(0, 15)
    metric = MeanMetric().set_dtype(torch.float64)
    GroupMetrics().update_metric(metric, cut(values, classes(0, 15)))
    assert abs(metric.compute() - values.mean()) < EXACT


class Weighted(MeanMetric):
    """Does not say whether it can be merged."""

    full_state_update = None


@pytest.mark.filterwarnings("ignore:.*cannot be merged:UserWarning")
def test_gathered_losses_weigh_as_many_rows_as_they_stand_for() -> None:
    rows, metric = scores(0, 15), Weighted().set_dtype(torch.float64)
    parts = [(part.mean(), part, None) for part in rows.split(SIZES)]
    GroupMetrics().update_metric(metric, parts)
    assert abs(metric.compute() - rows.mean()) < EXACT


def test_gathered_metrics_get_weights_too() -> None:
    values, weights = scores(0, 15), scores(1, 15).abs()
    metric = Weighted().set_dtype(torch.float64)
    parts = [(x, None, w) for x, w in zip(values.split(SIZES), weights.split(SIZES), strict=True)]
    with pytest.warns(UserWarning, match="full_state_update=None"):
        GroupMetrics().update_metric(metric, parts)
    assert abs(metric.compute() - (values * weights).sum() / weights.sum()) < EXACT


X, Y, W = scores(0, 15), scores(1, 15), torch.ones(15)


@pytest.mark.parametrize(
    ("metric", "parts", "message"),
    [
        (MeanSquaredError(), [(X, Y, W)], r"`weights` must be None for metric `MeanSquaredError`"),
        (MeanMetric(), [(X, None, W), (X, None, None)], r"for all 2 devices .* given for 1\."),
        (MeanMetric(), [(X.mean(), None, None)], r"how many rows a device's one number"),
        (MeanSquaredError, [(X, Y, None)], r"`metric` must be a `torchmetrics.Metric` or have"),
        (lambda x, y: 0, [(X, Y, None)], r"Wrap a function in `Collected`"),
        (Collected(len), [({"x": X}, Y, None)], r"`Collected` must be given tensors .* dict"),
    ],
)
def test_what_cannot_be_counted_is_refused(metric: Any, parts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GroupMetrics().update_metric(metric, parts)
    if isinstance(metric, Metric):
        assert metric.update_count == 0


def test_a_batch_that_fails_on_one_device_is_not_counted_at_all() -> None:
    metric = MeanSquaredError()
    group = GroupMetrics()
    group.update_metric(metric, cut(X, Y))
    before = {name: state.clone() for name, state in metric.metric_state.items()}
    parts = cut(X, Y)
    parts[2] = (parts[2][0], Y[:2], None)
    with pytest.raises(RuntimeError, match="same shape"):
        group.update_metric(metric, parts)
    assert metric.metric_state == before
    group.update_metric(metric, cut(X, Y))
    assert float(metric.compute()) == pytest.approx(float((X - Y).square().mean()))


# -- by name, over microbatches --------------------------------------


def parts_of(seed: int) -> list[Any]:
    return cut(scores(seed, 15).float(), scores(seed + 50, 15).float())


def test_who_counts_does_not_show_in_the_bits() -> None:
    def run(replica_of: list[int]) -> dict[str, Tensor]:
        metrics = ReplicaMetrics({"mse": MeanSquaredError()})

        def each(work: Callable[[int], None]) -> None:
            for replica in (2, 0, 1):
                work(replica)

        for seed in range(3):
            metrics.count(parts_of(seed), replica_of=replica_of, each=each)
            metrics.commit()
        return metrics.capture()

    first, second = run([0, 1, 2]), run([2, 2, 0])
    assert {name: value.tolist() for name, value in first.items()} == {
        name: value.tolist() for name, value in second.items()
    }


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*cannot be merged:UserWarning")
def test_a_batch_counts_when_it_is_committed_and_once(name: str) -> None:
    make, draw = CASES[name]
    pattern, expected = make().set_dtype(torch.float64), make().set_dtype(torch.float64)
    metrics = ReplicaMetrics({"m": pattern})
    assert metrics.compute() == {}
    for seed in range(2):
        x, y = draw(seed)
        update(name, expected, x, y)
        metrics.count(cut(*draw(7)))  # given up
        metrics.count(cut(x, y))
        metrics.commit()
        metrics.commit()
        assert metrics.compute()["m"] == pytest.approx(float(expected.compute()), abs=EXACT)
    assert pattern.update_count == 0
    metrics.reset()
    assert metrics.compute() == {}


@pytest.mark.filterwarnings("ignore:.*cannot be merged:UserWarning")
@pytest.mark.parametrize("make", [SumMetric, PearsonCorrCoef])
def test_nothing_is_left_of_a_batch_that_failed_or_came_before_it(
    make: Callable[[], Metric],
) -> None:
    metrics = ReplicaMetrics({"m": make()})
    metrics.count(parts_of(0))
    bad = parts_of(1)
    bad[2] = ("no tensor", 3, None)
    with pytest.raises(Exception, match=r".") as caught:  # whatever the metric says
        metrics.count(bad)
    assert not isinstance(caught.value, AssertionError)
    metrics.commit()
    assert metrics.compute() == {}


def test_a_copy_counts_for_itself_and_warns_of_nothing() -> None:
    with pytest.warns(UserWarning, match="it is a function"):
        metrics = ReplicaMetrics({"worst": lambda x, y: (x - y).abs().max()})
    with pytest.warns(UserWarning, match="has no `dist_reduce_fx`"):
        gathered = ReplicaMetrics({"m": PearsonCorrCoef()})
    metrics.update(parts_of(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = metrics.copy()
        gathered.copy()
    assert other.compute() == {}
    other.update(parts_of(1))
    (x, y), (z, w) = ((scores(s, 15).float(), scores(s + 50, 15).float()) for s in (0, 1))
    assert metrics.compute() == {"worst": pytest.approx(float((x - y).abs().max()))}
    assert other.compute() == {"worst": pytest.approx(float((z - w).abs().max()))}


@pytest.mark.filterwarnings("ignore:.*cannot be merged:UserWarning")
def test_counting_goes_on_from_what_was_captured() -> None:
    def make() -> ReplicaMetrics:
        return ReplicaMetrics(
            {"mse": MeanSquaredError(), "pearson": PearsonCorrCoef(), "all": Collected(worst)}
        )

    def worst(x: Tensor, y: Tensor) -> Tensor:
        return (x - y).abs().max()

    straight, first, second = make(), make(), make()
    for seed in range(4):
        straight.update(parts_of(seed))
        (first if seed < 2 else second).update(parts_of(seed))
        if seed == 1:
            second.restore(first.capture())
    assert straight.compute() == second.compute()


def test_another_metrics_counts_are_refused() -> None:
    metrics = ReplicaMetrics({"m": MeanSquaredError()})
    metrics.update(parts_of(0))
    with pytest.raises(CheckpointError, match="MeanMetric"):
        ReplicaMetrics({"m": MeanMetric()}).restore(metrics.capture())


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (3, r"'m' is 'int'"),
        (MeanSquaredError, r"the class 'MeanSquaredError'. Give an object: MeanSquaredError\(…\)"),
        (MetricCollection([MeanSquaredError()]), r"Give its metrics by name"),
    ],
)
def test_what_is_no_metric_is_refused(metric: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplicaMetrics({"m": metric})


def test_a_metric_of_several_numbers_is_refused_when_it_is_asked_for() -> None:
    metrics = ReplicaMetrics({"m": MulticlassAccuracy(KINDS, average=None)})
    metrics.update(cut(scores(0, 15, KINDS), classes(0, 15)))
    with pytest.raises(ConfigError, match="must compute one number"):
        metrics.compute()


class PlainNumber(MeanSquaredError):
    """As what users write computes it."""

    def compute(self) -> Any:
        return float(super().compute())


def test_a_number_that_is_no_tensor_is_one_too() -> None:
    plain, usual = (ReplicaMetrics({"m": kind()}) for kind in (PlainNumber, MeanSquaredError))
    for metrics in (plain, usual):
        metrics.update(parts_of(0))
    assert plain.compute() == usual.compute()


# -- in a trainer ----------------------------------------------------


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1).double()


@pytest.mark.parametrize("name", ["Pearson", "mean of states", "MSE"])
@pytest.mark.filterwarnings("ignore:.*cannot be merged:UserWarning")
def test_a_trainers_metric_sees_each_batch_as_one(name: str) -> None:
    metric, expected = (CASES[name][0]().set_dtype(torch.float64) for _ in range(2))
    x, y = scores(0, 15, 4), scores(1, 15)
    loader = [(x, y), (x[:7], y[:7])]
    module = net()
    with torch.no_grad():
        for inputs, targets in loader:
            expected.update(module(inputs).squeeze(1), targets)
    squeezed = nn.Sequential(module, nn.Flatten(0))
    for options in ({"workloads": SIZES}, {"microbatches": 4}):
        with Trainer(
            squeezed,
            nn.MSELoss(),
            sgd,
            replicas=3,
            metrics={"m": metric},
            **{"microbatches": None, **options},
        ) as trainer:
            assert abs(trainer.evaluate(loader)["m"] - float(expected.compute())) < EXACT


def test_a_refused_step_counts_nothing() -> None:
    x, y = scores(0, 15, 4), scores(1, 15, 1)
    module = net()
    with Trainer(
        module,
        nn.MSELoss(),
        sgd,
        microbatches=None,
        replicas=3,
        clip_norm=1.0,
        metrics={"m": MeanSquaredError().set_dtype(torch.float64)},
    ) as trainer:

        def batches() -> Any:
            yield x, y
            with pytest.raises(ConfigError, match="finite"):
                trainer.step((x * float("nan"), y))

        with torch.no_grad():
            expected = float((module(x) - y).square().mean())
        (done,) = trainer.fit(batches())
    assert done.train["m"] == pytest.approx(expected)
