"""The CLI's models: shapes, parameters, what fits what."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.models import bench_cnn, bench_gpt, bench_mlp
from phalanx.cli.data import Data, open_data
from phalanx.cli.losses import build_loss
from phalanx.cli.models import (
    GPT,
    build_model,
    draw_parameters,
)
from phalanx.errors import ConfigError


def describe_images(*input_shape: int, num_classes: int = 10) -> Data:
    return Data(
        name="made_up",
        kind="images",
        train=[],
        test=None,
        input_shape=input_shape,
        num_classes=num_classes,
        description="",
    )


TOKENS = replace(describe_images(16, num_classes=256), kind="tokens")
UNKNOWN = replace(TOKENS, kind="custom", input_shape=None, num_classes=None)


@pytest.mark.parametrize("spec", ["mlp", "cnn"])
@pytest.mark.parametrize("input_shape", [(1, 8, 8), (1, 28, 28), (3, 5, 9), (2, 1, 1)])
def test_a_classifier_fits_any_size_of_image(spec: str, input_shape: tuple[int, ...]) -> None:
    model = build_model(spec, describe_images(*input_shape, num_classes=7), seed=0)
    assert model(torch.zeros(2, *input_shape)).shape == (2, 7)


def test_the_cnn_has_batch_norm() -> None:
    model = build_model("cnn", describe_images(1, 8, 8), seed=0)
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def test_the_gpt_gives_logits_for_every_token() -> None:
    model = build_model("gpt", TOKENS, seed=0)
    tokens = torch.randint(0, 256, (3, 16))
    assert model(tokens).shape == (3, 16, 256)
    assert model(tokens[:, :5]).shape == (3, 5, 256)


def test_the_gpt_sees_no_later_token() -> None:
    model = draw_parameters(GPT(vocab=11, context=8, width=12, layers=2, heads=3), seed=0).eval()
    tokens = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_the_gpt_tells_places_apart() -> None:
    model = draw_parameters(GPT(vocab=11, context=4, width=12, layers=1, heads=3), seed=0)
    logits = model(torch.zeros(1, 4, dtype=torch.long))
    assert not torch.allclose(logits[0, 0], logits[0, 3])


def test_the_gpt_drops_in_training_only() -> None:
    model = GPT(vocab=11, context=4, width=12, layers=1, heads=3, dropout=0.5)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("spec", ["mlp", "cnn", "gpt"])
def test_the_seed_decides_the_parameters_and_the_default_generator_is_left_alone(spec: str) -> None:
    data = TOKENS if spec == "gpt" else describe_images(1, 8, 8)
    before = torch.get_rng_state()
    one, same, other = (build_model(spec, data, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for left, right in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(left, right)
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_parameters_are_whole_numbers_times_a_bound_rounded_once() -> None:
    module = draw_parameters(nn.Sequential(nn.Linear(7, 3), nn.LayerNorm(3)), seed=4)
    weight, bias, norm_weight, norm_bias = module.parameters()
    generator = torch.Generator().manual_seed(4)
    numbers = torch.randint(0, 1 << 24, (3, 7), generator=generator).double()
    # Exact in float64 up to the product with the bound (a float32 there); then one rounding.
    bound = torch.tensor(1 / math.sqrt(7), dtype=torch.float32).double()
    assert torch.equal(weight, ((numbers / 2**23 - 1) * bound).float())
    assert bias.tolist() == norm_bias.tolist() == [0, 0, 0]
    assert norm_weight.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("spec", "data", "sentence"),
    [
        ("gpt", describe_images(1, 8, 8), "`gpt` must be given tokens, .* images. Choose `cnn`"),
        ("gpt", UNKNOWN, "`gpt` must be given tokens, .*data of your own"),
        ("cnn", TOKENS, "`cnn` must be given images, .*text. Choose `gpt`"),
        ("mlp", TOKENS, "`mlp` must be given images, .*text. Choose `gpt`"),
        ("cnn", UNKNOWN, "must know the shape of an input and the number of classes"),
        ("cnn", describe_images(9), r"must be given inputs \[channels, height, width\].*\[9\]"),
        ("resnet", TOKENS, "Model must be `mlp`, `cnn`, `gpt` or .*, but is 'resnet'"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(
    spec: str, data: Data, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_model(spec, data, seed=0)


OWN_MODELS = """
import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 3)

net = Net()
number = 3

def make(): return Net()
def make_lazy(): return nn.Sequential(nn.LazyLinear(3))
def make_number(): return 3
def needs_argument(size): return Net()
"""


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(OWN_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_models", raising=False)


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize("attribute", ["Net", "net", "make"])
def test_a_users_own_model(attribute: str) -> None:
    before = torch.get_rng_state()
    model = build_model(f"own_models:{attribute}", UNKNOWN, seed=0)
    assert model(torch.zeros(1, 2)).shape == (1, 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("own_models")
def test_a_users_own_function_draws_by_the_seed() -> None:
    one, same, other = (build_model("own_models:make", UNKNOWN, seed=seed) for seed in (1, 1, 2))
    weight, same_weight, other_weight = (next(m.parameters()) for m in (one, same, other))
    assert torch.equal(weight, same_weight)
    assert not torch.equal(weight, other_weight)


@pytest.mark.parametrize(
    ("bench", "input_shape", "output_shape", "num_parameters"),
    [
        (bench_mlp, (128, 784), (128, 10), 1_863_690),
        (bench_cnn, (64, 3, 32, 32), (64, 10), 1_070_986),
        (bench_gpt, (16, 64), (16, 64, 1000), 3_688_936),
    ],
)
def test_the_measured_models_have_the_published_sizes(
    bench: object, input_shape: tuple[int, ...], output_shape: tuple[int, ...], num_parameters: int
) -> None:
    model, (inputs, targets) = bench()  # type: ignore[operator]
    assert inputs.shape == input_shape
    assert targets.shape == output_shape[:-1]
    assert model(inputs).shape == output_shape
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


@pytest.mark.parametrize(
    ("data", "model", "lr"), [("digits", "mlp", 1e-3), ("digits", "cnn", 2e-3)]
)
def test_a_few_steps_on_real_digits_lower_the_loss(data: str, model: str, lr: float) -> None:
    opened = open_data(data, batch_size=64, seed=0)
    module, loss = build_model(model, opened, seed=0), build_loss(None, opened)
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
    losses = []
    for inputs, targets in opened.train:
        optimizer.zero_grad()
        value = loss(module(inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < 0.8 * losses[0]
