"""Every way to draw inside a model gives the microbatch's own numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phalanx.errors import UnsupportedError
from phalanx.replicas import Draws, derive_seed

X = torch.linspace(-1, 1, 60).view(6, 10)
WAYS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(X, 0.5),
    "alpha dropout": lambda: F.alpha_dropout(X, 0.5, training=True),
    "feature dropout": lambda: F.dropout1d(X.unsqueeze(-1), 0.5),
    "rrelu": lambda: F.rrelu(X, training=True),
    "rand": lambda: torch.rand(6, 10),
    "rand_like": lambda: torch.rand_like(X),
    "randn": lambda: torch.randn(6, 10),
    "randn_like": lambda: torch.randn_like(X),
    "randint": lambda: torch.randint(9, (60,)),
    "randint from": lambda: torch.randint(3, 9, (60,)),
    "randint_like": lambda: torch.randint_like(X, 9),
    "randint_like from": lambda: torch.randint_like(X, 3, 9),
    "randperm": lambda: torch.randperm(60),
    "bernoulli": lambda: torch.bernoulli(X.abs()),
    "multinomial": lambda: torch.multinomial(X.abs() + 0.1, 4),
    "normal": lambda: torch.normal(X, X.abs()),
    "normal_": lambda: torch.empty(60).normal_(),
    "uniform_": lambda: torch.empty(60).uniform_(),
    "exponential_": lambda: torch.empty(60).exponential_(),
    "gumbel softmax": lambda: F.gumbel_softmax(X),
    "attention": lambda: F.scaled_dot_product_attention(
        X.view(1, 2, 3, 10), X.view(1, 2, 3, 10), X.view(1, 2, 3, 10), dropout_p=0.5
    ),
    "distribution": lambda: torch.distributions.Normal(X, X.abs() + 1).rsample(),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_belong_to_the_seed(way: str) -> None:
    before = torch.get_rng_state()
    with Draws(7) as draws:
        first = WAYS[way]()
    assert draws.used
    torch.rand(3)  # the process's own generator must not matter
    with Draws(7):
        again = WAYS[way]()
    with Draws(8):
        other = WAYS[way]()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.set_rng_state(before)
    with Draws(7):
        WAYS[way]()
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_keeps_its_law() -> None:
    with Draws(0):
        out = F.dropout(torch.ones(100_000), 0.3)
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert abs((out == 0).double().mean().item() - 0.3) < 0.01  # 7 standard deviations


def test_what_does_not_draw_is_not_noted() -> None:
    with Draws(0) as draws:
        F.scaled_dot_product_attention(
            X.view(1, 2, 3, 10), X.view(1, 2, 3, 10), X.view(1, 2, 3, 10)
        )
        F.dropout(X, 0.5, training=False)
    assert not draws.used


def test_a_generator_of_the_models_own_is_left_alone() -> None:
    own = torch.Generator().manual_seed(3)
    with Draws(0) as draws:
        drawn = torch.rand(5, generator=own)
    assert not draws.used
    assert torch.equal(drawn, torch.rand(5, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_drawing_under_activation_checkpointing_is_refused(reentrant: bool) -> None:
    x = X.clone().requires_grad_()
    with Draws(0), pytest.raises(UnsupportedError, match="checkpoint"):
        checkpoint(lambda v: F.dropout(v, 0.5), x, use_reentrant=reentrant)


def test_seeds_differ_for_every_step_and_microbatch() -> None:
    seeds = {derive_seed(s, t, m) for s in range(5) for t in range(20) for m in range(20)}
    assert len(seeds) == 5 * 20 * 20
    assert derive_seed(1, 11) != derive_seed(11, 1)
    assert all(0 <= seed < 2**63 for seed in seeds)
