"""Workers that share a module and are killed in the middle of a sync: the others go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch
from torch import nn

from phalanx import tables
from phalanx.tables import shared_module
from tests.multiprocess.children import Children, Parent, wait_for_exit
from tests.products import some_by_day

pytestmark = pytest.mark.promise("shared-modules")

DEADLINE_S = 60.0
STEPS = 4


def make_net() -> nn.Module:
    """Two tables of parameters and one of statistics, so that a sync has a middle."""
    net = nn.Sequential(nn.Linear(3, 2).double(), nn.BatchNorm1d(2))
    with torch.no_grad():
        for tensor in [*net.parameters(), net[1].running_mean, net[1].running_var]:
            tensor.fill_(1.0)
    return net


def move(net: nn.Module, by: float) -> None:
    with torch.no_grad():
        for tensor in [*net.parameters(), net[1].running_mean]:
            tensor += by


def values(net: nn.Module) -> list[set[float]]:
    """Every tensor moves as one, so whatever is half done shows as two values."""
    tensors = [*net.parameters(), net[1].running_mean]
    return [set(tensor.detach().view(-1).tolist()) for tensor in tensors]


POINTS = ("note", "give", "end_round", "receive")


def die_before(point: str, which: int) -> None:
    """Kill this process before the ``which``-th exchange comes to a point of the next sync."""
    original: Callable = getattr(shared_module.ParameterExchange, point)
    left = which

    def deadly(self: shared_module.ParameterExchange, *args: object, **kwargs: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, *args, **kwargs)

    setattr(shared_module.ParameterExchange, point, deadly)


def victim(parent: Parent, run: str, how: dict, point: str, which: int) -> None:
    with tables.join(run, num_workers=3, timeout_s=DEADLINE_S, **how) as world:
        net = make_net()
        shared = tables.SharedModule(net, world, merge="sum", name="net")
        move(net, 1.0)
        shared.sync()
        parent.tell(world.worker_id)
        parent.hear()
        move(net, 1.0)
        die_before(point, which)
        shared.sync()


def survivor(parent: Parent, run: str, how: dict) -> None:
    with tables.join(run, num_workers=3, timeout_s=DEADLINE_S, **how) as world:
        net = make_net()
        shared = tables.SharedModule(net, world, merge="sum", name="net")
        move(net, 1.0)
        shared.sync()
        parent.tell(world.worker_id)
        parent.hear()
        for _ in range(STEPS):
            move(net, 1.0)
            shared.sync()
        world.barrier()
        shared.sync()
        parent.tell((values(net), shared.num_syncs))
        parent.hear()


def kill_in_the_middle(run: str, how: dict, point: str, which: int, other: Callable) -> None:
    """Kill one of three workers as it syncs; see what the others have at the end."""
    with Children() as children:
        doomed = children.start(victim, run, how, point, which)
        others = [children.start(body, run, how) for body in (survivor, other)]
        assert sorted(child.get() for child in [doomed, *others]) == [0, 1, 2]
        for child in [doomed, *others]:
            child.put()
        wait_for_exit(doomed.pid)
        (first, syncs), (second, _) = [child.get() for child in others]
        for child in others:
            child.put()
            child.process.join(DEADLINE_S)
        assert syncs == STEPS + 2
        given = {"note": 0, "give": which - 1}.get(point, 2)  # tables that the dead one had given
        lived = 1.0 + 3 + 2 * STEPS  # what the survivors and the first sync of all have made of it
        for place, found in enumerate(first[:-1]):
            assert len(found) == 1, f"tensor {place} was half done"
            assert found == {lived + min(given, 1)}, "a change is lost, or there twice"
        assert first[:-1] == second[:-1]  # the last is of statistics


@some_by_day("how, point, which", [{}, {"sync": True}, {"staleness": 1}], POINTS, [1, 2])
def test_the_others_go_on_when_a_worker_is_killed_in_the_middle_of_a_sync(run, how, point, which):
    kill_in_the_middle(run, how, point, which, survivor)


def forgetful(parent: Parent, run: str, how: dict) -> None:
    """The planted bug: what an exchange has given is not marked off."""
    original = shared_module.ParameterExchange.receive

    def receive(self: shared_module.ParameterExchange, *, alone: bool) -> None:
        before = self._base.clone()
        original(self, alone=alone)
        self._base = before

    shared_module.ParameterExchange.receive = receive
    survivor(parent, run, how)


def test_a_survivor_that_gives_something_twice_would_be_seen(run):
    with pytest.raises(AssertionError, match="a change is lost, or there twice"):
        kill_in_the_middle(run, {}, "note", 1, forgetful)
