"""Models whose gradients are hard to foresee: worker processes have the same bits as threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import phalanx

pytestmark = pytest.mark.promise("replicas-change-no-bit")

WIDTH = 520  # so that a layer's gradient moves to shared memory as soon as it is there
ROWS, STEPS, MICROBATCHES = 131, 4, 3

_kept: list[Tensor] = []  # of each process


class Alike(nn.Module):
    """Layers of one size, whose gradients may lie in each other's places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Shared(Alike):
    """One weight used three times, one never, one in part."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, *_ = self.layers
        assert isinstance(second, nn.Linear)
        for _ in range(3):
            x = torch.tanh(first(x))
        return x @ second.weight[:, : WIDTH // 2] @ second.weight[: WIDTH // 2]


class Changing(Alike):
    """Takes its layers in an order that the rows decide about, and leaves some out."""

    def forward(self, x: Tensor) -> Tensor:
        turn = int(x[0, 0].abs() * 1000) % 4
        for place in [*range(turn, 4), *range(turn)][: 4 - turn // 2]:
            x = torch.tanh(self.layers[place](x))
        return x


class Keeping(Alike):
    """Keeps what it computes for the next microbatches, as large as a weight, and uses it."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        again = x if not _kept else x * (1 + _kept[0].mean())
        _kept.append(torch.full((WIDTH, WIDTH), float(x.detach().mean())))
        if len(_kept) % 2:  # so that turns move
            _kept.append(torch.full((WIDTH, WIDTH), 0.5) * _kept[-1])
        del _kept[:-5]
        return again


class Reentrant(Alike):
    """Computes its activations again in backward passes within the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in (*self.layers, self.layers[0]):
            found = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
            assert isinstance(found, Tensor)
            x = torch.tanh(found)
        return x


class Strided(nn.Module):
    """Weights that do not lie in the order of their dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(40, 48, 3, padding=1).to(memory_format=torch.channels_last)
        self.large = nn.Conv2d(160, 192, 3, padding=1).to(memory_format=torch.channels_last)
        self.weight = nn.Parameter(torch.randn(48, WIDTH * 3).t() / 20)

    def forward(self, x: Tensor) -> Tensor:
        found = self.conv(x[:, :120].reshape(-1, 40, 1, 3))
        found = found + self.large(x[:, 40:].reshape(-1, 160, 1, 3))[:, :48]
        return torch.tanh(found).sum(3).flatten(1) @ self.weight.t()


class _Complex(torch.autograd.Function):
    """Whose backward pass gives views of something larger."""

    @staticmethod
    def forward(ctx: object, weight: Tensor) -> Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return torch.stack([gradient, gradient])[1] * 2


class Viewing(Alike):
    """Gets gradients that are parts of larger memory."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = torch.tanh(nn.functional.linear(x, _Complex.apply(layer.weight), layer.bias))
        return x


def trained(model: Callable[[], nn.Module], executor: str, replicas: int) -> list[Tensor]:
    _kept.clear()
    torch.manual_seed(3)
    module = model()
    draw = torch.Generator().manual_seed(4)
    with phalanx.Trainer(
        module,
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        executor=executor,
        replicas=replicas,
        microbatches=MICROBATCHES,
        seed=5,
    ) as trainer:
        for _ in range(STEPS):
            rows = torch.randn(ROWS, WIDTH, generator=draw)
            trainer.step((rows, torch.randint(0, WIDTH, (ROWS,), generator=draw)))
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize(
    "model",
    [Shared, Changing, Reentrant, Strided, Viewing],
    ids=lambda m: m.__name__,
)
def test_same_bits_as_threads(model: Callable[[], nn.Module]) -> None:
    expected = trained(model, "threads", 2)
    found = trained(model, "processes", 1)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_a_model_keeps_for_itself_stays_as_it_is() -> None:
    expected = trained(Keeping, "threads", 1)
    found = trained(Keeping, "processes", 1)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
