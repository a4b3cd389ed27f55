"""Wrapped equals unwrapped: what plain PyTorch computes, `DataParallel` and `Trainer` compute too.

Batches of 1, 2, 7, 9, 15 and 64 rows over 1, 2 and 3 replicas: fewer rows than replicas, one row
more or less than even, and plain even ones. The tolerance is argued in `zoo.py`.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.errors import UnsupportedError
from tests.contracts.containers import cpu_and_others
from tests.products import some_by_day
from tests.zoo import (
    CASES,
    MLP,
    OPTIMIZERS,
    Case,
    PartlyUsed,
    assert_close,
    batches_of,
    gradients_of,
    mlp,
    plain_steps,
    sgd,
    state_of,
    twin_of,
    vector_batch,
)

pytestmark = pytest.mark.promise("wrapped-equals-unwrapped")

STEPS = 10
CONFIGURATIONS = CASES, [1, 2, 7, 9, 15, 64], [1, 2, 3], [torch.float32, torch.float64]
MATRIX_OF_OPTIMIZERS = some_by_day(
    "case, rows, replicas, dtype, optimizer", *CONFIGURATIONS, list(OPTIMIZERS)
)
OPTIMIZER = pytest.mark.parametrize("optimizer", list(OPTIMIZERS))


def parallel(module: nn.Module, replicas: int = 2, **options: Any) -> phalanx.DataParallel:
    return phalanx.DataParallel(module, devices=cpu_and_others(replicas), **options)


@functools.cache
def plain_run(
    case: Case, rows: int, dtype: torch.dtype, optimizer: str
) -> tuple[dict[str, Tensor], list[float], Tensor]:
    """Train the unwrapped twin; return its weights, its losses, its output on one more batch."""
    twin = case.build(dtype)
    losses = plain_steps(
        twin, case.loss, OPTIMIZERS[optimizer], batches_of(case, rows, dtype, STEPS)
    )
    with torch.no_grad():
        return state_of(twin), losses, twin(case.batch(rows, dtype, seed=STEPS)[0])


# --- the matrix -----------------------------------------------------------------------------------


@MATRIX_OF_OPTIMIZERS
def test_ten_optimizer_steps_of_data_parallel_equal_the_twins(
    case: Case, rows: int, replicas: int, dtype: torch.dtype, optimizer: str
) -> None:
    weights, losses, outputs = plain_run(case, rows, dtype, optimizer)
    net = case.build(dtype)
    with parallel(net, replicas) as model:
        got = plain_steps(
            model, case.loss, OPTIMIZERS[optimizer], batches_of(case, rows, dtype, STEPS)
        )
        with torch.no_grad():
            assert_close(model(case.batch(rows, dtype, seed=STEPS)[0]), outputs, dtype)
    assert_close(state_of(net), weights, dtype)
    assert_close(got, losses, dtype)


@MATRIX_OF_OPTIMIZERS
def test_ten_optimizer_steps_of_the_trainer_equal_the_twins(
    case: Case, rows: int, replicas: int, dtype: torch.dtype, optimizer: str
) -> None:
    weights, losses, outputs = plain_run(case, rows, dtype, optimizer)
    with phalanx.Trainer(
        case.build(dtype),
        case.loss,
        OPTIMIZERS[optimizer],
        microbatches=None,
        replicas=cpu_and_others(replicas),
    ) as trainer:
        done = [trainer.step(batch) for batch in batches_of(case, rows, dtype, STEPS)]
        with torch.no_grad():
            assert_close(trainer.module(case.batch(rows, dtype, seed=STEPS)[0]), outputs, dtype)
        assert_close(state_of(trainer.module), weights, dtype)
    assert_close([event.loss for event in done], losses, dtype)
    assert [event.step for event in done] == list(range(1, STEPS + 1))
    assert {event.samples for event in done} == {rows}
    assert all(sum(event.shares) == rows and len(event.shares) == replicas for event in done)


# --- inputs and graphs of other kinds -------------------------------------------------------------


def test_only_the_input_needs_a_gradient() -> None:
    net = mlp(torch.float64).requires_grad_(False)
    twin = twin_of(net)
    x = torch.randn(9, 7, dtype=torch.float64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    with parallel(net, 3) as model:
        model(x).square().sum().backward()
    twin(other).square().sum().backward()
    assert_close(x.grad, other.grad, torch.float64)


# --- parameters of other kinds --------------------------------------------------------------------


def frozen_mlp() -> nn.Module:
    net = mlp(torch.float64)
    net[0].weight.requires_grad_(False)
    net[2].requires_grad_(False)
    return net


@pytest.mark.parametrize(
    "build", [frozen_mlp, lambda: PartlyUsed().double()], ids=["frozen", "unused"]
)
@OPTIMIZER
def test_frozen_and_unused_parameters_stay_as_they_are(build: Any, optimizer: str) -> None:
    """Weight decay would move them if they were given a gradient of zeros instead of none."""
    torch.manual_seed(0)
    net = build()
    twin, for_trainer, start = twin_of(net), twin_of(net), state_of(net)
    factory = OPTIMIZERS[optimizer]
    batches = batches_of(MLP, 9, torch.float64, STEPS)
    plain_steps(twin, MLP.loss, factory, batches)
    with parallel(net) as model:
        plain_steps(model, MLP.loss, factory, batches)
    with phalanx.Trainer(
        for_trainer, MLP.loss, factory, microbatches=None, replicas=cpu_and_others(2)
    ) as trainer:
        for batch in batches:
            trainer.step(batch)
        trained = state_of(trainer.module)
    assert [g is None for g in gradients_of(net)] == [g is None for g in gradients_of(twin)]
    assert_close(state_of(net), state_of(twin), torch.float64)
    assert_close(trained, state_of(twin), torch.float64)
    untouched = [name for name in start if torch.equal(start[name], state_of(twin)[name])]
    assert untouched
    for name in untouched:
        assert torch.equal(trained[name], start[name])
        assert torch.equal(state_of(net)[name], start[name])


@pytest.mark.parametrize("frozen_at", [{0, 1, 2}, {3, 4}, {1, 3}], ids=["thawed", "frozen", "both"])
@OPTIMIZER
def test_the_trainer_notices_freezing_and_thawing_between_steps(
    frozen_at: set[int], optimizer: str
) -> None:
    """As when a pretrained part is held still for the first steps."""
    factory = OPTIMIZERS[optimizer]
    batches = batches_of(MLP, 9, torch.float64, 6)
    twin = mlp(torch.float64)
    plain = factory(twin.parameters())
    with phalanx.Trainer(
        mlp(torch.float64), MLP.loss, factory, microbatches=None, replicas=cpu_and_others(2)
    ) as trainer:
        for index, (inputs, targets) in enumerate(batches):
            for each in (trainer.module, twin):
                each[0].requires_grad_(index not in frozen_at)
            trainer.step((inputs, targets))
            plain.zero_grad()
            MLP.loss(twin(inputs), targets).backward()
            plain.step()
            assert_close(state_of(trainer.module), state_of(twin), torch.float64)


# --- what a module can do -------------------------------------------------------------------------


def gradient_penalty(model: nn.Module, x: Tensor) -> None:
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()


def test_double_backward_is_refused_by_name() -> None:
    net = nn.Sequential(nn.Linear(7, 4), nn.Tanh())
    x = torch.randn(9, 7, requires_grad=True)
    with parallel(net) as model:
        with pytest.raises((UnsupportedError, RuntimeError), match=r"(?i)double backward"):
            gradient_penalty(model, x)
        assert gradients_of(net) == [None, None]
        model(x).sum().backward()
    assert all(gradient is not None for gradient in gradients_of(net))


def test_the_callers_threads_inside_operators_come_back() -> None:
    """Beside open replicas a spinning pool of the caller's would steal their cores (measured)."""
    torch.set_num_threads(2)
    x, targets = vector_batch(9)
    with phalanx.DataParallel(mlp(), devices=["cpu"] * 2) as model:
        assert torch.get_num_threads() == 2
        MLP.loss(model(x), targets).backward()
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    dropped = parallel(mlp(), 2)
    dropped(x)
    del dropped
    gc.collect()
    assert torch.get_num_threads() == 2
    with parallel(mlp(), 1) as model:
        model(x)
        assert torch.get_num_threads() == 2
    with phalanx.Trainer(
        mlp(), MLP.loss, sgd, replicas=cpu_and_others(2), microbatches=4
    ) as trainer:
        trainer.step((x, targets))
        assert torch.get_num_threads() == 2


def test_two_graphs_live_at_once_and_run_back_in_any_order() -> None:
    net = mlp(torch.float64)
    twin = twin_of(net)
    (x, x_targets), (y, y_targets) = vector_batch(9, torch.float64), vector_batch(7, torch.float64)
    with parallel(net) as model:
        for each in (model, twin):
            first, second = each(x), each(y)
            MLP.loss(first, x_targets).backward()
            MLP.loss(second, y_targets).backward()
            (MLP.loss(each(x), x_targets) * 2 + MLP.loss(each(y), y_targets)).backward()
    assert_close(gradients_of(net), gradients_of(twin), torch.float64)
