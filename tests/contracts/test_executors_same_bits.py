"""The same bits in every configuration: executors, sizes, a stop and a resume."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import phalanx
from tests.worlds import World, in_executor_worlds

STEPS = 12

pytestmark = [
    pytest.mark.filterwarnings("ignore:`replicas` should be at most"),
    pytest.mark.promise("replicas-change-no-bit", "whole-training-loops"),
]


class Everything(nn.Module):
    """A convolution, batch norm, dropout, attention, and a parameter that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 8)
        self.out = nn.Linear(8, 5)
        self.out.bias = nn.Parameter(torch.zeros(5))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x_NCL: Tensor) -> Tensor:
        self.seen += 1
        hidden = self.drop(torch.relu(self.norm(self.conv(x_NCL))))
        hidden = self.attention(hidden.transpose(1, 2)).mean(1)
        hidden = self.frozen(torch.relu(self.head(self.head(hidden))))
        scores: Tensor = self.out(hidden)
        return scores


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(step / STEPS))


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    half = len(parameters) // 2
    return torch.optim.AdamW(
        [
            {"params": parameters[:half], "lr": 3e-3, "weight_decay": 0.1},
            {"params": parameters[half:], "lr": 1e-3},
        ]
    )


def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, warm_up)


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Batches of 13 rows, the last of 5, of which some microbatches are smaller or empty."""
    draw = torch.Generator().manual_seed(5)
    sizes = [13] * (count - 1) + [5]
    return [
        (
            torch.randn(size, 3, 9, generator=draw),
            torch.randint(0, 5, (size,), generator=draw),
        )
        for size in sizes
    ]


@dataclass
class Run:
    """What a run left behind."""

    state: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rates: list[float]
    losses: list[float]


def trainer(executor: str, replicas: int, losses: list[float], net: nn.Module) -> phalanx.Trainer:
    def note(event: object) -> None:
        if isinstance(event, phalanx.StepDone):
            losses.append(event.loss)

    return phalanx.Trainer(
        net,
        nn.functional.cross_entropy,
        adamw,
        executor=executor,
        replicas=replicas,
        microbatches=7,
        seed=11,
        clip_norm=0.5,
        scheduler=schedule,
        scheduler_interval="step",
        callbacks=[note],
    )


def made() -> nn.Module:
    torch.manual_seed(3)
    return Everything()


def result(trained: phalanx.Trainer, losses: list[float]) -> Run:
    moments = {
        f"{index}.{key}": value.clone()
        for index, entries in trained.optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }
    state = {name: value.clone() for name, value in trained.module.state_dict().items()}
    rates = [group["lr"] for group in trained.optimizer.param_groups]
    return Run(state, moments, rates, list(losses))


def train(
    executor: str,
    replicas: int,
    *,
    folder: Path | None = None,
) -> Run:
    losses: list[float] = []
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        trainer(executor, replicas, losses, made()) as trained,
    ):
        for _ in range(3):
            trained.fit(batches())
        assert trained.steps == STEPS
        if folder is not None:
            trained.save(folder)  # by this, ranks have all of the optimizer's state
        return result(trained, losses)


def assert_same_bits(run: Run, expected: Run) -> None:
    assert run.losses == expected.losses
    assert run.rates == expected.rates
    for ours, theirs in ((run.state, expected.state), (run.optimizer, expected.optimizer)):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]), name


@pytest.fixture(scope="module")
def expected() -> Run:
    return train("threads", 1)


@in_executor_worlds
def test_weights_buffers_moments_and_losses_are_the_same_bits(
    world: World, n: int, expected: Run, tmp_path: Path
) -> None:
    for run in world.run(train, n, folder=tmp_path / "checkpoint"):
        assert_same_bits(run, expected)


@pytest.mark.parametrize(
    ("first", "second"), [(("processes", 1), ("threads", 3)), (("inline", 1), ("processes", 2))]
)
def test_a_run_that_is_stopped_and_resumed_on_another_executor_gives_the_same_bits(
    first: tuple[str, int], second: tuple[str, int], expected: Run, tmp_path: Path
) -> None:
    losses: list[float] = []
    folder = tmp_path / "checkpoint"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with trainer(*first, losses, made()) as trained:
            trained.fit(batches())
            trained.fit(batches(), epochs=2, steps=3)  # in the middle of an epoch
            trained.save(folder)
        with trainer(*second, losses, copy.deepcopy(made())) as trained:
            trained.resume(folder)
            rest: Iterable[tuple[Tensor, Tensor]] = batches()
            trained.fit(rest, epochs=3)
            assert trained.steps == STEPS
            assert_same_bits(result(trained, losses), expected)
