"""A compiled model runs its graphs in every configuration, and other models stay compiled.

The backend of these tests runs a graph as it is and writes down, in a file that worker processes
share, every graph that it is given and every run of one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from tests.contracts.containers import draw
from tests.zoo import assert_close, assert_same_bits, sgd, state_of

pytestmark = pytest.mark.promise("compiled-models")

F64 = torch.float64
STEPS, MICROBATCHES, ROWS = 3, 6, 12
EXECUTORS = pytest.mark.parametrize(
    ("executor", "replicas"),
    [pytest.param("inline", 1, marks=pytest.mark.night), ("threads", 3), ("processes", 2)],
)


def log_graphs(path: Path, graph: Any, examples: Any) -> Callable[..., Any]:
    """Compile nothing; note in ``path`` each graph (``c``) and each of its runs (``r``)."""
    write(path, "c")

    def run(*args: Any) -> Any:
        write(path, "r")
        return graph(*args)

    return run


def write(path: Path, letter: str) -> None:
    with path.open("a") as file:
        file.write(letter)


class Log:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.backend = partial(log_graphs, path)

    def take(self) -> tuple[int, int]:
        """Return how many graphs were compiled, and how many runs there were, since last asked."""
        text = self.path.read_text() if self.path.exists() else ""
        self.path.unlink(missing_ok=True)
        return text.count("c"), text.count("r")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    torch._dynamo.reset()
    yield Log(tmp_path / "graphs")
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.dropout = nn.Dropout(p)
        self.double()

    def forward(self, data: Tensor) -> Tensor:
        return self.last(self.dropout(self.first(data).tanh()))


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


def batches(rows: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    return [(draw(rows, 4, seed=seed), draw(rows, 2, seed=seed)) for seed in range(STEPS)]


def trained(module: nn.Module, rows: int = ROWS, **options: Any) -> list[Tensor]:
    options = {"microbatches": MICROBATCHES, **options}
    with phalanx.Trainer(module, F.mse_loss, sgd, **{"microbatches": None, **options}) as trainer:
        trainer.fit(batches(rows))
    return [parameter.detach().clone() for parameter in module.parameters()]


def assert_others_are_compiled(log: Log, *models: nn.Module) -> None:
    """Models run their graphs in plain calls, of the class that was trained and of another."""
    log.take()
    for model in (*models, torch.compile(Net(), backend=log.backend)):
        model(draw(5, 4))
        assert log.take()[1] == 1
    torch.compile(Other(), backend=log.backend)(draw(5, 4))
    assert log.take() == (1, 1)


@EXECUTORS
def test_a_trainer_runs_the_graphs_with_the_bits_of_the_model_as_it_is(
    executor: str, replicas: int, log: Log
) -> None:
    model = torch.compile(Net(), backend=log.backend)
    expected = trained(Net(), executor=executor, replicas=replicas)
    assert_same_bits(trained(model, executor=executor, replicas=replicas), expected)
    compiled, ran = log.take()
    assert ran == STEPS * MICROBATCHES
    assert compiled <= 2 * (replicas if executor == "processes" else 1)  # first and later offsets
    assert_others_are_compiled(log, model)


@EXECUTORS
def test_a_model_that_draws_has_the_same_numbers(executor: str, replicas: int, log: Log) -> None:
    model = torch.compile(Net(0.5), backend=log.backend)
    expected = trained(Net(0.5), executor="inline", replicas=1)
    assert_same_bits(trained(model, executor=executor, replicas=replicas), expected)
    assert log.take()[1] >= STEPS * MICROBATCHES
    assert_others_are_compiled(log, model)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_container_runs_the_graphs(p: float, log: Log) -> None:
    model = torch.compile(Net(p), backend=log.backend)
    with phalanx.DataParallel(model, 3) as wrapped, phalanx.DataParallel(Net(p), 3) as plain:
        for x, _ in batches():
            seed = torch.get_rng_state()
            found = wrapped(x)
            torch.set_rng_state(seed)
            assert_same_bits(found.detach(), plain(x).detach())
            found.sum().backward()
    assert log.take()[1] >= 3 * STEPS
    assert_others_are_compiled(log, model)


def test_a_compiled_part_and_a_compiled_function_run_their_graphs(log: Log) -> None:
    class Holds(nn.Module):
        def __init__(self, compiles: bool) -> None:
            super().__init__()
            self.inner: Any = torch.compile(Net(), backend=log.backend) if compiles else Net()
            self.end: Any = torch.compile(F.silu, backend=log.backend) if compiles else F.silu

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.inner(x))

    expected = trained(Holds(False), replicas=2)
    assert_same_bits(trained(Holds(True), replicas=2), expected)
    assert log.take()[1] == 2 * STEPS * MICROBATCHES


def test_a_compiled_loss_and_a_global_compiled_function_have_the_right_numbers(log: Log) -> None:
    helper = torch.compile(lambda x: x.tanh() * 2.0, backend=log.backend)

    class Calls(Net):
        def forward(self, data: Tensor) -> Tensor:
            return helper(super().forward(data))

    class Plain(Net):
        def forward(self, data: Tensor) -> Tensor:
            return super().forward(data).tanh() * 2.0

    found, expected = Calls(), Plain()
    for module, loss in (
        (found, torch.compile(F.mse_loss, backend=log.backend)),
        (expected, F.mse_loss),
    ):
        with phalanx.Trainer(module, loss, sgd, replicas=2, microbatches=4) as trainer:
            trainer.fit(batches())
    assert_close(state_of(found), state_of(expected), F64)
    assert log.take()[1] > 0
    assert_others_are_compiled(log)


@pytest.mark.night
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_inductor_has_the_same_bits_in_every_executor(p: float, log: Log) -> None:
    """Its dropout draws other numbers than that of plain torch, as it does without us."""
    found = [
        trained(torch.compile(Net(p), backend="inductor"), executor=executor, replicas=replicas)
        for executor, replicas in (("threads", 3), ("processes", 2))
    ]
    assert_same_bits(*found)
    if not p:
        assert_close(found[0], trained(Net(), replicas=1), F64)
