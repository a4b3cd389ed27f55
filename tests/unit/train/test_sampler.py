"""A sampler that neither repeats nor leaves out, whoever goes on from where."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx import CheckpointError, ExactSampler


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_every_sample_comes_once_however_often_the_ranks_change(
    size: int, legs: list[tuple[int, int]], seed: int
) -> None:
    state: dict[str, Any] = ExactSampler(size, seed=seed).state_dict()
    seen: list[int] = []
    for num_ranks, turns in legs:
        samplers = [
            ExactSampler(size, seed=seed, rank=r, num_ranks=num_ranks) for r in range(num_ranks)
        ]
        for sampler in samplers:
            sampler.load_state_dict(state)
        for sampler in samplers:
            seen += itertools.islice(iter(sampler), turns)
        if max(sampler.position for sampler in samplers) >= size or samplers[0].epoch:
            break
        state = samplers[0].state_dict()
    else:
        last = ExactSampler(size, seed=seed)
        last.load_state_dict(state)
        seen += list(last)
    assert sorted(seen) == list(range(size))


def test_orders_belong_to_seed_and_epoch() -> None:
    sampler, other = ExactSampler(20), ExactSampler(20, seed=1)
    epochs = [list(sampler), list(sampler), list(other)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    sampler.set_epoch(0)
    assert list(sampler) == epochs[0]


def test_setting_the_running_epoch_keeps_the_place() -> None:
    sampler = ExactSampler(6, shuffle=False)
    list(itertools.islice(iter(sampler), 2))
    sampler.set_epoch(0)
    assert list(sampler) == [2, 3, 4, 5]


@pytest.mark.parametrize("change", [{"seed": 1}, {"num_samples": 7}])
def test_a_state_of_other_data_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    sampler = ExactSampler(6, shuffle=False)
    list(itertools.islice(iter(sampler), 2))
    with pytest.raises(CheckpointError, match="`state` must"):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert list(sampler) == [2, 3, 4, 5]


trained_on: list[float] = []


class Noting(nn.Linear):
    """Notes the rows that it sees."""

    def forward(self, input: Tensor) -> Tensor:
        trained_on.extend(input[:, 0].tolist())
        return super().forward(input)


def test_a_trainer_that_is_stopped_in_mid_epoch_goes_on_behind() -> None:
    rows = TensorDataset(torch.arange(10.0)[:, None], torch.zeros(10, 1))
    loader = DataLoader(rows, batch_size=2, sampler=ExactSampler(rows, seed=3))

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    with phalanx.Trainer(Noting(1, 1), nn.functional.mse_loss, sgd, executor="inline") as trainer:
        trainer.step((torch.zeros(2, 1), torch.zeros(2, 1)))  # whatever is tried out is over then
        trained_on.clear()
        trainer.fit(loader, epochs=1, steps=2)
        assert len(trained_on) == 4
        trainer.fit(loader)
    assert sorted(trained_on) == list(range(10))
