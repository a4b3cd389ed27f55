"""The command's models: shapes, parameters, and the data that each fits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx.cli.models import Standardize, build_model, choose_model
from phalanx.cli.schema import Schema
from phalanx.errors import ConfigError

pytestmark = pytest.mark.promise("command-line")


def images(*input_shape: int, num_outputs: int = 10) -> Schema:
    return Schema(task="classify", input_shape=input_shape, num_outputs=num_outputs)


TEXT = Schema(task="classify", input_shape=(16,), num_outputs=256, is_text=True)
UNKNOWN = Schema(task="auto")


@pytest.mark.parametrize("spec", ["mlp", "cnn"])
@pytest.mark.parametrize("input_shape", [(1, 8, 8), (1, 28, 28), (3, 5, 9), (2, 1, 1)])
def test_a_classifier_fits_any_size_of_image(spec: str, input_shape: tuple[int, ...]) -> None:
    model = build_model(spec, images(*input_shape, num_outputs=7), seed=0)
    assert model(torch.zeros(2, *input_shape)).shape == (2, 7)


def test_the_form_of_the_data_chooses_the_model() -> None:
    assert [choose_model(each) for each in (TEXT, images(3, 8, 8), images(5))] == [
        "gpt", "cnn", "mlp"
    ]  # fmt: skip


def test_the_gpt_sees_no_later_token_and_tells_places_apart() -> None:
    model = build_model("gpt", TEXT, seed=0).eval()
    tokens = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 256, 8)
    torch.testing.assert_close(before[..., :5], after[..., :5])
    assert not torch.allclose(before[..., 5:], after[..., 5:])
    logits = model(torch.zeros(1, 4, dtype=torch.long))
    nn.init.normal_(model.positions)  # type: ignore[arg-type]
    assert not torch.allclose(logits, model(torch.zeros(1, 4, dtype=torch.long)))


def test_columns_and_channels_are_standardized_and_gaps_are_the_mean() -> None:
    rows = torch.tensor([[1.0, 5.0, float("nan")], [3.0, 5.0, 2.0]])
    layer = Standardize((3,))
    layer.fit(TensorDataset(rows))
    assert layer(rows).tolist() == [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    pictures = torch.stack([torch.full((2, 4, 4), 1.0), torch.full((2, 4, 4), 5.0)])
    layer = Standardize((2, 4, 4))
    layer.fit(TensorDataset(pictures))
    assert layer(pictures).unique().tolist() == [-1.0, 1.0]
    assert layer.mean.shape == (2, 1, 1)
    with pytest.raises(ConfigError, match="must hold finite numbers"):
        layer.fit(TensorDataset(pictures / 0))


@pytest.mark.parametrize("spec", ["mlp", "cnn", "gpt"])
def test_the_seed_decides_the_parameters_and_the_default_generator_is_left_alone(spec: str) -> None:
    data = TEXT if spec == "gpt" else images(1, 8, 8)
    before = torch.get_rng_state()
    one, same, other = (build_model(spec, data, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for left, right in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(left, right)
    weights = [max(each.parameters(), key=torch.numel) for each in (one, other)]
    assert not torch.equal(*weights)


@pytest.mark.parametrize(
    ("spec", "data", "sentence"),
    [
        ("gpt", images(1, 8, 8), r"must fit rows of shape \[1, 8, 8\], but is gpt"),
        ("cnn", TEXT, r"but is cnn. Give --model gpt"),
        ("mlp", TEXT, r"but is mlp. Give --model gpt"),
        ("cnn", images(9), r"must fit rows of shape \[9\], but is cnn. Give --model mlp"),
        ("mlp", UNKNOWN, "must be module:attribute for your own data"),
        ("mlp", Schema(input_shape=(5,)), "`DATA` must have targets, but has rows of inputs alone"),
        ("resnet", TEXT, "`--model` must be mlp, cnn, gpt or module:attribute, but is 'resnet'"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(
    spec: str, data: Schema, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_model(spec, data, seed=0)


OWN_MODELS = """
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 3)

net = Net()
def make(): return Net()
"""


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(OWN_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_models", raising=False)


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize("attribute", ["Net", "net", "make"])
def test_a_users_own_model_draws_by_the_seed(attribute: str) -> None:
    before, spec = torch.get_rng_state(), f"own_models:{attribute}"
    one, same, other = (build_model(spec, UNKNOWN, seed=seed) for seed in (1, 1, 2))
    assert one(torch.zeros(1, 2)).shape == (1, 3)
    assert torch.equal(torch.get_rng_state(), before)
    weight, same_weight, other_weight = (next(m.parameters()) for m in (one, same, other))
    assert torch.equal(weight, same_weight)
    assert torch.equal(weight, other_weight) is (attribute == "net")  # made before
