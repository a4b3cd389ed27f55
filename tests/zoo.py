"""Small models, their batches, losses and optimizers, and comparisons with plain PyTorch.

Sizes are small and odd, so that no slice fits by luck. Nothing in `mlp`, `cnn` and `gpt` mixes the
rows of a batch or draws numbers: their outputs row by row do not depend on how the batch was cut.
`cnn_norm` and `gpt_dropout` do; they belong to the tests of equal bits.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 11
WIDTH = 8
TOKENS = 5
CLASSES = 4

# Wrapped and unwrapped do the same additions in another order (the sum over rows is cut at the
# slices' borders). The models' values are of order 1 and no sum has more than some hundred terms,
# so one pass differs by a few units of rounding (6e-8 in float32, 1e-16 in float64). Ten optimizer
# steps multiply that by about ten times the curvature; Adam divides by the square root of a
# gradient that may be small, which costs one more digit. The bounds leave a
# factor of ten or more above what is measured.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}

# Of lists of devices. What lies where the first one is has its twin on the CPU all the same.
ACCELERATOR_FIRST = os.environ.get("TEST_DEV_FIRST") == "1"


def mlp(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 9), nn.ReLU(), nn.Linear(9, CLASSES)
    ).to(dtype)


def cnn(dtype: torch.dtype = torch.float32, *, norm: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Conv2d(2, 5, 3, padding=1)]
    layers += [nn.BatchNorm2d(5)] if norm else []
    layers += [nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 3, 3, padding=1)]
    layers += [nn.BatchNorm2d(3)] if norm else []
    layers += [nn.ReLU(), nn.Flatten(), nn.Linear(3 * 3 * 3, CLASSES)]
    return nn.Sequential(*layers).to(dtype)


def cnn_norm(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Module:
    return cnn(dtype, norm=True, seed=seed)


class Block(nn.Module):
    """One causal transformer block.

    The projection to queries, keys and values has no bias: softmax does not see the keys' bias, so
    its true gradient is 0, what is computed is rounding alone, and Adam would scale that noise up
    to a whole step.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_1 = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        rows, tokens, width = x_BTD.shape
        mixed = self.mix(self.norm_1(x_BTD)).view(rows, tokens, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x_BTD = x_BTD + self.out(seen.transpose(1, 2).reshape(rows, tokens, width))
        return x_BTD + self.feed(self.norm_2(x_BTD))


class Gpt(nn.Module):
    def __init__(self, *, dropout: float = 0.0, tied: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.1)
        self.blocks = nn.Sequential(*(Block(WIDTH, 2, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens_BT) + self.place)))


def gpt(
    dtype: torch.dtype = torch.float32, *, dropout: float = 0.0, tied: bool = False, seed: int = 0
) -> nn.Module:
    torch.manual_seed(seed)
    return Gpt(dropout=dropout, tied=tied).to(dtype)


def gpt_dropout(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Module:
    return gpt(dtype, dropout=0.2, seed=seed)


def vector_batch(
    rows: int, dtype: torch.dtype = torch.float32, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * seed + rows)
    inputs = torch.randn(rows, 7, generator=draw, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(CLASSES, (rows,), generator=draw)


def image_batch(
    rows: int, dtype: torch.dtype = torch.float32, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * seed + rows)
    inputs = torch.randn(rows, 2, 6, 6, generator=draw, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(CLASSES, (rows,), generator=draw)


def token_batch(
    rows: int, dtype: torch.dtype = torch.float32, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * seed + rows)
    tokens = torch.randint(VOCABULARY, (rows, TOKENS + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def class_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def token_loss(outputs_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean over the tokens that count; targets of -100 do not."""
    return F.cross_entropy(outputs_BTV.flatten(0, 1), targets_BT.flatten())


@dataclass(frozen=True)
class Case:
    """A model with its ``build(dtype, seed=…)``, ``batch(rows, dtype, seed=…)`` and loss."""

    name: str
    build: Callable[..., nn.Module]
    batch: Callable[..., tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("mlp", mlp, vector_batch, class_loss),
    Case("cnn", cnn, image_batch, class_loss),
    Case("gpt", gpt, token_batch, token_loss),
)
MLP, CNN, GPT = CASES
CNN_NORM = Case("cnn_norm", cnn_norm, image_batch, class_loss)
GPT_DROPOUT = Case("gpt_dropout", gpt_dropout, token_batch, token_loss)


class Loader:
    """The same list of batches in every epoch."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def batches_of(
    case: Case, rows: int, dtype: torch.dtype, count: int
) -> list[tuple[Tensor, Tensor]]:
    return [case.batch(rows, dtype, seed=seed) for seed in range(count)]


class SharedInside(nn.Module):
    """One layer used twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.second = self.first
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class PartlyUsed(nn.Module):
    """One parameter takes no part in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(7, CLASSES)
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Named(nn.Module):
    """Takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, *, tokens: Tensor, mask: Tensor) -> Tensor:
        embedded = self.embed(tokens) * mask.unsqueeze(-1)
        return self.head(embedded.sum(1) / (1 + mask.sum(1, keepdim=True)))


def twin_of(module: nn.Module) -> nn.Module:
    """Return an independent copy to be trained by plain PyTorch."""
    return copy.deepcopy(module)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers by name."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def gradients_of(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def simple_sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def adamw(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)


def plain_sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Return the optimizer whose step takes just the gradient away, and so shows it."""
    return torch.optim.SGD(params, lr=1.0)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def plain_steps(
    module: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    factory: Callable[..., torch.optim.Optimizer],
    batches: Iterable[tuple[Any, Any]],
    *,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip_norm: float | None = None,
) -> list[float]:
    """Train by plain PyTorch, one step per batch; return the losses."""
    optimizer = factory(module.parameters())
    schedule = scheduler(optimizer) if scheduler else None
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        value = loss(call(module, inputs), targets)
        value.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        optimizer.step()
        if schedule:
            schedule.step()
        losses.append(value.item())
    return losses


def call(module: nn.Module, inputs: Any) -> Any:
    """Give ``inputs`` to ``module`` as the Trainer does."""
    if isinstance(inputs, dict):
        return module(**inputs)
    if isinstance(inputs, tuple):
        return module(*inputs)
    return module(inputs)


def assert_close(actual: Any, expected: Any, dtype: torch.dtype, *, times: float = 1.0) -> None:
    """Compare tensors, lists and dicts of them within ``times`` the tolerance of ``dtype``."""
    tolerance = TOLERANCE[dtype] * times
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, check_device=not ACCELERATOR_FIRST
    )


def assert_same_bits(actual: Any, expected: Any, where: str = "") -> None:
    """Compare nested containers of tensors bit for bit."""
    assert type(actual) is type(expected), where
    if isinstance(actual, dict):
        assert set(actual) == set(expected), where  # the order of keys is no bit of the state
        for key in actual:
            assert_same_bits(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(actual, list | tuple):
        assert len(actual) == len(expected), where
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(*pair, f"{where}.{index}")
    elif isinstance(actual, Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(_bytes_of(actual), _bytes_of(expected)), f"{where} differs"
    else:
        assert actual == expected, where


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
