"""`workloads="auto"` in real trainers: right shares, and plain PyTorch's numbers.

Time is made here: every replica's thread has a clock of its own that goes on only where the test's
model says how long something takes. So nothing depends on how fast or busy this machine is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.execution import threads
from phalanx.plan import workload_sizes
from tests.zoo import (
    assert_close,
    plain_sgd,
    plain_steps,
    sgd,
    state_of,
    twin_of,
)

pytestmark = pytest.mark.promise("automatic-choices-change-no-bit")

F64 = torch.float64
ROWS = 41
TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


class Clocks:
    """One clock for each replica, and what a row costs there in seconds."""

    def __init__(self) -> None:
        self.now_s: dict[str, float] = defaultdict(float)
        self.forward_s: Sequence[float] = [1.0, 1.0, 1.0]
        self.backward_s: Sequence[float] = [0.0, 0.0, 0.0]
        self.call_s = 0.0
        self.last_rows: dict[str, int] = {}

    def read(self) -> float:
        return self.now_s[threading.current_thread().name]

    def catch_up(self) -> None:
        """Be no earlier than the latest, as after having waited for it."""
        self.now_s[threading.current_thread().name] = max(self.now_s.values())

    def work(self, seconds_per_row: Sequence[float], rows: int) -> None:
        name = threading.current_thread().name
        if name.startswith("phalanx-replica-"):
            self.now_s[name] += rows * seconds_per_row[int(name.rpartition("-")[2])] + self.call_s
            self.last_rows[name] = rows


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    clocks = Clocks()
    monkeypatch.setattr(threads, "now_s", clocks.read)
    Taking.clocks = clocks
    yield clocks
    Taking.clocks = None


class Taking(torch.autograd.Function):
    """Takes a replica's time for its rows, in forward and in backward; changes nothing."""

    clocks: Clocks | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert Taking.clocks is not None
        Taking.clocks.work(Taking.clocks.forward_s, len(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert Taking.clocks is not None
        Taking.clocks.work(Taking.clocks.backward_s, len(grad))
        return grad


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 7)
        self.head = nn.Linear(7, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(Taking.apply(self.body(x))))


def batch_of(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, 5, generator=draw, dtype=F64),
        torch.randint(3, (rows,), generator=draw),
    )


BATCHES = [batch_of(seed) for seed in range(10)]
IDEAL_TWO, IDEAL_THREE = workload_sizes(ROWS, [3, 1]), workload_sizes(ROWS, [3, 3, 1])


def is_near(sizes: Sequence[int], ideal: Sequence[int]) -> bool:
    """Tell whether sizes are as they should be but for a row."""
    return all(abs(size - best) <= 1 for size, best in zip(sizes, ideal, strict=True))


# --- the trainer ----------------------------------------------------------------------------------


def train(
    trainer: phalanx.Trainer, batches: Sequence[tuple[Tensor, Tensor]]
) -> list[tuple[int, ...]]:
    return [trainer.step(batch).shares for batch in batches]


@pytest.mark.parametrize(
    ("forward_s", "ideal"), [([1.0, 3.0], IDEAL_TWO), ([1.0, 1.0, 3.0], IDEAL_THREE)]
)
def test_a_trainer_gives_a_slow_replica_less_and_trains_as_plain_pytorch(clocks, forward_s, ideal):
    clocks.forward_s = forward_s
    module = Net()
    twin = twin_of(module)
    losses = plain_steps(twin, F.cross_entropy, sgd, BATCHES)
    with phalanx.Trainer(
        module, F.cross_entropy, sgd, microbatches=None, replicas=len(forward_s), workloads="auto"
    ) as trainer:
        done = [trainer.step(batch) for batch in BATCHES]
        assert is_near(workload_sizes(ROWS, trainer.workloads), ideal)
    assert done[0].shares == tuple(workload_sizes(ROWS, [1] * len(forward_s)))
    assert is_near(done[-1].shares, ideal)
    assert [each.loss for each in done] == pytest.approx(losses, rel=1e-12)
    assert_close(state_of(module), state_of(twin), F64)


def test_what_backward_takes_counts_in_a_trainer(clocks):
    clocks.backward_s = [0.0, 3.0]
    with phalanx.Trainer(
        Net(), F.cross_entropy, sgd, microbatches=None, replicas=2, workloads="auto"
    ) as trainer:  # 1 to 4
        shares = train(trainer, BATCHES)
    assert is_near(shares[-1], workload_sizes(ROWS, [4, 1]))


def test_equal_replicas_keep_equal_shares(clocks):
    with phalanx.Trainer(
        Net(), F.cross_entropy, sgd, microbatches=None, replicas=3, workloads="auto"
    ) as trainer:
        assert set(train(trainer, BATCHES)) == {(14, 14, 13)}


def test_shares_follow_a_change_of_speed(clocks):
    with phalanx.Trainer(
        Net(), F.cross_entropy, sgd, microbatches=None, replicas=2, workloads="auto"
    ) as trainer:
        assert set(train(trainer, BATCHES)) == {(21, 20)}
        clocks.forward_s = [3.0, 1.0]
        assert is_near(train(trainer, BATCHES)[-1], IDEAL_TWO[::-1])


def test_evaluation_is_cut_as_training_and_teaches_nothing(clocks):
    clocks.forward_s = [1.0, 3.0]
    module = Net()
    with phalanx.Trainer(
        module, F.cross_entropy, plain_sgd, microbatches=None, replicas=2, workloads="auto"
    ) as trainer:
        trainer.fit(BATCHES)
        workloads = trainer.workloads
        found = trainer.evaluate(BATCHES)
        assert trainer.workloads == workloads
        assert is_near([clocks.last_rows[f"phalanx-replica-{i}"] for i in range(2)], IDEAL_TWO)
        with torch.no_grad():
            losses = [F.cross_entropy(module(x), y).item() for x, y in BATCHES]
        assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_with_microbatches_auto_means_equal_shares_and_the_same_bits(clocks):
    clocks.forward_s = [1.0, 3.0]
    states = []
    for workloads in ("auto", None):
        module = Net()
        with phalanx.Trainer(
            module, F.cross_entropy, sgd, replicas=2, workloads=workloads, microbatches=4
        ) as trainer:
            train(trainer, BATCHES[:4])
            assert trainer.workloads == (1.0, 1.0)
        states.append(state_of(module))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


class DiesOnce(nn.Linear):
    """Ends its worker process in the first forward pass of all."""

    def __init__(self, mark: Path) -> None:
        super().__init__(3, 2)
        self.mark = mark

    def forward(self, inputs):
        with contextlib.suppress(FileExistsError):
            self.mark.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs)


def test_a_lost_workers_slice_counts_for_the_replica_that_computed_it(tmp_path):
    batch = torch.randn(7, 3), torch.randn(7, 2)
    with phalanx.Trainer(
        DiesOnce(tmp_path / "mark"),
        F.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        executor="processes",
        microbatches=None,
        replicas=2,
        workloads="auto",
    ) as trainer:
        done = trainer.step(batch)
    assert sum(done.shares) == 7
    assert [seconds > 0 for seconds in done.work_s] == [rows > 0 for rows in done.shares]


# --- checkpoints ----------------------------------------------------------------------------------


def balanced(clocks: Clocks, folder: Path) -> tuple[float, ...]:
    """Save a trainer that has found its workloads, and return them."""
    clocks.forward_s = [1.0, 3.0]
    with phalanx.Trainer(
        Net(), F.cross_entropy, sgd, microbatches=None, replicas=2, workloads="auto"
    ) as trainer:
        train(trainer, BATCHES)
        trainer.save(folder)
        return trainer.workloads


def test_a_run_goes_on_with_the_workloads_that_it_had_found(clocks, tmp_path):
    found = balanced(clocks, tmp_path / "saved")
    with phalanx.Trainer(
        Net(), F.cross_entropy, sgd, microbatches=None, replicas=2, workloads="auto"
    ) as trainer:
        trainer.resume(tmp_path / "saved")
        assert trainer.workloads == pytest.approx(found)
        assert is_near(trainer.step(BATCHES[0]).shares, IDEAL_TWO)


def test_workloads_are_taken_back_by_a_trainer_that_has_gone_elsewhere(clocks, tmp_path):
    found = balanced(clocks, tmp_path / "saved")
    clocks.forward_s = [3.0, 1.0]
    with phalanx.Trainer(
        Net(), F.cross_entropy, sgd, microbatches=None, replicas=2, workloads="auto"
    ) as trainer:
        train(trainer, BATCHES)
        trainer.resume(tmp_path / "saved")
        assert trainer.workloads == pytest.approx(found)
        assert is_near(trainer.step(BATCHES[0]).shares, IDEAL_TWO)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"replicas": 3, "workloads": "auto"}, (14, 14, 13)),
        ({"replicas": 2}, (21, 20)),
        ({"replicas": 2, "workloads": [1, 2]}, (14, 27)),
    ],
)
def test_workloads_of_others_are_left_in_the_checkpoint(clocks, tmp_path, options, sizes):
    balanced(clocks, tmp_path / "saved")
    clocks.forward_s = [1.0, 1.0, 1.0]
    with phalanx.Trainer(
        Net(), F.cross_entropy, sgd, **{"microbatches": None, **options}
    ) as trainer:
        trainer.resume(tmp_path / "saved")
        assert trainer.step(BATCHES[0]).shares == sizes
