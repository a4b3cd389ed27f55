"""What a worker process starts a microbatch with: nothing of the one before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx

ROWS = 11


class Freezing(nn.Module):
    """Freezes a parameter where its first input is below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] < 0:
            self.first.weight.requires_grad_(False)
        out: Tensor = self.second(self.first(x).relu())
        return out


class Made:
    """Rows that are made anew, by whatever is the default dtype, where they are unpickled."""

    def __init__(self, numbers: list[list[float]]) -> None:
        self.numbers = numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.tensor, (self.numbers,)


def made(module: nn.Module, batch: tuple[Tensor, Any, Tensor]) -> Tensor:
    x, extra, y = batch
    numbers = extra if isinstance(extra, Tensor) else torch.tensor(extra.numbers)
    assert numbers.dtype == x.dtype
    return nn.functional.mse_loss(module(x * numbers.sum()), y)


def trained(executor: str, module: nn.Module, batches: list[Any], **options: Any) -> list[Tensor]:
    with phalanx.Trainer(
        module,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        executor=executor,
        replicas=1,
        **{"microbatches": None, **options},
    ) as trainer:
        for batch in batches:
            trainer.step(batch)
    return [value.clone() for value in module.state_dict().values()]


def assert_same_in_all_executors(build: Any, batches: list[Any], **options: Any) -> None:
    found = {}
    for executor in ("threads", "processes"):
        torch.manual_seed(0)
        found[executor] = trained(executor, build(), batches, **options)
    assert all(map(torch.equal, found["threads"], found["processes"]))


def test_a_parameter_that_a_forward_pass_froze_is_trained_by_the_next_one() -> None:
    draw = torch.Generator().manual_seed(1)
    batches = []
    for sign in (-1.0, 1.0, 1.0, -1.0, 1.0):
        x = torch.randn(ROWS, 5, generator=draw)
        x[:, 0] = sign * x[:, 0].abs()
        batches.append((x, torch.randn(ROWS, 3, generator=draw)))
    assert_same_in_all_executors(Freezing, batches, loss=nn.functional.mse_loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_made_by_the_settings_of_their_run(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        draw = torch.Generator().manual_seed(1)
        batches = [
            (torch.randn(ROWS, 5, generator=draw), Made([[1.0, 2.0]]), torch.zeros(ROWS, 3))
            for _ in range(3)
        ]
        assert_same_in_all_executors(lambda: nn.Linear(5, 3), batches, loss=None, forward=made)
    finally:
        torch.set_default_dtype(before)


class Noise(nn.Module):
    """Has no parameters of its own, and one behind it has."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(x))
        return out


def test_evaluating_in_inference_mode_leaves_a_trainer_that_trains() -> None:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(900, 5, generator=draw), torch.randint(0, 3, (900,), generator=draw)
    with phalanx.Trainer(
        Noise(),
        nn.functional.cross_entropy,
        lambda p: torch.optim.SGD(p, lr=0.1),
        executor="processes",
        microbatches=None,
        replicas=1,
    ) as trainer:
        trainer.step((x[:9], y[:9]))
        for rows in (900, 700, 900):
            with torch.inference_mode():
                trainer.evaluate([(x[:rows], y[:rows])] * 2)
            trainer.step((x[:rows], y[:rows]))
