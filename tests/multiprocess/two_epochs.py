"""The run of `test_executors_same_bits.py` in two long epochs: ranks die in the middle of one."""

from __future__ import annotations

from torch import Tensor

from tests.contracts import test_executors_same_bits
from tests.contracts.test_executors_same_bits import Run, made, result, trainer

__all__ = ["EPOCHS", "STEPS", "batches", "train_in_one_process"]

EPOCHS, STEPS = 2, 12


def batches(count: int = STEPS // EPOCHS) -> list[tuple[Tensor, Tensor]]:
    """Return batches of 13 rows and a last one of 5."""
    return test_executors_same_bits.batches(count)


def train_in_one_process() -> Run:
    losses: list[float] = []
    with trainer("threads", 1, losses, made()) as trained:
        for _ in range(EPOCHS):
            trained.fit(batches())
        assert trained.steps == STEPS
        return result(trained, losses)
