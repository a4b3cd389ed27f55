"""`DataParallel(executor="processes")` does what threads do, to the bit, whoever is lost."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx import DataParallel, Processes, WorkerLost
from phalanx.errors import ConfigError, StateError, UnsupportedError
from tests.multiprocess.forked_workers import forked_by_day

pytestmark = pytest.mark.filterwarnings("ignore:`replicas` should be at most")


@pytest.fixture(scope="module", autouse=True)
def forked_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    with forked_by_day(request.config):
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x)).relu()))


def batch(seed: int) -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(seed))


class Pair:
    """The same net on threads and on worker processes, one after the other at every step."""

    def __init__(self) -> None:
        self.lost: list[WorkerLost] = []
        self.models = {
            kind: DataParallel(Net(), 2, intra_op=1, executor=executor)
            for kind, executor in (
                ("threads", "threads"),
                ("processes", Processes(timeout_s=90.0, on_failure=self.lost.append)),
            )
        }

    def both(self, act: Any) -> None:
        """Do ``act(model)`` with both from the same random numbers, and compare all they have."""
        found = []
        for model in self.models.values():
            torch.manual_seed(1)
            told = act(model)
            state = copy.deepcopy(model.state_dict()).values()
            grads = [parameter.grad for parameter in model.parameters()]
            found.append([told, torch.get_rng_state(), *grads, *state])
        for ours, theirs in zip(*found, strict=True):
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def opened() -> Iterator[Pair]:
    pair = Pair()
    pair.both(lambda model: passed(model, batch(0)))  # threads start before a test
    yield pair
    for model in pair.models.values():
        model.close()


@pytest.fixture
def pair(opened: Pair) -> Pair:
    for model in opened.models.values():
        model.zero_grad()
    return opened


def passed(model: DataParallel, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    outputs = model(x)
    outputs.square().mean().backward()
    return torch.cat([outputs.detach().flatten(), x.grad.flatten()])


def test_outputs_gradients_buffers_and_random_numbers_are_the_same_bits(pair: Pair) -> None:
    for seed in range(3):
        pair.both(lambda model, seed=seed: passed(model, batch(seed)))


def test_sizes_may_leave_a_replica_out(pair: Pair) -> None:
    def act(model: DataParallel) -> Tensor:
        outputs = model.forward_sized([7, 0], batch(0))
        outputs.sum().backward()
        return outputs.detach()

    pair.both(act)


def test_passes_may_overlap_and_be_gone_back_through_twice(pair: Pair) -> None:
    def act(model: DataParallel) -> Tensor:
        losses = [model(batch(seed)).sum() for seed in range(2)]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        losses[0].backward()
        with pytest.raises(StateError, match="has freed it"):
            losses[1].backward()
        return losses[0].detach()

    pair.both(act)


def test_gradients_may_be_held_and_merged(pair: Pair) -> None:
    def act(model: DataParallel) -> Tensor:
        with model.no_sync():
            passed(model, batch(0))
            model.forward_sized([7, 0], batch(1)).sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        return passed(model, batch(2))

    pair.both(act)
    pair.both(lambda model: model.forward_sized([0, 7], batch(3)).sum().backward())

    def merge(model: DataParallel) -> Tensor:
        with model.no_sync():
            told = passed(model, batch(4))
        model.merge_gradients()
        return told

    pair.both(merge)


def test_a_graph_of_a_lost_worker_is_made_anew_and_the_loss_is_told(pair: Pair) -> None:
    pair.both(lambda model: passed(model, batch(0)))

    def act(model: DataParallel) -> Tensor:
        loss = model(batch(1)).square().sum()
        for pid in model.worker_pids[:1]:
            os.kill(pid, signal.SIGKILL)
        loss.backward()
        return loss.detach()

    pair.both(act)
    pair.both(lambda model: passed(model, batch(2)))
    assert [each.worker for each in pair.lost] == [0]
    pair.lost.clear()


def test_workers_keep_no_graph_that_is_gone(pair: Pair) -> None:
    running = pair.models["processes"]._running.executor
    assert all(worker.poll_ready(90.0) for worker in running._workers)  # one may be a replacement
    for model in pair.models.values():
        left = [model(batch(0)) for _ in range(3)]
        left[0].sum().backward()
        del left
        model(batch(0)).sum().backward()
        passed(model, batch(0))
    executor = pair.models["processes"]._running.executor
    assert [worker.saved for worker in executor._workers] == [frozenset()] * 2
    assert pair.models["threads"]._running.executor._saved == [{}, {}]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"buffers": "sync"}, "`buffers` must be .* but is 'sync' for `norm.running_mean`"),
        ({"executor": "ranks"}, "`executor` must be one of 'threads', 'processes', or"),
        ({"executor": Processes}, "`executor` must be one of"),
    ],
)
def test_what_cannot_work_is_refused_at_once(options: dict[str, Any], match: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=match):
        DataParallel(Net(), **{"devices": 2, "executor": "processes", **options})


def test_it_says_where_its_replicas_are() -> None:
    model = DataParallel(nn.Linear(2, 1), 2, executor="processes")
    assert "worker processes" in repr(model)
    assert model.worker_pids == ()
