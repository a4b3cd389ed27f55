"""What every executor of one process's own promises to a task and to who runs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from phalanx.execution import (
    CachedPayload,
    Executor,
    ExecutorChoice,
    ExecutorMaker,
    FailureLog,
    MicrobatchContext,
)
from phalanx.types import Nested
from tests.multiprocess.forked_workers import forked_by_day

pytestmark = pytest.mark.filterwarnings("ignore:`replicas` should be at most")

ROWS = torch.arange(6.0).reshape(3, 2)


@pytest.fixture(scope="module", params=[("inline", 1), ("threads", 2), ("processes", 2)])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    kind, count = request.param
    choice = ExecutorChoice.read(kind, [kind])
    make = ExecutorMaker(choice, nn.Linear(2, 1, bias=False), FailureLog(0))
    with forked_by_day(request.config):
        opened = make([torch.device("cpu")] * count, workloads=None, intra_op=1)
        yield opened
        opened.close()


@dataclass(frozen=True)
class Keeps(CachedPayload):
    """A payload that says whether the replica has it."""

    name: str

    def for_replica(self, has: bool) -> Nested:
        return self.name, has


def save(context: MicrobatchContext) -> bool:
    name, had = context.batch
    context.saved[name] = context.index
    return bool(had)


def look(context: MicrobatchContext) -> bool:
    name, had = context.batch
    assert had == (name in context.saved)
    return bool(had)


def train(context: MicrobatchContext) -> None:
    context.replica.module(context.batch).sum().backward()


def fail(context: MicrobatchContext) -> None:
    save(context)
    raise ArithmeticError("after it was saved")


def names_of(executor: Executor) -> list[Keeps]:
    return [Keeps(f"mine {index}") for index in range(len(executor))]


def test_what_a_task_saves_is_there_until_it_is_forgotten(executor: Executor) -> None:
    batches, count = names_of(executor), len(executor)
    weights = [1.0] * count
    first = executor.run(batches, save, weights=weights, seed=(1,), pinned=True)
    assert first.results == [False] * count
    for _ in range(2):
        again = executor.run(
            batches, look, weights=weights, seed=(1,), pinned=True, as_of=first.version
        )
        assert again.results == [True] * count
    executor.forget(batches[0].name)
    last = executor.run(batches, look, weights=weights, seed=(1,), pinned=True)
    assert last.results == [False] + [True] * (count - 1)
    for batch in batches:
        executor.forget(batch.name)


def test_what_a_task_saved_before_it_failed_is_known(executor: Executor) -> None:
    batches = names_of(executor)[:1]
    with pytest.raises(ArithmeticError, match="after it was saved"):
        executor.run(batches, fail, weights=[1.0], seed=(1,))
    executor.forget(batches[0].name)
    found = executor.run(batches * 2, look, weights=[1.0, 1.0], seed=(1,))
    assert found.results == [False, False]


def test_gradients_are_added_along_the_tree_or_left_apart(executor: Executor) -> None:
    batches, weights = list(ROWS), [1.0] * 3
    whole = executor.run(batches, train, weights=weights, seed=(1,))
    (total,) = executor.add_gradients(whole)
    assert torch.equal(total, ROWS.sum(0))
    apart = executor.run(batches, train, weights=weights, seed=(1,), adds=False)
    found = [own.gradients[0].clone() for own in apart.sums.values()]
    assert torch.equal(torch.stack(found), ROWS)


def test_every_microbatchs_gradients_pass_the_hook(executor: Executor) -> None:
    def hook(index: int, gradients: list[Tensor | None] | None) -> list[Tensor | None]:
        if gradients is None:
            return [torch.full((2,), 100.0)]
        return [None if each is None else each * (index + 1) for each in gradients]

    weights = [1.0, 0.0, 1.0]
    result = executor.run(list(ROWS), train, weights=weights, seed=(1,), gradient_hook=hook)
    (total,) = executor.add_gradients(result)
    assert torch.equal(total, ROWS[0] + 100 + 3 * ROWS[2])
    nothing = executor.run([None] * 3, train, weights=[0.0] * 3, seed=(1,))
    assert executor.add_gradients(nothing) == [None]
