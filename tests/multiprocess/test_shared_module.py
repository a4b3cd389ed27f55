"""Workers that share a module and are killed in the middle of a sync: the others go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch
from torch import nn

from phalanx import tables
from phalanx.tables import module_exchange
from tests.multiprocess.children import Children, Parent, wait_for_exit
from tests.products import in_pairs

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


POINTS = ("note", "give", "ask", "receive")


def die_before(point: str, which: int) -> None:
    """Kill this process before the ``which``-th exchange comes to a point of the next sync."""
    original: Callable = getattr(module_exchange.ParameterExchange, point)
    left = which

    def deadly(self: module_exchange.ParameterExchange, *args: object, **kwargs: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, *args, **kwargs)

    setattr(module_exchange.ParameterExchange, point, deadly)


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


@in_pairs("how, point, which", [{}, {"sync": True}, {"staleness": 1}], POINTS, [1, 2, 3])
def test_the_others_go_on_when_a_worker_is_killed_in_the_middle_of_a_sync(run, how, point, which):
    with Children() as children:
        doomed = children.start(victim, run, how, point, which)
        others = [children.start(survivor, run, how) for _ in range(2)]
        assert sorted(child.get() for child in [doomed, *others]) == [0, 1, 2]
        for child in [doomed, *others]:
            child.put()
        wait_for_exit(doomed.pid)
        (first, syncs), (second, _) = [child.get() for child in others]
        assert syncs == STEPS + 2
        assert first[:-1] == second[:-1]  # the last is of statistics
        given = {"note": 0, "give": which - 1}.get(point, 3)  # tables that the dead one had given
        lived = 1.0 + 3 + 2 * STEPS  # what the survivors and the first sync of all have made of it
        for place, (found, table) in enumerate(zip(first[:-1], (0, 0, 1, 1), strict=True)):
            assert len(found) == 1, f"tensor {place} was half done"
            assert found == {lived + (1 if given > table else 0)}
        for child in others:
            child.put()
            child.process.join(DEADLINE_S)


def forgetful(parent: Parent, run: str, how: dict) -> None:
    """The planted bug: what an exchange has given is not marked off."""
    original = module_exchange.ParameterExchange.receive

    def receive(self: module_exchange.ParameterExchange, *, alone: bool) -> None:
        before = self._base.clone()
        original(self, alone=alone)
        self._base = before

    module_exchange.ParameterExchange.receive = receive
    survivor(parent, run, how)


def test_a_survivor_that_gives_something_twice_would_be_seen(run):
    with Children() as children:
        others = [children.start(survivor, run, {}), children.start(forgetful, run, {})]
        doomed = children.start(victim, run, {}, "note", 1)
        for child in [*others, doomed]:
            child.get()
        for child in [*others, doomed]:
            child.put()
        wait_for_exit(doomed.pid)
        found, _ = others[0].get()
        others[1].get()
        assert found[0] != {1.0 + 3 + 2 * STEPS}
        for child in others:
            child.put()
            child.process.join(DEADLINE_S)
