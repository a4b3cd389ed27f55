"""Whole models on one accelerator, whose kernels draw in their own way on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.errors import UnsupportedError
from phalanx.replicas.rng_mode import RngMode
from tests.zoo import (
    assert_close,
    assert_same_bits,
    cnn_norm,
    gpt_dropout,
    image_batch,
    mlp,
    sgd,
    token_batch,
    vector_batch,
)

pytestmark = pytest.mark.gpu
MODELS = {
    "mlp": (mlp, vector_batch),
    "cnn": (cnn_norm, image_batch),
    "gpt": (gpt_dropout, token_batch),
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # conftest.py puts it back


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def trained(module: nn.Module, batch: Any, replicas: list[torch.device]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    with phalanx.Trainer(module, loss_of, sgd, replicas=replicas, microbatches=6) as trainer:
        for _ in range(4):
            trainer.step(batch)
    return module.state_dict()


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.night), 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_for_any_number_of_replicas(
    name: str, replicas: int, gpu: torch.device
) -> None:
    make, batch_of = MODELS[name]
    one = trained(make().to(gpu), batch_of(13), [gpu])
    assert_same_bits(trained(make().to(gpu), batch_of(13), [gpu] * replicas), one)


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_attention_belongs_to_the_microbatch(
    dtype: torch.dtype, gpu: torch.device
) -> None:
    x = torch.randn(3, 2, 16, 8, device=gpu, dtype=dtype, requires_grad=True)
    before = torch.get_device_module(gpu).get_rng_state(gpu)

    def run(seed: int) -> tuple[Tensor, Tensor]:
        with RngMode(seed) as draws:
            output = attention(x)
            output.float().square().sum().backward()
        assert draws.used
        assert x.grad is not None
        found, x.grad = x.grad, None
        return output, found

    (first, gradient), (other, _), (again, same) = run(7), run(8), run(7)
    assert torch.equal(first, again)
    assert torch.equal(gradient, same)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_device_module(gpu).get_rng_state(gpu), before)
    with RngMode(7):
        assert not torch.equal(attention(x), attention(x))


class Checkpointed(nn.Module):
    def __init__(self, *, on: bool) -> None:
        super().__init__()
        self.model, self.on = gpt_dropout(), on

    def forward(self, tokens_BT: Tensor) -> Tensor:
        if not self.on:
            return self.model(tokens_BT)
        return checkpoint(
            self.model, tokens_BT, use_reentrant=False, context_fn=phalanx.preserve_rng
        )


def test_a_checkpointed_part_draws_the_same_again(gpu: torch.device) -> None:
    plain = trained(Checkpointed(on=False).to(gpu), token_batch(13), [gpu])
    assert_same_bits(trained(Checkpointed(on=True).to(gpu), token_batch(13), [gpu]), plain)
    with pytest.raises(UnsupportedError, match="replica its own"):
        trained(Checkpointed(on=True).to(gpu), token_batch(13), [gpu, gpu])


class Recurrent(nn.Module):
    def __init__(self, dropout: float, *, asks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.asks = asks
        self.layers = nn.LSTM(7, 5, num_layers=2, dropout=dropout, batch_first=True)

    def forward(self, x_BTF: Tensor) -> Tensor:
        if self.asks:
            self.layers.flatten_parameters()
        return self.layers(x_BTF)[0]


@pytest.mark.parametrize("asks", [False, True])
def test_a_recurrent_layer_trains_as_in_plain_pytorch(asks: bool, gpu: torch.device) -> None:
    x, y = torch.randn(13, 4, 7, dtype=torch.float64), torch.randint(5, (13, 4))
    module, plain = (Recurrent(0.0, asks=asks).to(gpu, torch.float64) for _ in range(2))
    optimizer = sgd(plain.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(plain(x.to(gpu)), y.to(gpu)).backward()
        optimizer.step()
    found = trained(module, (x, y), [gpu, gpu])
    for name, value in plain.state_dict().items():
        assert_close(found[name], value, value.dtype)


def test_dropout_between_recurrent_layers_belongs_to_the_microbatch(gpu: torch.device) -> None:
    batch = torch.randn(13, 4, 7), torch.randint(5, (13, 4))
    one = trained(Recurrent(0.5).to(gpu), batch, [gpu])
    for replicas in (2, 3):
        assert_same_bits(trained(Recurrent(0.5).to(gpu), batch, [gpu] * replicas), one)
    assert not torch.equal(
        trained(Recurrent(0.0).to(gpu), batch, [gpu])["layers.weight_hh_l0"],
        one["layers.weight_hh_l0"],
    )
