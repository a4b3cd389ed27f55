"""A run that was stopped or failed on the way has the bits of one that was not.

What `test_executors_same_bits` does not meet: parameters without a gradient, optimizers whose state
is not of the parameters' dtype, buffers outside of the state dict, failures in an epoch's first
batch. What a loader draws, and what a resume refuses, happens before a batch comes to any executor.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.errors import CheckpointError, UnsupportedError
from tests.products import some_by_day
from tests.worlds import EXECUTORS, INLINE, WORLDS_BY_DAY, World, in_executor_worlds
from tests.zoo import simple_sgd as sgd

pytestmark = pytest.mark.promise("resuming-changes-no-bit", "resume-continues-the-data")

Make = Callable[[list[nn.Parameter]], Optimizer]
Batches = list[tuple[Tensor, Tensor]]


def adamw_of_two_groups(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.01)


def runs(
    executor: str,
    replicas: int,
    *,
    net: nn.Module,
    data: Batches,
    make: Make,
    folder: Path,
    middle: int,
    **options: Any,
) -> tuple[nn.Module, nn.Module]:
    """Return the module as trained in one go, and across a resume."""
    options = {"executor": executor, "replicas": replicas, "microbatches": 3, **options}
    whole, first, second = (copy.deepcopy(net) for _ in range(3))
    with phalanx.Trainer(whole, F.mse_loss, make, **options) as trainer:
        trainer.fit(data)
    with phalanx.Trainer(first, F.mse_loss, make, **options) as trainer:
        trainer.fit(data, steps=middle)
        trainer.save(folder)
    with phalanx.Trainer(second, F.mse_loss, make, **options) as trainer:
        trainer.resume(folder)
        trainer.save(folder)  # at once: nothing is lost by it
        trainer.resume(folder)
        trainer.fit(data)
    return whole, second


def check(world: World, n: int, **how: Any) -> None:
    """Compare the two runs, in every rank with those of one process, too."""
    ((expected, _),) = INLINE.run(partial(runs, **how), 1)
    for nets in world.run(partial(runs, **how), n):
        assert_same_bits(expected, *nets)


def assert_same_bits(net: nn.Module, *others: nn.Module) -> None:
    for other in others:
        for (name, ours), theirs in zip(net.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
        for (name, ours), theirs in zip(net.named_buffers(), other.buffers(), strict=True):
            assert torch.equal(ours, theirs), name


# -- parameters without a gradient ---------------------------------------


class Experts(nn.Module):
    """Two layers, of which the sign of a batch's first number may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(37, 19), nn.Linear(37, 19)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x) + (self.b(x) if x[0, 0] > 0 else 0)
        return out


def expert_data(*without: int) -> Batches:
    draw = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(8, 37, generator=draw), torch.randn(8, 19, generator=draw)) for _ in range(8)
    ]
    for index, (x, _) in enumerate(data):
        x[:, 0] = -1.0 if index in without else 1.0
    return data


@some_by_day("world, without", WORLDS_BY_DAY, [(0,), (1, 6)])
def test_a_parameter_without_a_gradient_in_some_step_does_not_show(
    world: tuple[World, int], without: tuple[int, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    check(
        *world,
        net=Experts(),
        data=expert_data(*without),
        make=adamw_of_two_groups,
        folder=tmp_path / "c",
        middle=4,
    )


# -- state of another dtype ----------------------------------------------


def nadam(parameters: list[nn.Parameter]) -> Optimizer:
    return NAdam(parameters, lr=0.01)


@some_by_day("world, dtype", WORLDS_BY_DAY, [torch.float64, torch.bfloat16])
def test_state_keeps_its_dtype(
    world: tuple[World, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    """NAdam keeps `mu_product` in float32; torch casts it to the parameter's when it loads."""
    data = [(x.to(dtype), y.to(dtype)) for x, y in expert_data()]
    torch.manual_seed(0)
    net = Experts().to(dtype)
    check(*world, net=net, data=data, make=nadam, folder=tmp_path / "c", middle=4)


def with_a_tensor(kind: type[Optimizer], parameters: list[nn.Parameter]) -> Optimizer:
    return kind(parameters, lr=torch.tensor(0.01))  # type: ignore[call-arg]


def every_second_step(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 2)


@some_by_day("world, kind", WORLDS_BY_DAY, [SGD, AdamW])
def test_a_learning_rate_may_be_a_tensor(
    world: tuple[World, int], kind: type[Optimizer], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    make, scheduled = partial(with_a_tensor, kind), kind is SGD
    options: dict[str, Any] = {
        "scheduler": every_second_step if scheduled else None,
        "scheduler_interval": "step",
    }
    how = {"net": Experts(), "data": expert_data(), "make": make, "folder": tmp_path / "c"}
    check(*world, **how, middle=3, **options)
    with phalanx.Trainer(Experts(), F.mse_loss, make, microbatches=3, **options) as trainer:
        trainer.resume(tmp_path / "c")
        rate = trainer.optimizer.param_groups[0]["lr"]
        assert isinstance(rate, Tensor)
        assert rate.item() == pytest.approx(0.001 if scheduled else 0.01)


# -- whatever a state dict holds --------------------------------------------


class Counting(SGD):
    """Steps less and less, by a count that torch's own state does not have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        super().step()


class Averaging(Counting):
    """Keeps it beside the state, as some keep Lookahead's slow weights."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "count"})
        self.count = state_dict["count"]


class Hooked(Counting):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.register_state_dict_post_hook(
            lambda me, state: {**state, "count": torch.tensor(me.count)}
        )
        self.register_load_state_dict_pre_hook(
            lambda me, state: setattr(me, "count", int(state["count"]))
        )


class Global(Counting):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.state["global"] = {"n": torch.zeros(())}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count = int(self.state["global"]["n"])
        self.state["global"]["n"] += 1
        super().step()


class Wrapping(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"base": super().state_dict(), "counts": (self.count, {"list": [1, None]})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["base"])
        self.count, rest = state_dict["counts"]
        assert rest == {"list": [1, None]}


class Bare(Counting):
    def state_dict(self) -> Any:
        return [self.count]

    def load_state_dict(self, state_dict: Any) -> None:
        (self.count,) = state_dict


KEEPERS = [Averaging, Hooked, Global, Wrapping, Bare]


@pytest.mark.promise("checkpoints-are-complete")
@some_by_day("world, kind", WORLDS_BY_DAY, KEEPERS)
def test_whatever_an_optimizers_state_dict_holds_comes_back(
    world: tuple[World, int], kind: type[Optimizer], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    how = {"data": expert_data(), "make": kind, "folder": tmp_path / "c", "middle": 4}
    check(*world, net=nn.Linear(37, 19), **how)


class Unsaveable(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "hook": lambda: 0}


class Remembering(Counting):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state[self.param_groups[0]["params"][0]]["last"] = deque([self.count])


class Extra(nn.Linear):
    """Has a state that is no parameter, and of its own kind."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.kept: Any = {"scale": 1.0, "history": [torch.ones(2)]}

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


@pytest.mark.promise("checkpoints-are-complete")
def test_extra_state_comes_back_and_is_put_back(tmp_path: Path) -> None:
    folder, data = tmp_path / "c", expert_data()
    first, second, other = Extra(37, 19), Extra(37, 19), Extra(37, 19)
    first.kept = {"scale": 2.5, "history": [torch.zeros(3), None, (1, "x")]}
    with phalanx.Trainer(first, F.mse_loss, sgd, replicas=1) as trainer:
        trainer.fit(data, steps=1)
        trainer.save(folder)
    with phalanx.Trainer(second, F.mse_loss, sgd, replicas=1) as trainer:
        trainer.resume(folder)
        assert second.kept["scale"] == 2.5
        assert second.kept["history"][2] == (1, "x")
        assert second.kept["history"][0].tolist() == [0.0] * 3
    with phalanx.Trainer(other, F.mse_loss, Counting, replicas=1) as trainer:
        with pytest.raises(CheckpointError, match="must have optimizer 'Counting'"):
            trainer.resume(folder)
        assert other.kept["scale"] == 1.0


@pytest.mark.promise("checkpoints-are-complete")
def test_a_state_that_cannot_be_saved_is_refused_before_the_training() -> None:
    with pytest.raises(
        UnsupportedError, match=r"`state_dict\(\)` of the optimizer must hold only tensors"
    ):
        phalanx.Trainer(nn.Linear(3, 1), F.mse_loss, Unsaveable)
    net = Extra(3, 1)
    net.kept = object()
    with pytest.raises(UnsupportedError, match=r"must hold only .*`object`"):
        phalanx.Trainer(net, F.mse_loss, sgd)
    with phalanx.Trainer(nn.Linear(37, 19), F.mse_loss, Remembering, replicas=1) as trainer:
        with pytest.raises(UnsupportedError, match=r"must hold only .*deque"):
            trainer.fit(expert_data())
        assert trainer.steps == 1


def test_a_resume_says_what_differs(tmp_path: Path) -> None:
    def make(net: nn.Module, **options: Any) -> phalanx.Trainer:
        return phalanx.Trainer(net, F.mse_loss, sgd, replicas=1, **options)

    small, large = nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
    with make(small) as trainer:
        trainer.save(tmp_path / "small")
    with make(nn.Linear(3, 1), seed=1) as trainer:
        with pytest.warns(UserWarning, match="`seed` must be 0 as in") as caught:
            trainer.resume(tmp_path / "small")
        assert [each.filename for each in caught] == [__file__]
    with make(nn.Sequential(small)) as trainer:
        trainer.save(tmp_path / "first")
        with make(large) as other:
            other.save(tmp_path / "both")
            with pytest.raises(CheckpointError, match=r"Make what was saved"):
                other.resume(tmp_path / "first")
        with pytest.raises(CheckpointError, match=r"Make what was saved"):
            trainer.resume(tmp_path / "both")


# -- buffers outside of the state dict -----------------------------------


class Centering(nn.Module):
    """Takes away a running mean, which no state dict has; beside it a constant."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.lin = nn.Linear(width, 3)
        self.register_buffer("mean", torch.zeros(width), persistent=False)
        self.register_buffer("scale", torch.ones(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        out: Tensor = self.lin((x - self.mean) * self.scale)
        return out


def centering_data() -> Batches:
    torch.manual_seed(0)
    return [(torch.randn(12, 5) + 2, torch.randn(12, 3)) for _ in range(6)]


@in_executor_worlds
def test_a_buffer_outside_of_the_state_dict_is_saved(world: World, n: int, tmp_path: Path) -> None:
    how = {"data": centering_data(), "make": sgd, "folder": tmp_path / "c", "middle": 3}
    check(world, n, net=Centering(), **how)


# -- a failure in an epoch's first batch ---------------------------------


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 3)
        self.failure: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.failure is not None:
            raise self.failure("here")
        out: Tensor = self.lin(x)
        return out


def trained_across_a_failure(
    executor: tuple[str, int],
    fail_at: int | None,
    failure: type[BaseException],
    own_generator: bool,
    saved: Path | None,
) -> Failing:
    """Train three epochs of six shuffled batches; step ``fail_at`` fails once."""
    torch.manual_seed(0)
    net = Failing()
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 5, generator=draw), torch.randn(48, 3, generator=draw))
    generator = torch.Generator().manual_seed(2) if own_generator else None
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=generator)
    how = dict(zip(("executor", "replicas"), executor, strict=True))
    with phalanx.Trainer(net, F.mse_loss, sgd, microbatches=3, **how) as trainer:
        while trainer.epochs < 3:
            net.failure = failure if trainer.steps == fail_at else None
            try:
                trainer.fit(loader, steps=1)
            except failure:
                fail_at = None
                if saved is not None:
                    trainer.save(saved)
                    torch.manual_seed(99)
                    if generator is not None:
                        generator.manual_seed(99)
                    trainer.resume(saved)
    return net


FAILURES = [  # at a step; whether a checkpoint is saved; whether the loader has a generator
    (0, RuntimeError, False, True),
    (3, KeyboardInterrupt, True, False),
    (6, RuntimeError, True, True),
    (6, KeyboardInterrupt, False, False),
]


@some_by_day("executor, case", EXECUTORS, FAILURES)
def test_a_failure_in_any_batch_does_not_show(
    executor: tuple[str, int], case: tuple[int, type[BaseException], bool, bool], tmp_path: Path
) -> None:
    fail_at, failure, saves, own_generator = case
    undisturbed = trained_across_a_failure(("inline", 1), None, failure, own_generator, None)
    saved = tmp_path / "c" if saves else None
    failed = trained_across_a_failure(executor, fail_at, failure, own_generator, saved)
    assert_same_bits(undisturbed, failed)


class Masking:
    """A collator that draws from a generator of its own, made with its first batch."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __call__(self, rows: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(7)
        inputs, targets = (torch.stack(each) for each in zip(*rows, strict=True))
        return [
            inputs * torch.bernoulli(torch.full_like(inputs, 0.7), generator=self.generator),
            targets,
        ]


def masked() -> DataLoader[Any]:
    return DataLoader(data_of(13), batch_size=4, shuffle=True, collate_fn=Masking())


def data_of(rows: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(rows, 5, generator=draw), torch.randn(rows, 3, generator=draw))


@pytest.mark.parametrize(
    ("goes_on", "stops_at"),
    [
        ("with another loader", 2),  # within an epoch
        ("with this one", 4),  # at its end
        ("with this one", 6),  # within the second
    ],
)
def test_what_a_loader_draws_goes_on_where_it_was_left(
    goes_on: str, stops_at: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    whole, stopped = copy.deepcopy(net), copy.deepcopy(net)
    with phalanx.Trainer(whole, F.mse_loss, sgd, replicas=1, microbatches=2) as trainer:
        torch.manual_seed(3)
        trainer.fit(masked(), epochs=3)
    torch.manual_seed(3)
    loader = masked()
    with phalanx.Trainer(stopped, F.mse_loss, sgd, replicas=1, microbatches=2) as trainer:
        trainer.fit(loader, epochs=3, steps=stops_at)
        trainer.save(tmp_path / "c")
        torch.manual_seed(99)
        trainer.resume(tmp_path / "c")
        later = masked() if goes_on == "with another loader" else loader
        trainer.fit(later, steps=12 - stops_at, epochs=3)
    assert_same_bits(whole, stopped)
