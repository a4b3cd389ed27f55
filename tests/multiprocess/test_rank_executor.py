"""A trainer in every rank of a job: the bits of one process, and failures that all hear of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.errors import ConfigError, PeerError, StateError
from tests.contracts.test_executors_same_bits import (
    Run,
    assert_same_bits,
    made,
    result,
    trainer,
)
from tests.multiprocess.ranks import Ranks
from tests.multiprocess.two_epochs import EPOCHS, batches, train_in_one_process
from tests.zoo import simple_sgd as sgd

pytestmark = pytest.mark.promise("replicas-change-no-bit", "launchers-change-no-bit")


@pytest.fixture(scope="module")
def expected() -> Run:
    return train_in_one_process()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3, backend="phalanx") as ranks:
        yield ranks


def trained_everything(rank: int, replicas: int, folder: Path, stop: int) -> Run:
    torch.manual_seed(100 + rank)  # what rank 0 has is what counts
    losses: list[float] = []
    net = made() if rank == 0 else type(made())()
    with trainer("ranks", replicas, losses, net) as trained:
        trained.fit(batches(), epochs=EPOCHS, steps=stop)
        trained.save(folder)
        return result(trained, losses)


def test_a_stopped_job_is_resumed_by_one_process(
    three: Ranks, expected: Run, tmp_path: Path
) -> None:
    runs = three.run(trained_everything, 1, tmp_path / "checkpoint", 4)
    losses = list(runs[0].losses)
    with trainer("threads", 2, losses, made()) as trained:
        trained.resume(tmp_path / "checkpoint")
        trained.fit(batches(), epochs=EPOCHS)
        assert_same_bits(result(trained, losses), expected)


def resumed(rank: int, folder: Path) -> Run:
    losses: list[float] = []
    with trainer("ranks", 1, losses, made()) as trained:
        trained.resume(folder)
        trained.fit(batches(), epochs=EPOCHS)
        trained.save(folder.with_name(f"end of {len(losses)}"))
        return result(trained, losses)


def test_a_stopped_process_is_resumed_by_a_job(two: Ranks, expected: Run, tmp_path: Path) -> None:
    losses: list[float] = []
    with trainer("threads", 3, losses, made()) as trained:
        trained.fit(batches(), epochs=EPOCHS, steps=8)
        trained.save(tmp_path / "checkpoint")
    for run in two.run(resumed, tmp_path / "checkpoint"):
        run.losses[:0] = losses
        assert_same_bits(run, expected)


class Partly(nn.Module):
    """A part of it is used for some batches only, so its parameters get no gradient in others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.side = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x) + (self.side(x) if float(x[0, 0]) > 0 else 0.0)
        return scores


def rows(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [
        (torch.randn(n, 5, generator=draw), torch.randint(0, 4, (n,), generator=draw))
        for n in sizes
    ]


# -- what goes wrong -----------------------------------------------------


def refused(rank: int, kind: str) -> tuple[str, str, bool]:
    """Do one thing wrong at rank 1, and see that both hear of it and can go on."""
    torch.manual_seed(0)
    net = nn.Linear(5 if not (kind == "model" and rank == 1) else 6, 4)
    batch = good = rows([8000])[0]
    if rank == 1 and kind == "raises":
        batch = (good[0], good[1] + 4)  # targets that are no classes
    if rank == 1 and kind == "sharded":
        ends = torch.arange(8000) % 2000 > 1900  # of the four microbatches
        batch = (good[0] + ends[:, None], good[1])
    kept = [p.clone() for p in net.parameters()]
    with phalanx.Trainer(
        net, nn.functional.cross_entropy, sgd, executor="ranks", microbatches=4
    ) as trained:
        options = trained.optimizer.param_groups[0]
        lr = options["lr"]
        if rank == 1 and kind == "rate":
            options["lr"] = 2 * lr
        try:
            trained.step(batch)
        except Exception as error:
            same = all(map(torch.equal, kept, net.parameters())) or kind == "model"
            options["lr"] = lr
            if kind != "model":
                trained.step(good)
            return type(error).__name__, str(error), same
    return "", "", False


def test_what_one_rank_raises_all_ranks_hear(two: Ranks) -> None:
    (first, told, same), (second, own, own_same) = two.run(refused, "raises")
    assert (first, second) == (PeerError.__name__, "IndexError")
    assert "rank 1 raised IndexError" in told
    assert "Target" in own
    assert same
    assert own_same


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [("sharded", "same batches"), ("model", "same model"), ("rate", "rank 1 has SGD [{'lr': 0.2")],
)
def test_ranks_that_differ_are_refused_everywhere(two: Ranks, kind: str, sentence: str) -> None:
    for name, told, same in two.run(refused, kind):
        assert name == ConfigError.__name__
        assert sentence in told
        assert same


# -- frozen parameters --------------------------------------------------------


def freezing(rank: int, how: str) -> tuple[str, str, int]:
    """Train three epochs of three batches, and freeze a parameter."""
    net = Partly()
    net.body.weight.requires_grad_(not (how == "on one" and rank == 1))

    def act(event: object) -> None:
        freezes = how == "later everywhere" or (how == "later on one" and rank == 1)
        if freezes and isinstance(event, phalanx.StepDone) and event.step == 5:
            net.body.bias.requires_grad_(False)

    with phalanx.Trainer(
        net, nn.functional.cross_entropy, sgd, executor="ranks", callbacks=[act]
    ) as trained:
        try:
            trained.fit(rows([8, 8, 8]), epochs=3)
        except Exception as error:
            return type(error).__name__, str(error), trained.steps
    return "", "", trained.steps


@pytest.mark.parametrize(
    ("how", "steps", "name", "sentence"),
    [
        ("on one", 0, "ConfigError", "the same way, but rank 1 has other frozen parameters"),
        ("later on one", 5, "ConfigError", "All ranks must do the same in the same order"),
        ("later everywhere", 9, "", ""),
    ],
)
def test_all_ranks_must_freeze_the_same_parameters(
    two: Ranks, how: str, steps: int, name: str, sentence: str
) -> None:
    for kind, error, done in two.run(freezing, how):
        assert (kind, done) == (name, steps)
        assert sentence in error


def stepped(rank: int, dies: bool) -> None:
    net = nn.Linear(5, 4)
    with phalanx.Trainer(
        net, nn.functional.cross_entropy, sgd, executor="ranks", microbatches=4
    ) as trained:
        trained.step(rows([8])[0])
        if rank == 1 and dies:
            os._exit(3)
        trained.step(rows([8])[0])


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_rank_that_dies_is_told_to_the_others(backend: str) -> None:
    with Ranks(2, backend=backend) as ranks:
        ranks.run(stepped, False)
        with pytest.raises(AssertionError, match="PeerLost"):
            ranks.run(stepped, True)


def test_without_a_group_it_is_refused() -> None:
    net = nn.Linear(5, 4)
    with (
        phalanx.Trainer(net, nn.functional.cross_entropy, sgd, executor="ranks") as trained,
        pytest.raises(StateError, match="process group"),
    ):
        trained.step(rows([8])[0])
