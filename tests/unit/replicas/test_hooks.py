"""Hooks of the source run in its replicas: those of now and of later, and none that was removed.

A hook that is a method of a module inside of the model belongs to the replica's own module there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.replicas import Replica

CPU = torch.device("cpu")
X = torch.ones(5, 3)


class Counting(nn.Module):
    """Has methods that serve as hooks, and shows whose were called."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)
        self.calls = 0
        self.last: tuple[object, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)

    def count(self, *_: object, **__: object) -> None:
        self.calls += 1

    def keep(self, word: object, *_: object, by: object = None) -> None:
        self.last = (self, word, by)


def replica_of(source: nn.Module) -> Any:
    return Replica(source, CPU, 0)


def run(replica: Any) -> None:
    x = X.clone().requires_grad_()
    replica.refresh()
    replica.module(x).sum().backward()


REGISTER: dict[str, Callable[[nn.Module, Any], Any]] = {
    "forward pre": lambda module, hook: module.register_forward_pre_hook(hook),
    "forward": lambda module, hook: module.register_forward_hook(hook),
    "forward always": lambda module, hook: module.register_forward_hook(hook, always_call=True),
    "forward with kwargs": lambda module, hook: module.register_forward_hook(
        hook, with_kwargs=True
    ),
    "forward pre with kwargs": lambda module, hook: module.register_forward_pre_hook(
        hook, with_kwargs=True
    ),
    "backward": lambda module, hook: module.register_full_backward_hook(hook),
    "backward pre": lambda module, hook: module.register_full_backward_pre_hook(hook),
}
KINDS = pytest.mark.parametrize("register", REGISTER.values(), ids=REGISTER.keys())
PLACES = pytest.mark.parametrize("place", ["", "child"])


# --- hooks that belong to nobody ------------------------------------------------------------------


@KINDS
@PLACES
def test_hooks_of_before_run_on_the_replicas_own_module(register: Any, place: str) -> None:
    source, seen = Counting(), []
    register(source.get_submodule(place), lambda module, *_: seen.append(module))
    replica = replica_of(source)
    run(replica)
    assert seen == [replica.module.get_submodule(place)]


@KINDS
@PLACES
def test_hooks_of_later_run_without_a_new_replica_and_not_after_they_were_removed(
    register: Any, place: str
) -> None:
    source, seen = Counting(), []
    replica = replica_of(source)
    run(replica)
    handle = register(source.get_submodule(place), lambda module, *_: seen.append(module))
    assert replica.matches_source()
    run(replica)
    assert seen == [replica.module.get_submodule(place)]
    handle.remove()
    assert replica.matches_source()
    run(replica)
    assert len(seen) == 1


def test_hooks_keep_their_order_also_when_put_in_front() -> None:
    source, seen = Counting(), []
    source.register_forward_hook(lambda *_: seen.append("first"))
    replica = replica_of(source)
    source.register_forward_hook(lambda *_: seen.append("second"))
    source.register_forward_hook(lambda *_: seen.append("front"), prepend=True)
    run(replica)
    assert seen == ["front", "first", "second"]


def test_hooks_change_what_the_replica_computes() -> None:
    source = Counting()
    source.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    replica = replica_of(source)
    source.child.register_forward_hook(lambda _, __, output: output + 1)
    replica.refresh()
    assert torch.equal(replica.module(X), source.child(X * 2))


@KINDS
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_may_hold_what_cannot_be_copied(register: Any, when: str) -> None:
    source, lock, seen = Counting(), threading.Lock(), []

    def hook(held: object, *_: object) -> None:
        seen.append(held)

    if when == "before":
        register(source.child, functools.partial(hook, lock))
    replica = replica_of(source)
    if when == "after":
        register(source.child, functools.partial(hook, lock))
    run(replica)
    assert seen == [lock]


# --- hooks that are methods of the model ----------------------------------------------------------


@KINDS
@PLACES
def test_a_method_of_the_model_belongs_to_the_replica(register: Any, place: str) -> None:
    source = Counting()
    register(source.get_submodule(place), source.count)
    first, second = replica_of(source), replica_of(source)
    run(first)
    run(first)
    run(second)
    assert (source.calls, first.module.calls, second.module.calls) == (0, 2, 1)


def test_a_method_of_something_else_stays_its_own() -> None:
    source, stranger = Counting(), Counting()
    source.register_forward_hook(stranger.count)
    source.register_forward_hook(functools.partial(stranger.keep, 3))
    replica = replica_of(source)
    run(replica)
    assert stranger.calls == 1
    assert stranger.last == (stranger, 3, None)


# --- through a container --------------------------------------------------------------------------


def test_a_container_runs_hooks_once_per_replica_in_use() -> None:
    net, seen = Counting(), []
    with phalanx.DataParallel(net, 3) as model:
        model(X)
        handle = net.child.register_forward_hook(lambda _, args, __: seen.append(len(args[0])))
        model(X)
        assert sorted(seen) == [1, 2, 2]
        model(X[:2])
        assert sorted(seen) == [1, 1, 1, 2, 2]
        handle.remove()
        model(X)
        assert len(seen) == 5


def test_a_container_follows_methods_that_are_registered_and_removed_later() -> None:
    net = Counting()
    seen: list[object] = []
    net.register_forward_hook(lambda module, *_: seen.append(module.calls))
    with phalanx.DataParallel(net, 3) as model:
        model(X)
        handle = net.child.register_forward_hook(net.count)
        model(X)
        model(X)
        handle.remove()
        model(X)
    assert net.calls == 0
    assert seen == [0] * 3 + [1] * 3 + [2] * 3 + [0] * 3


def test_gradients_pass_through_backward_hooks_of_the_replicas() -> None:
    net, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(net.state_dict())
    with phalanx.DataParallel(nn.Sequential(net), 3) as model:
        model(X)
        for module in (net, twin):
            module.register_full_backward_hook(lambda _, given, __: (given[0] * 3,))
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        model(x).sum().backward()
        twin(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(net.weight.grad, twin.weight.grad)


def test_hooks_on_the_container_itself_run_once() -> None:
    seen: list[tuple[int, ...]] = []
    with phalanx.DataParallel(nn.Linear(3, 2), 3) as model:
        model.register_forward_hook(lambda _, __, output: seen.append(tuple(output.shape)))
        model(X)
    assert seen == [(5, 2)]


def test_hooks_on_parameters_run_once_on_the_whole_gradient() -> None:
    net, seen = nn.Linear(3, 2), []
    net.bias.register_hook(lambda gradient: seen.append(gradient.tolist()))
    with phalanx.DataParallel(net, 3) as model:
        model(X).sum().backward()
    assert seen == [[5.0, 5.0]]
