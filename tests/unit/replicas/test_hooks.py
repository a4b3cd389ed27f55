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


def test_hooks_of_saving_and_loading_may_hold_what_cannot_be_copied() -> None:
    source, lock = Counting(), threading.Lock()
    hook = functools.partial(lambda held, *_: None, lock)
    source.register_state_dict_post_hook(hook)
    source.register_load_state_dict_post_hook(hook)
    run(replica_of(source))


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


@pytest.mark.parametrize(
    "bind",
    [
        lambda own, word: functools.partial(own.keep, word, by=own.child),
        lambda own, word: functools.partial(Counting.keep, own, word, by=own.child),
        lambda own, word: functools.partial(functools.partial(own.keep, word), by=own.child),
        lambda own, word: functools.partial(
            functools.partial(Counting.keep, own), word, by=own.child
        ),
    ],
    ids=["method", "function", "nested method", "nested function"],
)
def test_what_is_bound_by_partial_belongs_to_the_replica(bind: Any) -> None:
    source, lock = Counting(), threading.Lock()
    source.child.register_forward_hook(bind(source, lock))
    replica = replica_of(source)
    run(replica)
    assert source.last == ()
    assert replica.module.last == (replica.module, lock, replica.module.child)


def test_a_method_of_something_else_stays_its_own() -> None:
    source, stranger = Counting(), Counting()
    source.register_forward_hook(stranger.count)
    source.register_forward_hook(functools.partial(stranger.keep, 3))
    replica = replica_of(source)
    run(replica)
    assert stranger.calls == 1
    assert stranger.last == (stranger, 3, None)


def test_a_dictionary_with_a_method_keeps_the_other_hooks_and_their_order() -> None:
    source, seen = Counting(), []
    source.register_forward_hook(lambda *_: seen.append("before"))
    source.register_forward_hook(source.count)
    source.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(kwargs), with_kwargs=True
    )
    source.register_forward_pre_hook(lambda module, *_: seen.append(module))
    replica = replica_of(source)
    run(replica)
    assert replica.module.calls == 1
    assert seen == [replica.module, "before", {}]


@KINDS
def test_a_method_that_is_registered_later_needs_a_new_replica(register: Any) -> None:
    source = Counting()
    replica = replica_of(source)
    register(source.child, source.count)
    assert not replica.matches_source()


def test_asking_twice_gives_the_same_answer() -> None:
    source = Counting()
    replica = replica_of(source)
    source.child.register_forward_hook(source.count)
    assert not replica.matches_source()
    assert not replica.matches_source()


def test_a_method_beside_one_that_is_there_needs_a_new_replica() -> None:
    source = Counting()
    source.register_forward_hook(source.count)
    replica = replica_of(source)
    assert replica.matches_source()
    source.child.register_forward_hook(source.count)
    assert not replica.matches_source()


def test_any_change_beside_a_method_needs_a_new_replica() -> None:
    """The replica has a dictionary of its own there."""
    source = Counting()
    handle = source.register_forward_hook(source.count)
    replica = replica_of(source)
    other = source.register_forward_hook(lambda *_: None)
    assert not replica.matches_source()
    other.remove()
    assert replica.matches_source()
    handle.remove()
    assert not replica.matches_source()


def test_hooks_of_another_model_do_not_matter() -> None:
    source, other = Counting(), Counting()
    replica = replica_of(source)
    other.register_forward_hook(other.count)
    assert replica.matches_source()


# --- hooks that hold the model in a closure -------------------------------------------------------


class Keeping(nn.Module):
    """Keeps what its child computes, as feature extractors do."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)
        features: dict[str, Tensor] = {}
        self.features = features

        def keep(_module: nn.Module, _args: object, output: Tensor) -> None:
            if whole:
                self.features["child"] = output
            else:
                features["child"] = output

        self.child.register_forward_hook(keep)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) + self.features["child"]


@pytest.mark.parametrize("whole", [False, True], ids=["the dict", "the module"])
def test_features_of_a_run_before_are_warned_of(whole: bool) -> None:
    """The replica would compute with them, in silence."""
    source = Keeping(whole=whole)
    with torch.no_grad():
        source(X)
    with pytest.warns(UserWarning, match=r"`Keeping.__init__.<locals>.keep` must .* `features`"):
        replica_of(source)


@pytest.mark.filterwarnings("error")
def test_what_holds_no_tensor_is_not_warned_of() -> None:
    source = Keeping(whole=True)
    source.features["note"] = "none yet"  # type: ignore[assignment]
    source.scale, source.rows = torch.tensor(2.0), torch.ones(2, 3)  # kept in no dict or list
    replica_of(source)


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
