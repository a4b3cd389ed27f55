"""The recipe for every built-in pair of data and model, and for all others."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from phalanx.cli.recipes import Recipe, begin_anew, decay_linearly, default_model, defaults_for


@pytest.mark.parametrize(
    ("data", "model", "recipe"),
    [
        ("digits", "cnn", Recipe(epochs=10, batch_size=64, lr=2e-3)),
        ("text:book.txt", "gpt", Recipe(epochs=1, batch_size=32, lr=2e-3)),
        ("own:data", "own:model", Recipe(epochs=5, batch_size=64, lr=1e-3)),
        ("digits", "own:model", Recipe(epochs=5, batch_size=64, lr=1e-3)),
    ],
)
def test_the_recipe_of_a_pair(data: str, model: str, recipe: Recipe) -> None:
    assert defaults_for(data, model) == recipe


@pytest.mark.parametrize(
    ("data", "model"),
    [("digits", "cnn"), ("text:a", "gpt"), ("own:data", "cnn")],
)
def test_the_model_that_suits_the_data(data: str, model: str) -> None:
    assert default_model(data) == model


def test_the_rate_falls_in_a_straight_line_to_0_and_stays_there() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    scheduler = decay_linearly(8)(optimizer)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([2e-3 * max(0, 8 - step) / 8 for step in range(10)], abs=1e-12)


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_rate_given_anew_is_that_of_a_training_begun_with_it(scheduled: bool) -> None:
    def begin(lr: float) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
        weight = torch.nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        optimizer = torch.optim.AdamW([weight], lr=lr)
        return optimizer, decay_linearly(8)(optimizer) if scheduled else None

    def rates(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> list[float]:
        found = []
        for _ in range(3):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return found

    slow, fast = begin(1e-4), begin(2e-3)
    for each in (slow, fast):
        rates(*each)
    begin_anew(*fast, lr=1e-4)
    assert rates(*fast) == pytest.approx(rates(*slow), rel=1e-12)
