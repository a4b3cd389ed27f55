"""What a model draws, forward and backward, is the same in every configuration, or is refused."""

from __future__ import annotations

import concurrent.futures
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

import phalanx
from phalanx import UnsupportedError
from tests.products import some_by_day
from tests.zoo import simple_sgd as sgd

CONFIGURATIONS = [("threads", 2), ("threads", 3), ("processes", 1), ("processes", 2)]
EXECUTORS = [("inline", 1), ("threads", 2), ("processes", 1)]

pytestmark = pytest.mark.promise("random-numbers-repeat", "foreign-random-numbers")


class NoisyGradient(torch.autograd.Function):
    """The identity, whose gradient is made noisy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad + 0.1 * torch.randn(grad.shape)


def noise(module: nn.Module, grad_in: Any, grad_out: Any) -> Any:
    return (grad_in[0] + 0.1 * torch.randn_like(grad_in[0]),)


@torch.jit.script
def scripted_dropout(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.3, True)


class Net(nn.Module):
    """Layers around one that a subclass gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(9, 16), nn.Linear(16, 3)
        self.drop = nn.Dropout(0.3)

    def hidden(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.hidden(torch.tanh(self.first(x))))
        return scores


class Drops(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.drop(x)))  # type: ignore[no-any-return]


class DrawsInBackward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last.register_full_backward_hook(noise)

    def hidden(self, x: Tensor) -> Tensor:
        return NoisyGradient.apply(x)  # type: ignore[no-any-return]


class Checkpointed(Drops):
    def hidden(self, x: Tensor) -> Tensor:
        part = super().hidden
        found: Tensor = checkpoint(part, x, use_reentrant=False, context_fn=phalanx.preserve_rng)
        return found + 0.1 * torch.rand(found.shape)


class NotCheckpointed(Drops):
    def hidden(self, x: Tensor) -> Tensor:
        found = super().hidden(x)
        return found + 0.1 * torch.rand(found.shape)


class DrawsLater(Net):
    """Draws only for some rows, of which the first batch has none."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.drop(x) if bool(x.abs().sum() > 400) else x


class Scripted(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return scripted_dropout(x)  # type: ignore[no-any-return]


class Penalty(Net):
    """Goes back inside of forward, through a part that draws there."""

    def hidden(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(NoisyGradient.apply(own).square().sum(), own)
        return x + slope


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    sizes = [4, 13, 13, 5]
    return [
        (torch.randn(n, 9, generator=draw) * n, torch.randint(3, (n,), generator=draw))
        for n in sizes
    ]


def train(kind: Callable[[], nn.Module], executor: str, replicas: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = kind()
    torch.seed()  # nothing may come from there
    with phalanx.Trainer(
        net, F.cross_entropy, sgd, replicas=replicas, microbatches=4, executor=executor, seed=5
    ) as trainer:
        trainer.fit(batches())
        loss = trainer.evaluate(batches())["loss"]
    return {**net.state_dict(), "loss": torch.tensor(loss, dtype=torch.float64)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


MODELS = [Drops, DrawsInBackward, Checkpointed, DrawsLater, Penalty]
_expected: dict[type[Net], dict[str, Tensor]] = {}


@some_by_day("kind, configuration", MODELS, CONFIGURATIONS)
def test_draws_are_the_same_bits_in_every_configuration(
    kind: type[Net], configuration: tuple[str, int]
) -> None:
    if kind not in _expected:
        _expected[kind] = train(kind, "inline", 1)
    assert_same(train(kind, *configuration), _expected[kind])


def test_a_checkpointed_part_draws_the_same_numbers_again() -> None:
    assert_same(train(Checkpointed, "threads", 2), train(NotCheckpointed, "inline", 1))


X = torch.linspace(-1, 1, 60).view(6, 10)
HEADS = X.view(1, 2, 3, 10)
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
    "attention": lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS, dropout_p=0.5),
    "distribution": lambda: torch.distributions.Normal(X, X.abs() + 1).rsample(),
}


class DrawsInAllWays(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([way().double().flatten() for way in WAYS.values()]).expand(len(x), -1)


def test_all_ways_to_draw_are_the_same_in_every_executor() -> None:
    """Each batch of `predict` has other numbers; a process's later ones come from its generator."""
    rows = [torch.zeros(2, 1)] * 2
    found = []
    for executor, replicas in EXECUTORS:
        with phalanx.Trainer(
            DrawsInAllWays(1, 1),
            F.mse_loss,
            sgd,
            microbatches=2,
            replicas=replicas,
            executor=executor,
        ) as trainer:
            found.append([trainer.predict(rows) for _ in range(2)])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))
    assert len(found[0][0].unique(dim=0)) == 4


# --- what no configuration can repeat ----------------------------------------------------------


class Seeds(Net):
    def hidden(self, x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return x + torch.randn_like(x)


class SeedsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        torch.manual_seed(7)
        return grad


class BackSeeds(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return SeedsInBackward.apply(x)  # type: ignore[no-any-return]


class Pythons(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return x * (1 + random.randint(0, 3))


class Numpys(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return x * float(np.random.rand())


class DrawsInThread(Net):
    def hidden(self, x: Tensor) -> Tensor:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return x * pool.submit(torch.rand, 1).result()


class Reentrant(Drops):
    def hidden(self, x: Tensor) -> Tensor:
        return checkpoint(super().hidden, x, use_reentrant=True)  # type: ignore[no-any-return]


class NotReentrant(Drops):
    def hidden(self, x: Tensor) -> Tensor:
        return checkpoint(super().hidden, x, use_reentrant=False)  # type: ignore[no-any-return]


class Nested(Drops):
    def hidden(self, x: Tensor) -> Tensor:
        def outer(x: Tensor) -> Any:
            return checkpoint(super(Nested, self).hidden, x, use_reentrant=False)

        return checkpoint(  # type: ignore[no-any-return]
            outer, x, use_reentrant=False, context_fn=phalanx.preserve_rng
        )


REFUSED: list[tuple[type[Net], str]] = [
    (Seeds, "torch's default generator was seeded or drawn from"),
    (Pythons, "Python's global generator was seeded or drawn from"),
    (Numpys, "NumPy's global generator was seeded or drawn from"),
    (BackSeeds, "torch's default generator was seeded or drawn from"),
    (DrawsInThread, "torch's default generator was seeded or drawn from"),
    (Scripted, "torch's default generator was seeded or drawn from"),
    (Reentrant, r"use_reentrant=False, context_fn=phalanx.preserve_rng"),
    (NotReentrant, r"use_reentrant=False, context_fn=phalanx.preserve_rng"),
    (Nested, r"use_reentrant=False, context_fn=phalanx.preserve_rng"),
]


leaves_hooks = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="torch 2.8 and 2.11 clean up a checkpoint that failed in one thread in another",
)


def refusals() -> list[object]:
    """All kinds in threads; inline and in worker processes two, the rest nightly."""
    found: list[object] = []
    for place, (kind, told) in enumerate(REFUSED):
        for executor, replicas in EXECUTORS:
            marks = [pytest.mark.night] if executor != "threads" and place > 1 else []
            if executor == "threads" and kind in (NotReentrant, Nested):
                marks = [leaves_hooks]
            found.append(pytest.param(kind, told, executor, replicas, marks=marks))
    return found


@pytest.mark.parametrize(("kind", "told", "executor", "replicas"), refusals())
def test_what_cannot_be_repeated_is_refused_in_the_first_step(
    kind: type[Net], told: str, executor: str, replicas: int
) -> None:
    net = kind()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with (
        phalanx.Trainer(
            net, F.cross_entropy, sgd, microbatches=None, replicas=replicas, executor=executor
        ) as trainer,
        pytest.raises(UnsupportedError, match=told),
    ):
        trainer.step(batches()[1])
    assert_same(net.state_dict(), before)


class MadeThere(Net):
    """Draws from generators that are the same in every call."""

    def hidden(self, x: Tensor) -> Tensor:
        projection = torch.randn(16, 16, generator=torch.Generator().manual_seed(7))
        return x @ projection * (random.Random(3).random() + np.random.default_rng(3).random())


def test_generators_made_where_they_are_drawn_from_are_as_in_plain_torch() -> None:
    net, (x, y) = MadeThere(), batches()[1]
    expected = F.cross_entropy(net(x), y).item()
    with phalanx.Trainer(net, F.cross_entropy, sgd, executor="inline") as trainer:
        assert trainer.step((x, y)).loss == pytest.approx(expected, rel=1e-5)


# --- the process's generators, across a stop ------------------------------------------------------


class Langevin(torch.optim.SGD):
    """Adds noise from the process's generator."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


def langevin(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Langevin(parameters, lr=0.1)


def draw_three(event: object) -> None:
    """Draw as the training goes on, however many calls of `fit` it takes."""
    if not isinstance(event, (phalanx.FitBegun, phalanx.FitEnded)):
        torch.rand(1), np.random.rand(), random.random()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)


def shuffled(data: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(data, batch_size=4, shuffle=True)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("way", ["resumed", "went on"])
def test_what_an_optimizer_or_a_callback_draws_goes_on_after_a_stop(
    listed: bool, way: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    nets = [nn.Linear(9, 3) for _ in range(3)]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())

    def data() -> Any:
        return (
            batches()
            if listed
            else shuffled(TensorDataset(*map(torch.cat, zip(*batches(), strict=True))))
        )

    def make(net: nn.Module) -> phalanx.Trainer:
        return phalanx.Trainer(
            net, F.cross_entropy, langevin, replicas=1, microbatches=2, callbacks=[draw_three]
        )

    seed_all(3)
    with make(nets[0]) as trainer:
        trainer.fit(data(), epochs=2)
    expected = torch.rand(1), np.random.rand(), random.random()
    seed_all(3)
    with make(nets[1]) as trainer:
        trainer.fit(data(), steps=2)
        trainer.save(tmp_path / "checkpoint")
        if way == "went on":
            trainer.fit(data())
            trainer.fit(data())
    if way == "resumed":
        seed_all(99)
        with make(nets[1]) as trainer:
            trainer.resume(tmp_path / "checkpoint")
            trainer.fit(data())
            trainer.fit(data())
    assert torch.equal(nets[1].weight, nets[0].weight)
    assert (torch.rand(1), np.random.rand(), random.random()) == expected
