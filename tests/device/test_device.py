"""The test device computes, copies and draws as the CPU does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

# It changes with `native/` alone.
pytestmark = pytest.mark.night

FIRST, LAST = "dev:0", "dev:1"
STEPS = 4


class Sequence(nn.Module):
    """A small GPT: embeddings, a causal layer with dropout, and the tied matrix as its head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        ids = x[:, :5].abs().mul(7).long() % 11
        h = self.tokens(ids) + self.positions(torch.arange(5, device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(5, device=x.device, dtype=x.dtype)
        return self.layer(h, mask, is_causal=True) @ self.tokens.weight.t()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x.view(-1, 4, 3))[0]


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(nn.Unflatten(1, (1, 3, 4)), *layers, nn.Linear(3, 2))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 5), nn.GELU(), nn.Dropout(0.3), nn.Linear(5, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "convolutional": convolutional,
    "gpt": Sequence,
    "lstm": partial(Recurrent, nn.LSTM),
    "gru": partial(Recurrent, nn.GRU),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    f"{kind.__name__}-{way}": partial(kind, **options, **{way: True})
    # A bias of keys has no gradient but rounding, which a small `eps` would blow up.
    for kind, options in ((torch.optim.SGD, {"lr": 0.05}), (torch.optim.AdamW, {"eps": 1e-3}))
    for way in ("fused", "foreach")
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> list[Tensor]:
    """Return what is left after some steps: losses, weights, buffers, on the CPU."""
    torch.manual_seed(3)
    losses = []
    for step in range(STEPS):
        x = torch.randn(7, 12, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [each.detach().cpu() for each in (*losses, *model.state_dict().values())]


@pytest.fixture(autouse=True)
def doubles() -> None:
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_training_is_that_of_the_cpu(name: str, optimizer: str) -> None:
    model = MODELS[name]()
    twin = copy.deepcopy(model).to(LAST)
    expected = train(model, OPTIMIZERS[optimizer](model.parameters()), "cpu")
    before = torch.dev.kernels(FIRST)
    found = train(twin, OPTIMIZERS[optimizer](twin.parameters()), LAST)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.dev.kernels(FIRST) == before


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("ways", [("cpu", "dev:0"), ("dev:1", "cpu"), ("dev:0", "dev:1")])
@pytest.mark.parametrize("source", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2]])
def test_copies_convert_and_are_counted(ways: tuple[str, str], source: Any) -> None:
    x = drawn(3, 4)
    first, last = source(x.to(ways[0])), source(x.flip(0).clone().to(ways[1]).float())
    number, num_bytes = torch.dev.copies(*ways)
    last.copy_(first)
    assert torch.equal(last.cpu(), source(x).float())
    assert torch.dev.copies(*ways) == (number + 1, num_bytes + last.nbytes)


def test_a_backward_runs_on_the_device_and_stream_of_its_forward() -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append((torch.dev.current_device(), torch.dev.current_stream()))
            return grad * 2

    x = torch.ones(3, device=LAST, requires_grad=True)
    stream = torch.Stream(LAST)
    stream.wait_stream(torch.dev.current_stream(1))
    with stream:
        loss = Look.apply(x).sum()
    torch.dev.current_stream(1).wait_stream(stream)
    loss.backward()
    assert seen == [(1, stream)]
    assert x.grad.tolist() == [2, 2, 2]


def test_each_device_has_a_generator() -> None:
    torch.manual_seed(5)
    first, last = (torch.randn(3, device=device) for device in (FIRST, LAST))
    assert torch.equal(first.cpu(), last.cpu())
    state = torch.dev.get_rng_state(1)
    own = torch.Generator(device="dev:1").manual_seed(9)
    drawn_by_own = torch.rand(3, generator=own, device=LAST)
    assert torch.equal(
        drawn_by_own.cpu(), torch.rand(3, generator=own.manual_seed(9), device=LAST).cpu()
    )
    assert torch.equal(torch.dev.get_rng_state(1), state)
    next_one = torch.rand(2, device=LAST)
    torch.dev.set_rng_state(state, 1)
    assert torch.equal(torch.rand(2, device=LAST), next_one)
    before = torch.get_rng_state()
    F.dropout(torch.ones(50, device=LAST))
    torch.randperm(5, device=LAST)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(torch.dev.get_rng_state(1), state)
    with torch.random.fork_rng(devices=[1], device_type="dev"):
        torch.rand(1, device=LAST)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, generator=torch.Generator(), device=LAST)
