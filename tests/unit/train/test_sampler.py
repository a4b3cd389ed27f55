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
from phalanx import CheckpointError, ConfigError, ExactSampler


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_every_row_comes_once_in_the_same_batch_however_often_the_ranks_change(
    size: int, batch_size: int, legs: list[tuple[int, int]], seed: int
) -> None:
    state: dict[str, Any] = ExactSampler(size, batch_size, seed=seed).state_dict()
    seen: list[int] = []
    for num_ranks, turns in [*legs, (1, size)]:
        samplers = [
            ExactSampler(
                size, batch_size, microbatches=5, seed=seed, rank=rank, num_ranks=num_ranks
            )
            for rank in range(num_ranks)
        ]
        for sampler in samplers:
            sampler.load_state_dict(state)
        for parts in itertools.islice(zip(*samplers, strict=True), turns):
            seen += itertools.chain.from_iterable(parts)
        state = samplers[0].state_dict()
        if state["epoch"]:
            break
    whole = list(ExactSampler(size, batch_size, seed=seed))
    assert seen == list(itertools.chain.from_iterable(whole))
    assert sorted(seen) == list(range(size))


def test_orders_belong_to_seed_and_epoch() -> None:
    sampler, other = ExactSampler(20, 20), ExactSampler(20, 20, seed=1)
    epochs = [list(sampler), list(sampler), list(other)]
    assert len({tuple(epoch[0]) for epoch in epochs}) == 3
    sampler.set_epoch(0)
    assert list(sampler) == epochs[0]


def test_setting_the_running_epoch_keeps_the_place() -> None:
    sampler = ExactSampler(6, 2, shuffle=False)
    next(iter(sampler))
    sampler.set_epoch(0)
    assert list(sampler) == [[2, 3], [4, 5]]


def test_a_last_batch_that_is_smaller_can_be_left_out() -> None:
    sampler = ExactSampler(7, 3, shuffle=False, drop_last=True)
    assert list(sampler) == [[0, 1, 2], [3, 4, 5]]
    assert len(sampler) == 2
    assert len(ExactSampler(7, 3)) == 3


def test_a_rank_of_several_must_say_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.train.sampler.num_default_ranks", lambda: 2)
    with pytest.raises(ConfigError, match="`rank` and `num_ranks` must be given in a process"):
        ExactSampler(6, 2, num_ranks=2)
    assert len(list(ExactSampler(6, 2, rank=0, num_ranks=1))) == 3


@pytest.mark.parametrize("change", [{"seed": 1}, {"num_rows": 7}, {"model": 1}])
def test_a_state_of_other_data_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    sampler = ExactSampler(6, 2, shuffle=False)
    next(iter(sampler))
    with pytest.raises(CheckpointError, match="`state` must"):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert list(sampler) == [[2, 3], [4, 5]]


trained_on: list[float] = []


class Noting(nn.Linear):
    """Notes the rows that it sees."""

    def forward(self, input: Tensor) -> Tensor:
        trained_on.extend(input[:, 0].tolist())
        return super().forward(input)


def test_a_trainer_that_is_stopped_in_mid_epoch_goes_on_behind() -> None:
    rows = TensorDataset(torch.arange(10.0)[:, None], torch.zeros(10, 1))
    loader = DataLoader(rows, batch_sampler=ExactSampler(rows, 2, seed=3))

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    with phalanx.Trainer(Noting(1, 1), nn.functional.mse_loss, sgd, executor="inline") as trainer:
        trainer.step((torch.zeros(2, 1), torch.zeros(2, 1)))  # whatever is tried out is over then
        trained_on.clear()
        trainer.fit(loader, epochs=1, steps=2)
        assert len(trained_on) == 4
        trainer.fit(loader)
    assert sorted(trained_on) == list(range(10))
