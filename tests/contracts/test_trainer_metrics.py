"""A metric sees what a plain loop shows it: each batch once, whole and in order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MeanSquaredError, Metric, MetricCollection, PearsonCorrCoef
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
)
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, Running

from phalanx import Layout, Trainer
from phalanx.callbacks import CSV, Checkpoint, History
from phalanx.errors import CheckpointError, ConfigError
from tests.worlds import World, in_executor_worlds

pytestmark = pytest.mark.promise("whole-batch-metrics")

CLASSES = 3


class Scaled(nn.Module):
    """Gives back what it gets, to the bit however a batch is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class MeanOfBatches(Metric):
    """The mean over batches of their largest error: microbatches would give another."""

    full_state_update = False
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx=None)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        before = self.mean * (self.update_count - 1)
        self.mean = (before + (outputs.argmax(1) - targets).abs().max()) / self.update_count

    def compute(self) -> Tensor:
        return self.mean


class Flat(PearsonCorrCoef):
    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update(outputs.sum(1), targets.float())


def spread(outputs: Tensor, targets: Tensor) -> Tensor:
    """A function of all rows, in their order."""
    return (outputs[:, 0] - targets).cumsum(0).median()


MAKE: dict[str, Callable[[], Any]] = {
    "logits": lambda: MulticlassAUROC(CLASSES),  # normalized where an update is outside of [0, 1]
    "accuracy": lambda: MulticlassAccuracy(CLASSES, average="micro"),
    "batches": MeanOfBatches,
    "no rule": Flat,
    "of two": lambda: MulticlassAccuracy(CLASSES) * 2 + MeanOfBatches(),
    "running": lambda: Running(MulticlassAccuracy(CLASSES), window=2),
    "values": lambda: RunningMean(window=2),
    "function": lambda: spread,
}


def draw(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, CLASSES, generator=generator)
    x[::2] = x[::2].softmax(1)  # some microbatches look like probabilities
    return x, torch.randint(CLASSES, (rows,), generator=generator)


BATCHES = [draw(rows, seed) for seed, rows in enumerate((15, 9, 4))]


def plain_loop(batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    metrics = {name: make() for name, make in MAKE.items()}
    for x, y in batches:
        for name, metric in metrics.items():
            if name != "function":
                metric.update(x) if name == "values" else metric.update(x, y)
    found = {name: each.compute() for name, each in metrics.items() if name != "function"}
    found["function"] = spread(*(torch.cat(each) for each in zip(*batches, strict=True)))
    return {name: float(str(np.float32(value.item()))) for name, value in found.items()}


def trainer(module: nn.Module | None = None, **options: Any) -> Trainer:
    still = lambda parameters: torch.optim.SGD(parameters, lr=0.0)  # noqa: E731
    options = {"replicas": 1, "metrics": {name: make() for name, make in MAKE.items()}, **options}
    loss = options.pop("loss", nn.functional.cross_entropy)
    return Trainer(module or Scaled(), loss, still, **options)


def counted(executor: str, replicas: int, **options: Any) -> list[dict[str, float]]:
    """Return what an epoch and two evaluations have found."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said of functions, or of what has no rule
        run = trainer(executor=executor, replicas=replicas, **options)
    with run:
        (done,) = run.fit(BATCHES)
        found = [done.train, run.evaluate(BATCHES), run.evaluate(BATCHES)]
    return [{name: each[name] for name in MAKE} for each in found]


@in_executor_worlds
def test_fit_and_evaluate_give_the_values_of_a_plain_loop(world: World, n: int) -> None:
    for found in world.run(counted, n, microbatches=5):
        assert found == [plain_loop(BATCHES)] * 3


def test_so_do_slices() -> None:
    found = counted("threads", 3, microbatches=None)
    assert found == [plain_loop(BATCHES)] * 3


def test_the_users_metric_is_a_pattern_only() -> None:
    metric = MAKE["accuracy"]()
    with trainer(metrics={"m": metric}) as run:
        run.evaluate(BATCHES)
    assert metric.update_count == 0


def test_a_resumed_epoch_counts_its_first_batches_too(tmp_path: Path) -> None:
    """Metrics inside of metrics, their numbers of updates, and functions."""
    with trainer(microbatches=2) as run:
        run.fit(BATCHES, steps=2)
        run.save(tmp_path / "c")
    with trainer(microbatches=2) as run:
        run.resume(tmp_path / "c")
        (done,) = run.fit(BATCHES)
    assert {name: done.train[name] for name in MAKE} == plain_loop(BATCHES)


@pytest.mark.parametrize(
    "other", [MeanMetric(), spread, MulticlassAccuracy(CLASSES + 1, average="macro")]
)
def test_the_counts_of_another_metric_are_refused(other: Any, tmp_path: Path) -> None:
    with trainer(metrics={"m": MulticlassAccuracy(CLASSES, average="macro")}) as run:
        run.fit(BATCHES, steps=1)
        run.save(tmp_path / "c")
    with trainer(metrics={"m": other}) as run:
        with pytest.raises(CheckpointError, match="Give `metrics=` as they were"):
            run.resume(tmp_path / "c")
        assert run.steps == 0


class Moody(MeanSquaredError):
    """Fails halfway when it counts the second batch."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += len(outputs)
        if len(outputs) == 9:
            raise RuntimeError("moody")


class Steep(Scaled):
    """Has no finite gradient for one of the pieces of the second batch."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return outputs + (self.scale - 1).sum().sqrt() if len(x) == 5 else outputs


@pytest.mark.parametrize("reason", ["moody", "norm must be finite"])
def test_a_refused_step_leaves_metrics_as_they_were(reason: str) -> None:
    metrics = {name: make() for name, make in MAKE.items()}
    if reason == "moody":
        metrics["moody"] = Moody()
    with trainer(Steep(), metrics=metrics, clip_norm=1.0, microbatches=2) as run:
        with pytest.raises((RuntimeError, ConfigError), match=reason):
            run.fit(BATCHES)
        assert run.steps == 1
        (done,) = run.fit([BATCHES[0], BATCHES[2]])
    expected = plain_loop([BATCHES[0], BATCHES[2]])
    assert {name: done.train[name] for name in MAKE} == expected


def test_steps_outside_of_an_epoch_count_in_no_metric() -> None:
    with trainer() as run:
        run.fit(BATCHES, steps=2)
        run.step(BATCHES[0])
        (done,) = run.fit(BATCHES)
    assert {name: done.train[name] for name in MAKE} == plain_loop(BATCHES)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (3, r"'m' is 3\."),
        (MeanSquaredError, r"Give an object: MeanSquaredError\(…\)"),
        (MetricCollection([MeanSquaredError()]), r"Give its metrics by name"),
    ],
)
def test_what_is_no_metric_is_refused(metric: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(metrics={"m": metric})


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(0.31), 0.31),
        (torch.tensor([0.1], dtype=torch.float64), 0.1),
        (torch.tensor(3), 3.0),
        (np.float32(0.7), 0.7),
        (2, 2.0),
    ],
)
def test_values_are_floats_without_the_digits_of_float32(value: Any, expected: float) -> None:
    with trainer(metrics={"m": lambda outputs, targets: value}) as run:
        found = run.evaluate(BATCHES)["m"]
    assert (type(found), found) == (float, expected)


def test_each_number_of_a_metric_has_its_name(tmp_path: Path) -> None:
    several = {
        "confusion": MulticlassConfusionMatrix(CLASSES),
        "each": MulticlassAccuracy(CLASSES, average=None),
        "extremes": MinMaxMetric(MulticlassAccuracy(CLASSES)),
        "classes": ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None)),
    }
    table, history = CSV(tmp_path / "epochs.csv"), History()
    best = Checkpoint(tmp_path / "best", monitor="train.extremes.raw", mode="max")
    with trainer(metrics=several, callbacks=[table, history, best]) as run:
        (done,) = run.fit(BATCHES)
        assert run.epochs == 1
    with trainer(metrics=several) as run:
        run.fit(BATCHES, steps=1)
        run.save(tmp_path / "c")
    with trainer(metrics=several) as run:
        run.resume(tmp_path / "c")
        assert run.fit(BATCHES)[0].train == done.train
    outputs, targets = (torch.cat(each) for each in zip(*BATCHES, strict=True))
    counts = several["confusion"](outputs, targets)
    each = several["each"](outputs, targets)
    names = [f"confusion.{row}.{column}" for row in range(CLASSES) for column in range(CLASSES)]
    assert [done.train[name] for name in names] == counts.flatten().tolist()
    for name in ("each.{}", "classes.multiclassaccuracy_{}"):
        found = [done.train[name.format(place)] for place in range(CLASSES)]
        assert found == pytest.approx(each.tolist())
    assert done.train["extremes.raw"] == pytest.approx(float(each.mean()))
    assert history.epochs[0].train == done.train
    assert "train.confusion.2.1" in (tmp_path / "epochs.csv").read_text()
    assert best.best is not None


# --- how pieces become one ------------------------------------------------------------------------


def boxes(*sizes: int) -> list[dict[str, Tensor]]:
    return [{"boxes": torch.full((size, 4), float(size))} for size in sizes]


JOINED: dict[str, tuple[list[Any], Any]] = {
    "rows": ([torch.tensor([1, 2]), torch.tensor([3])], torch.tensor([1, 2, 3])),
    "tokens": ([torch.ones(6, 2), torch.ones(3, 2)], torch.ones(9, 2)),
    "columns": (
        [[torch.ones(2), torch.zeros(2)], [torch.ones(1), torch.zeros(1)]],
        [torch.ones(3), torch.zeros(3)],
    ),
    "a dict for each image": ([boxes(2, 5), boxes(1)], boxes(2, 5, 1)),
    "lists of texts": ([["a", "b"], ["c"]], ["a", "b", "c"]),
    "tuples of texts": ([("a", "b"), ("c",)], ("a", "b", "c")),
    "arrays": ([{"x": np.ones(2)}, {"x": np.ones(1)}], {"x": np.ones(3)}),
    "means": ([torch.tensor(1.0), torch.tensor(4.0)], torch.tensor(2.0)),
    "counts": ([torch.tensor(1), torch.tensor(4)], torch.tensor([1, 4])),
    "a size": ([(28, 28), (28, 28)], (28, 28)),
}


def joined(parts: list[Any], targets: Any, **options: Any) -> tuple[Any, Any]:
    """Return outputs and targets as a metric gets them, for pieces of two rows and of one."""
    seen: list[Any] = []

    def forward(module: nn.Module, batch: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return module(batch[0]).sum(), parts[int(batch[0][0, 0])]

    def metric(*given: Any) -> float:
        seen.append(given)
        return 0.0

    rows = torch.tensor([[0.0], [0.0], [1.0]]).expand(3, CLASSES)
    options = {"metrics": {"m": metric}, "microbatches": 2, **options}
    with trainer(loss=None, forward=forward, **options) as run:
        run.evaluate([(rows, targets)])
    return seen[-1]


@pytest.mark.parametrize("case", JOINED)
def test_pieces_become_what_the_whole_batch_would_be(case: str) -> None:
    parts, expected = JOINED[case]
    found, _ = joined(parts, torch.zeros(3))
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)


def test_targets_become_one_as_the_layout_has_split_them() -> None:
    layout = Layout(dims={"1.tokens": 1, "1.frequencies": None})
    whole = {"tokens": torch.arange(12).view(4, 3), "frequencies": torch.ones(2)}
    _, found = joined([torch.ones(2), torch.ones(1)], whole, layout=layout)
    assert repr(found) == repr(whole)


def test_pieces_of_several_structures_are_refused() -> None:
    with pytest.raises(ConfigError, match="of one structure for every microbatch"):
        joined([{"a": torch.ones(2)}, {"b": torch.ones(1)}], torch.zeros(3))
