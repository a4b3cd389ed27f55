"""`fit` reads loaders as a `for` loop does: to their end, each epoch announced, nothing twice.

The trainer reads them, and not its executor; so one test runs in every executor, and the others,
whose loss notes the rows that it has seen, inline.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import phalanx
from tests.worlds import World, in_executor_worlds

pytestmark = pytest.mark.promise("loaders-are-read-to-their-end", "resume-continues-the-data")

Batch = tuple[Tensor, Tensor]
ROWS = 6


class Seen:
    """A loss that notes which rows it was computed on."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.rows += [int(each) for each in targets[:, 0]]
        return F.mse_loss(outputs, targets)


def trainer(seen: Seen, **options: Any) -> phalanx.Trainer:
    torch.manual_seed(0)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=1e-3)  # noqa: E731
    options = {"executor": "inline", "replicas": 1, "microbatches": 1, **options}
    return phalanx.Trainer(nn.Linear(3, 1), seen, sgd, **options)


def trained(loader: Any, epochs: int) -> list[int]:
    seen = Seen()
    with trainer(seen) as t:
        t.fit(loader, epochs=epochs)
    return seen.rows


def looped(loader: Any, epochs: int, begin: Callable[[int], object] = lambda _: None) -> list[int]:
    """Return the rows of a plain loop."""
    rows = []
    for epoch in range(epochs):
        begin(epoch)
        rows += [int(row) for _, targets in loader for row in targets[:, 0]]
    return rows


def row(index: int) -> Batch:
    return torch.full((3,), float(index)), torch.full((1,), float(index))


class Rows(Dataset[Batch]):
    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Batch:
        self.read += 1
        return row(index)


def order_of(epoch: int) -> list[int]:
    order: list[int] = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order


# -- to their end -------------------------------------------------------


class CountsEpochs(Sampler[int]):
    """Counts its epochs behind its last item, as Accelerate's sampler does."""

    epoch = 0

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        yield from order_of(self.epoch)
        self.epoch += 1


class LoaderThatCounts:
    """A loader of the user's own that does the same."""

    def __init__(self, length: Any) -> None:
        self.length = length
        self.epoch = 0

    def __len__(self) -> int:
        if isinstance(self.length, Exception):
            raise self.length
        return int(self.length)

    def __iter__(self) -> Iterator[Batch]:
        for index in order_of(self.epoch):
            x, y = row(index)
            yield x[None], y[None]
        self.epoch += 1


class Halves(IterableDataset[Batch]):
    """Two workers read 3 rows each, in 2 + 2 batches of 2, but the loader's length is 3."""

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        rows = range(ROWS) if worker is None else range(3 * worker.id, 3 * worker.id + 3)
        return map(row, rows)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Rows(), batch_size=3, sampler=CountsEpochs()),
        lambda: DataLoader(Rows(), batch_sampler=BatchSampler(CountsEpochs(), 3, False)),
        lambda: LoaderThatCounts(ROWS),
        lambda: LoaderThatCounts(ROWS - 2),  # it yields more
        lambda: LoaderThatCounts(ROWS + 2),
        lambda: LoaderThatCounts(RuntimeError("not known yet")),
        lambda: LoaderThatCounts(NotImplementedError("nor this")),
    ],
    ids=["sampler", "batch sampler", "loader", "longer", "shorter", "raises", "not written"],
)
def test_every_epoch_is_read_to_its_end(make: Callable[[], Any]) -> None:
    assert trained(make(), 3) == looped(make(), 3)


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")  # it is torch that warns
def test_rows_beyond_the_length_are_trained_on_and_the_workers_end() -> None:
    children = set(multiprocessing.active_children())
    rows = trained(DataLoader(Halves(), batch_size=2, num_workers=2), 1)
    assert sorted(rows) == list(range(ROWS))
    assert set(multiprocessing.active_children()) == children


def read(executor: str, replicas: int) -> tuple[list[int], int, int]:
    """Return the steps at each epoch's end, and how often the loader has come to its own."""
    loader = DataLoader(Rows(), batch_size=3, sampler=CountsEpochs())
    with trainer(Seen(), executor=executor, replicas=replicas, microbatches=3) as t:
        (first,) = t.fit(loader, steps=2)
        ended = loader.sampler.epoch  # type: ignore[attr-defined]
        steps = [first.steps, *(each.steps for each in t.fit(loader, epochs=3))]
    return steps, ended, loader.sampler.epoch  # type: ignore[attr-defined]


@in_executor_worlds
def test_an_epoch_ends_with_the_last_of_its_steps(world: World, n: int) -> None:
    assert world.run(read, n) == [([2, 4, 6], 1, 3)] * (n if world.name == "ranks" else 1)


# -- epochs are announced -------------------------------------------------


class Announced(Rows):
    """Notes the epochs; a loader, a sampler, a batch sampler or a data set."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.heard: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.heard.append(epoch)


class AnnouncedSampler(Announced):
    def __iter__(self) -> Iterator[int]:
        return iter(order_of(self.epoch))


class AnnouncedBatches(Announced):
    def __iter__(self) -> Iterator[list[int]]:
        order = order_of(self.epoch)
        return iter([order[:3], order[3:]])


MAKERS: dict[str, Callable[[Announced], Any]] = {
    "sampler": lambda it: DataLoader(Rows(), batch_size=3, sampler=it),
    "batch_sampler": lambda it: DataLoader(Rows(), batch_sampler=it),
    "batch_sampler.sampler": lambda it: DataLoader(
        Rows(), batch_sampler=BatchSampler(it, 3, False)
    ),
    "dataset": lambda it: DataLoader(it, batch_size=3),
}


@pytest.mark.parametrize("place", MAKERS)
def test_every_part_of_a_loader_hears_of_the_epoch(place: str) -> None:
    part = AnnouncedBatches() if place == "batch_sampler" else AnnouncedSampler()
    loader = MAKERS[place](part)
    rows = trained(loader, 3)
    assert part.heard == [0, 1, 2]
    assert rows == looped(loader, 3, part.set_epoch)


@pytest.mark.parametrize("place", MAKERS)
def test_an_announced_epoch_resumes_where_it_was_left(place: str, tmp_path: Path) -> None:
    def make() -> Any:
        part = AnnouncedBatches() if place == "batch_sampler" else AnnouncedSampler()
        return MAKERS[place](part)

    first, then = Seen(), Seen()
    with trainer(first) as t:
        t.fit(make(), steps=3)
        t.save(tmp_path / "c")
    with trainer(then) as t:
        t.resume(tmp_path / "c")
        t.fit(make(), steps=3)
    assert first.rows + then.rows == trained(make(), 3)


# -- nothing twice, nothing lost ------------------------------------------


class Stream:
    """A source that does not begin again."""

    def __init__(self) -> None:
        self.source = itertools.count()

    def __iter__(self) -> Iterator[Batch]:
        for index in self.source:
            x, y = row(index)
            yield x[None], y[None]


@pytest.mark.parametrize("ends", ["steps", "stop", "error"])
def test_a_stream_continues_with_the_next_fit(ends: str) -> None:
    seen = Seen()

    def end(event: object) -> None:
        if ends != "steps" and isinstance(event, phalanx.StepDone) and event.step % 2 == 0:
            t.stop()
            if ends == "error":
                raise ValueError("ends it")

    with trainer(seen, callbacks=[end]) as t:
        stream = Stream()
        for _ in range(3):
            try:
                t.fit(stream, steps=2 if ends == "steps" else 10)
            except ValueError:
                assert ends == "error"
    assert seen.rows == list(range(6))


def test_a_batch_whose_step_failed_comes_first_in_the_next_fit() -> None:
    seen = Seen()
    with trainer(seen) as t:
        stream = Stream()
        t.fit(stream, steps=2)
        t.module.weight.requires_grad_(False)
        t.module.weight.data.fill_(float("nan"))
        with pytest.raises(phalanx.PhalanxError):
            t.fit(stream, steps=2)
        t.module.weight.data.fill_(0.0)
        t.fit(stream, steps=2)
    assert seen.rows == [0, 1, 2, 2, 3]


def test_a_loader_is_not_read_again_to_continue() -> None:
    data = Rows()
    with trainer(Seen()) as t:
        loader = DataLoader(data, batch_size=1)
        for _ in range(ROWS):
            t.fit(loader, steps=1)
        assert t.epochs == 1
    assert data.read == ROWS


def test_an_iterator_that_is_spent_after_one_epoch_is_refused_for_two() -> None:
    with trainer(Seen()) as t, pytest.raises(phalanx.ConfigError, match=r"`loader` must .*, but "):
        t.fit(iter([tuple(each[None] for each in row(0))]), epochs=2)
    assert t.steps == 1


def test_a_loader_that_ends_before_the_place_in_its_epoch_is_refused() -> None:
    with trainer(Seen()) as t:
        t.fit(DataLoader(Rows(), batch_size=1), steps=2)
        with pytest.raises(phalanx.ConfigError, match="the 2 batches of this epoch"):
            t.fit([])
        assert (t.epochs, t.steps) == (0, 2)


# -- an order of its own ----------------------------------------------------


class Augmented(Rows):
    """Draws from each of the process's generators."""

    def __getitem__(self, index: int) -> Batch:
        drawn = torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])
        return torch.full((3,), float(index)), torch.cat([drawn, torch.tensor([float(index)])])


class Drawn:
    """A loss that notes the targets, and draws as callbacks may."""

    def __init__(self) -> None:
        self.targets: list[list[float]] = []

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.targets += targets.tolist()
        return F.mse_loss(outputs, targets[:, :1])


def disturb(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def augmented(workers: int) -> DataLoader[Batch]:
    return DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=workers)


def drawn(seed: int = 0, workers: int = 0) -> list[list[float]]:
    noted = Drawn()
    with trainer(noted, seed=seed) as t:
        t.fit(augmented(workers), epochs=2)
    return noted.targets


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_drawn_for_a_batch_belongs_to_seed_epoch_and_batch(workers: int) -> None:
    first = drawn(workers=workers)
    disturb(5)
    assert drawn(workers=workers) == first
    assert drawn(seed=1, workers=workers) != first
    assert first[:ROWS] != first[ROWS:]


@pytest.mark.parametrize("stop", [1, 3, 4])  # in the first epoch, at its end, in the second
def test_a_resumed_run_draws_what_it_would_have_drawn(stop: int, tmp_path: Path) -> None:
    noted = Drawn()
    with trainer(noted) as t:
        t.fit(augmented(0), epochs=2, steps=stop)
        t.save(tmp_path / "c")
    disturb(5)
    with trainer(noted) as t:
        t.resume(tmp_path / "c")
        t.fit(augmented(0), epochs=2)
    assert noted.targets == drawn()


def test_reading_moves_no_generator_of_the_process() -> None:
    with trainer(Drawn()) as t:
        disturb(5)
        expected = torch.rand(()).item(), np.random.rand(), random.random()
        disturb(5)
        t.fit(augmented(0), epochs=2)
        assert (torch.rand(()).item(), np.random.rand(), random.random()) == expected


SAMPLERS = [
    RandomSampler(Rows()),
    RandomSampler(Rows(), replacement=True),
    WeightedRandomSampler([1.0, 5, 2, 2, 1, 9], ROWS),
    SubsetRandomSampler(range(ROWS)),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["shuffle", "replacement", "weighted", "subset"])
def test_the_order_is_the_same_for_any_number_of_the_loaders_workers(sampler, tmp_path: Path):
    def loader(workers: int, **how: bool) -> DataLoader[Batch]:
        return DataLoader(Rows(), 2, sampler=sampler, num_workers=workers, **how)

    expected = trained(loader(0), 2)
    assert trained(loader(2), 2) == expected
    assert trained(loader(1, persistent_workers=True), 2) == expected
    seen = Seen()
    with trainer(seen) as t:
        t.fit(loader(2), steps=2)
        t.save(tmp_path / "c")
    with trainer(seen) as t:
        t.resume(tmp_path / "c")
        t.fit(loader(0), epochs=2)
    assert seen.rows == expected
