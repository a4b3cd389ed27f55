"""What every executor of one process's own promises to a task and to who runs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from phalanx.execution import (
    Executor,
    ExecutorChoice,
    FailureLog,
    MicrobatchContext,
    Task,
    open_executor,
)

pytestmark = pytest.mark.filterwarnings("ignore:`replicas` should be at most")

ROWS = torch.arange(6.0).reshape(3, 2)


@pytest.fixture(scope="module", params=[("inline", 1), ("threads", 2), ("processes", 2)])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    kind, count = request.param
    choice = ExecutorChoice.read(kind)
    module, devices = nn.Linear(2, 1, bias=False), [torch.device("cpu")] * count
    opened = open_executor(choice, module, FailureLog(0), devices, intra_op=1)
    yield opened
    opened.close()


class Train(Task):
    def __call__(self, context: MicrobatchContext) -> None:
        context.replica.module(context.batch).sum().backward()


def test_gradients_are_added_along_the_tree(executor: Executor) -> None:
    batches, weights = list(ROWS), [1.0] * 3
    whole = executor.run(Train(), batches, weights=weights, seed=(1,))
    left, right = [operand.gradients[0] for operand in whole.operands]
    assert torch.equal(left, ROWS[:2].sum(0))
    assert torch.equal(right, ROWS[2])  # the last addition is the caller's
    nothing = executor.run(Train(), [None] * 3, weights=[0.0] * 3, seed=(1,))
    assert nothing.operands == []
