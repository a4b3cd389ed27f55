"""The same bits in every configuration: executors, sizes, a stop and a resume. Tolerance: none."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import phalanx
from phalanx.cli.data import open_data
from phalanx.replicas import num_cores
from tests.worlds import EXECUTORS, World, in_executor_worlds
from tests.zoo import CNN_NORM, GPT_DROPOUT, MLP, Case, batches_of, sgd, state_of

EPOCHS, STEPS = 2, 8
MICROBATCHES = 7
HANDOVER_S = 30.0  # a deadline, not a delay: the others need milliseconds

pytestmark = pytest.mark.promise("replicas-change-no-bit", "whole-training-loops")


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
        (torch.randn(size, 3, 9, generator=draw), torch.randint(0, 5, (size,), generator=draw))
        for size in sizes
    ]


@dataclass
class Run:
    """What a run left behind."""

    state: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rates: list[float]
    losses: list[float]


@contextmanager
def trainer(
    executor: str, replicas: int, losses: list[float], net: nn.Module, **options: Any
) -> Iterator[phalanx.Trainer]:
    """Train in bfloat16."""

    def note(event: object) -> None:
        if isinstance(event, phalanx.StepDone):
            losses.append(event.loss)

    given = {"microbatches": MICROBATCHES, "seed": 11, **options}
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        phalanx.Trainer(
            net,
            nn.functional.cross_entropy,
            adamw,
            executor=executor,
            replicas=replicas,
            clip_norm=0.5,
            scheduler=schedule,
            scheduler_interval="step",
            callbacks=[note],
            **given,
        ) as trained,
    ):
        yield trained


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
    net: nn.Module | None = None,
    **options: Any,
) -> Run:
    losses: list[float] = []
    with trainer(executor, replicas, losses, net or made(), **options) as trained:
        for _ in range(EPOCHS):
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


class LateDrop(nn.Dropout):
    """Dropout in some microbatches of later steps; the program's own numbers make it fail."""

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() <= 0.1:
            return x
        assert torch.rand(()) != torch.rand((), generator=torch.Generator().manual_seed(2))
        return super().forward(x)


LATE = replace(CNN_NORM, name="late", build=lambda: nn.Sequential(LateDrop(), CNN_NORM.build()))


@pytest.mark.parametrize("case", [MLP, CNN_NORM, GPT_DROPOUT, LATE], ids=str)
def test_models_of_other_kinds_train_to_the_same_bits(case: Case) -> None:
    found = []
    for executor, replicas in EXECUTORS:
        net, generator = case.build(), torch.manual_seed(2).get_state()
        with phalanx.Trainer(
            net, case.loss, sgd, executor=executor, replicas=replicas, microbatches=8
        ) as trained:
            losses = [trained.step(each).loss for each in batches_of(case, 12, torch.float32, 5)]
        assert torch.equal(generator, torch.get_rng_state())
        found.append(Run(state_of(net), {}, [], losses))
    for run in found[1:]:
        assert_same_bits(run, found[0])


@pytest.mark.parametrize(
    ("first", "second", "stop"),
    [
        (("processes", 1), ("threads", 3), 7),
        (("inline", 1), ("processes", 2), 4),  # at the end of an epoch
        (("threads", 2), ("inline", 1), 1),
    ],
)
def test_a_run_that_is_stopped_and_resumed_on_another_executor_gives_the_same_bits(
    first: tuple[str, int], second: tuple[str, int], stop: int, expected: Run, tmp_path: Path
) -> None:
    losses: list[float] = []
    folder = tmp_path / "checkpoint"
    with trainer(*first, losses, made()) as trained:
        trained.fit(batches(), epochs=EPOCHS, steps=stop)
        trained.save(folder)
    with trainer(*second, losses, made()) as trained:
        trained.resume(folder)
        trained.fit(batches(), epochs=EPOCHS)
        assert trained.steps == STEPS
        assert_same_bits(result(trained, losses), expected)


# --- who computes what ----------------------------------------------------------------------------


class Laggard:
    """A hook that holds one replica back until the others have begun all else in the step.

    So the replica `slow` computes at most one microbatch of every step: the most unequal division
    there can be, without a clock.
    """

    def __init__(self, slow: int) -> None:
        self.name = f"phalanx-replica-{slow}"
        self.held = 0
        self._begun = 0
        self._condition = threading.Condition()

    def __call__(self, module: nn.Module, args: Any) -> None:
        with self._condition:
            self._begun += 1
            self._condition.notify_all()
            if threading.current_thread().name != self.name:
                return
            self.held += 1
            last_of_step = -(-self._begun // MICROBATCHES) * MICROBATCHES
            if not self._condition.wait_for(lambda: self._begun >= last_of_step, HANDOVER_S):
                raise TimeoutError(f"nobody took over the microbatches of {self.name}")


@pytest.mark.parametrize(("replicas", "slow"), [(2, 0), (3, 1)])
def test_a_slow_replica_does_not_show(replicas: int, slow: int, expected: Run) -> None:
    laggard, net = Laggard(slow), made()
    net.register_forward_pre_hook(laggard)
    data = batches()[:1] * STEPS  # without empty microbatches
    runs = []
    for each, count in ((net, replicas), (made(), 1)):
        losses: list[float] = []
        with trainer("threads", count, losses, each) as trained:
            trained.fit(data)
            runs.append(result(trained, losses))
    assert 0 < laggard.held <= STEPS
    assert_same_bits(*runs)


# --- what a default chooses -----------------------------------------------------------------------


@pytest.mark.promise("automatic-choices-change-no-bit")
def test_fresh_runs_that_fix_nothing_and_runs_on_fixed_replicas_have_one_hash() -> None:
    """The README's example."""

    def digest(**options: Any) -> str:
        torch.manual_seed(0)
        digits = DataLoader(open_data("digits").train, batch_size=64, shuffle=True)
        layers = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)
        net = nn.Sequential(*layers, nn.Linear(16 * 36, 10))
        with phalanx.Trainer(net, nn.CrossEntropyLoss(), adamw, **options) as trainer:
            trainer.fit(digits, steps=4)
        weights = b"".join(each.numpy().tobytes() for each in net.state_dict().values())
        return hashlib.sha256(weights).hexdigest()

    runs = [{}, {}, {}, {"replicas": "auto"}, {"replicas": 1}, {"replicas": 2}, {"replicas": 4}]
    assert len({digest(**options) for options in runs}) == 1


def test_without_microbatches_one_replica_computes_on_all_cores() -> None:
    with phalanx.Trainer(MLP.build(), MLP.loss, sgd, microbatches=None) as trainer:
        assert len(trainer.devices) == 1
        assert trainer.intra_op == num_cores()
    with phalanx.Trainer(MLP.build(), MLP.loss, sgd) as trainer:
        assert len(trainer.devices) == min(4, num_cores())
        assert trainer.intra_op == 1


@pytest.mark.promise("fast-mode-repeats")
def test_a_run_without_microbatches_repeats() -> None:
    first, second = (train("threads", 3, microbatches=None) for _ in range(2))
    assert_same_bits(second, first)


# --- autocast -------------------------------------------------------------------------------------


def adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Multiplies matrices in its step, so an autocast around it would show."""
    return torch.optim.Adafactor(parameters, lr=0.1)


def with_float32_head(outputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return MLP.loss(outputs.float() @ outputs.float().T @ outputs.float(), targets)


def in_bfloat16(module: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return with_float32_head(module(batch[0]), batch[1])


@pytest.mark.parametrize(("executor", "replicas"), [("threads", 3), ("inline", 1)])
def test_autocast_around_a_step_is_around_the_forward_pass_alone(
    executor: str, replicas: int
) -> None:
    options: dict[str, Any] = {"replicas": replicas, "executor": executor}
    with (
        phalanx.Trainer(MLP.build(), with_float32_head, adafactor, **options) as trained,
        phalanx.Trainer(MLP.build(), None, adafactor, forward=in_bfloat16, **options) as other,
    ):
        for seed in range(3):
            batch = MLP.batch(12, seed=seed)
            other.step(batch)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                trained.step(batch)
        for name, value in state_of(trained.module).items():
            assert torch.equal(value, state_of(other.module)[name])


# --- controls: what must show does, or the tests above compare nothing with nothing ---------------


@pytest.mark.parametrize("change", [{"microbatches": 3}, {"seed": 1}], ids=str)
def test_the_number_of_microbatches_and_the_seed_show(change: Any, expected: Run) -> None:
    found = train("threads", 2, **change)
    assert not torch.equal(found.state["head.weight"], expected.state["head.weight"])


def test_the_process_own_generator_does_not_show(expected: Run) -> None:
    net = made()
    torch.manual_seed(77)
    assert_same_bits(train("threads", 2, net=net), expected)
