"""Process executors in bad places: little memory, forks, deaths without end, errors."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import PeerLost, StateError

DATA = [(torch.ones(6, 3), torch.zeros(6, 1))]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def make(
    module: nn.Module | None = None, loss: Any = nn.functional.mse_loss, **options: Any
) -> Any:
    return phalanx.Trainer(
        nn.Linear(3, 1) if module is None else module,
        loss,
        sgd,
        **{"microbatches": None, "replicas": 1, "executor": "processes", **options},
    )


def test_more_workers_than_cores_are_warned_of() -> None:
    count = len(os.sched_getaffinity(0)) + 1
    with (
        make(replicas=count, microbatches=count) as trainer,
        pytest.warns(UserWarning, match="`replicas` should be at most"),
    ):
        trainer.fit(DATA)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_cannot_use_the_workers() -> None:
    with make() as trainer:
        trainer.fit(DATA)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                trainer.fit(DATA)
            except StateError:
                code = 0
            trainer.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        trainer.fit(DATA)
        assert trainer.steps == 2


def test_too_many_losses_end_the_run(tmp_path: Path) -> None:
    executor = phalanx.Processes(max_failures=2)
    with (
        make(Deadly(), executor=executor) as trainer,
        pytest.raises(PeerLost, match="max_failures"),
    ):
        trainer.fit(DATA)


class Deadly(nn.Linear):
    """Kills whoever runs it, except where it is tried out first."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.home = os.getpid()

    def forward(self, rows: Tensor) -> Tensor:
        if os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(rows)


class OddError(ValueError):
    """An exception that pickle cannot make again from its arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.first = first


class Odd(nn.Linear):
    """Raises in worker processes."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.home = os.getpid()

    def forward(self, rows: Tensor) -> Tensor:
        if os.getpid() != self.home:
            raise OddError(1, 2)
        return super().forward(rows)


def test_a_failure_arrives_with_its_own_type_attributes_and_traceback() -> None:
    with make(Odd()) as trainer, pytest.raises(OddError, match="1 and 2") as caught:
        trainer.fit(DATA)
    assert caught.value.first == 1
    notes = "\n".join(caught.value.__notes__)
    assert "Raised by replica" in notes
    assert "raise OddError(1, 2)" in notes
