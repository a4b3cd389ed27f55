"""Data that the replicas read: the order and the numbers of the loader, whoever reads what."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import phalanx
from phalanx import ConfigError


class Noisy(Dataset[Any]):
    """Rows that draw from all three generators when they are read."""

    def __init__(self, size: int = 29) -> None:
        draw = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(size, 4, generator=draw)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return self.inputs[place] + 0.1 * noise, self.inputs[place].sum()[None]


class Deadly(Noisy):
    """The first who reads row 7 dies of it."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self.token = token

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        if place == 7:
            try:
                os.close(os.open(self.token, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(place)


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        Noisy() if dataset is None else dataset,
        batch_size=6,
        shuffle=True,
        generator=torch.Generator().manual_seed(4),
        **options,
    )


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def train(executor: Any, replicas: int, data: Any, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    with phalanx.Trainer(
        net,
        nn.functional.mse_loss,
        adam,
        executor=executor,
        replicas=replicas,
        microbatches=3,
        shard_loading=True,
        **options,
    ) as trainer:
        trainer.fit(data, epochs=2)
        loss = trainer.evaluate(DataLoader(Noisy(11), batch_size=4))["loss"]
    return {**net.state_dict(), "loss": torch.tensor(loss, dtype=torch.float64)}


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return train("inline", 1, loader())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("executor", "replicas"), [("threads", 3), ("processes", 1)])
def test_what_samples_draw_is_the_same_whoever_reads_them(
    executor: str, replicas: int, expected: dict[str, Tensor]
) -> None:
    assert_same(train(executor, replicas, loader()), expected)


def mask(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Join samples and hide some entries, by all three generators."""
    inputs, targets = (torch.stack(each) for each in zip(*samples, strict=True))
    shift = random.random() + float(np.random.rand())
    return inputs.masked_fill(torch.rand(inputs.shape) < 0.3, shift), targets


@pytest.mark.parametrize(
    ("executor", "replicas"), [("threads", 1), ("threads", 2), ("threads", 3), ("processes", 1)]
)
def test_what_collate_draws_is_the_same_whoever_joins(executor: str, replicas: int) -> None:
    options: dict[str, Any] = {"collate_fn": mask}
    expected = train("inline", 1, loader(**options))
    torch.seed(), random.seed(), np.random.seed()
    assert_same(train(executor, replicas, loader(**options)), expected)


class Seeds(Noisy):
    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(place)
        return super().__getitem__(place)


class Keeps(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return torch.rand(4, generator=self.own), torch.zeros(1)


@pytest.mark.parametrize(
    ("kind", "told"), [(Seeds, "calls `manual_seed`"), (Keeps, "`torch.Generator` that was seeded")]
)
@pytest.mark.parametrize(
    ("executor", "replicas"), [("inline", 1), ("threads", 2), ("processes", 1)]
)
def test_a_data_set_that_seeds_for_all_is_refused(
    kind: type[Noisy], told: str, executor: str, replicas: int
) -> None:
    with pytest.raises(phalanx.UnsupportedError, match=f"A data set must .* {told}"):
        train(executor, replicas, loader(kind()))


def test_another_thread_keeps_torchs_numbers_while_samples_are_read() -> None:
    torch.manual_seed(1)
    net = nn.Linear(4, 1)
    found: list[Tensor] = []
    done = threading.Event()

    def draw() -> None:
        while not done.is_set():
            found.append(torch.rand(()))

    with phalanx.Trainer(
        net, nn.functional.mse_loss, adam, replicas=2, microbatches=3, shard_loading=True
    ) as trainer:
        order = torch.utils.data.SequentialSampler(range(29))  # draws nothing itself
        data = DataLoader(Noisy(), 6, sampler=order, generator=torch.Generator())
        torch.manual_seed(7)
        thread = threading.Thread(target=draw)
        thread.start()
        try:
            trainer.fit(data, epochs=2)
        finally:
            done.set()
            thread.join()
    own = torch.Generator().manual_seed(7)
    assert [each.item() for each in found] == [torch.rand((), generator=own).item() for _ in found]


def test_a_reader_that_dies_does_not_show(expected: dict[str, Tensor], tmp_path: Any) -> None:
    lost: list[phalanx.WorkerLost] = []
    data = loader(Deadly(str(tmp_path / "dead")))
    assert_same(train(phalanx.Processes(on_failure=lost.append), 2, data), expected)
    assert [each.reason.split()[3] for each in lost] == ["SIGKILL"]


class KeepsAtMost:
    """A call that fails in a worker that keeps more of what it was sent once."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, worker: Any) -> None:
        kept = [name for name in worker.saved if name.startswith("once")]
        assert len(kept) <= self.most, kept


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_data_sets_of_loaders_that_are_gone_are_kept_nowhere(executor: str) -> None:
    """A notebook makes a loader for every call."""
    options: dict[str, Any] = {"executor": executor, "replicas": 2, "microbatches": 2}
    with phalanx.Trainer(
        nn.Linear(4, 1), nn.functional.mse_loss, adam, shard_loading=True, **options
    ) as trainer:
        seen: list[weakref.ref[Any]] = []
        for _ in range(5):
            data = Noisy(12)
            trainer.fit(loader(data))
            trainer.evaluate(loader(data))
            seen.append(weakref.ref(data))
            del data
            gc.collect()
        assert sum(each() is not None for each in seen) <= 1  # that of a run to be gone on with
        replicas = trainer._engine.executor
        if executor == "processes":
            told = replicas.each(lambda i: replicas.call_worker(i, lambda _: KeepsAtMost(3)))
            control = replicas.each(lambda i: replicas.call_worker(i, lambda _: KeepsAtMost(0)))
            assert (told, control) == ([True, True], [False, False])


def test_the_order_is_the_loaders_own() -> None:
    seen: list[float] = []

    class Rows(TensorDataset):
        def __getitem__(self, place: Any) -> Any:
            seen.append(float(place))
            return super().__getitem__(place)

    rows = Rows(torch.arange(29.0)[:, None], torch.zeros(29, 1))
    plain = [row for inputs, _ in loader(rows) for row in inputs[:, 0].tolist()]
    seen.clear()
    with phalanx.Trainer(
        nn.Linear(1, 1), nn.functional.mse_loss, adam, executor="inline", shard_loading=True
    ) as trainer:
        trainer.fit(loader(rows))
    assert seen[-29:] == plain


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize("data", [[(torch.ones(2, 1), torch.ones(2, 1))], DataLoader(Stream())])
def test_what_has_no_places_is_refused(data: Any) -> None:
    with (
        phalanx.Trainer(
            nn.Linear(1, 1), nn.functional.mse_loss, adam, replicas=2, shard_loading=True
        ) as trainer,
        pytest.raises(ConfigError, match="`loader` must be a"),
    ):
        trainer.fit(data)


@pytest.mark.parametrize("option", ["weight", "layout"])
def test_options_that_need_the_rows_are_refused(option: str) -> None:
    value: Any = len if option == "weight" else phalanx.Layout()
    with pytest.raises(ConfigError, match=f"`{option}` must be None"):
        phalanx.Trainer(
            nn.Linear(1, 1), nn.functional.mse_loss, adam, shard_loading=True, **{option: value}
        )


def test_nobody_elses_generators_move() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    before = random.random(), float(np.random.rand())
    random.seed(3)
    np.random.seed(3)
    train("inline", 1, loader())
    assert (random.random(), float(np.random.rand())) == before
