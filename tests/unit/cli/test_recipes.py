"""The recipe for every built-in pair of data and model, and for all others."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.cli.recipes import Recipe, default_model, defaults_for


@pytest.mark.parametrize(
    ("data", "model", "recipe"),
    [
        ("digits", "cnn", Recipe(epochs=10, batch_size=64, lr=2e-3)),
        ("idx:/some/where", "cnn", Recipe(epochs=4, batch_size=128, lr=2e-3)),
        ("text:stdlib", "gpt", Recipe(epochs=1, batch_size=32, lr=2e-3)),
        ("own:data", "own:model", Recipe(epochs=5, batch_size=64, lr=1e-3)),
        ("digits", "own:model", Recipe(epochs=5, batch_size=64, lr=1e-3)),
    ],
)
def test_the_recipe_of_a_pair(data: str, model: str, recipe: Recipe) -> None:
    assert defaults_for(data, model) == recipe


@pytest.mark.parametrize(
    ("data", "model"),
    [("digits", "cnn"), ("idx:/some/where", "cnn"), ("text:a", "gpt"), ("own:data", "cnn")],
)
def test_the_model_that_suits_the_data(data: str, model: str) -> None:
    assert default_model(data) == model


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        defaults_for("digits", "cnn").lr = 1.0  # type: ignore[misc]
