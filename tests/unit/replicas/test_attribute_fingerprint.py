"""Every assignment to what a step reads shows in its fingerprint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.replicas import AttributeFingerprint


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(1))


def replace_bias(net: Net) -> None:
    net.layer.bias = nn.Parameter(torch.zeros(3))


def drop_bias(net: Net) -> None:
    net.layer.bias = None  # type: ignore[assignment]


def move_weight(net: Net) -> None:
    net.layer.weight.data = net.layer.weight.data.clone()


def freeze(net: Net) -> None:
    net.layer.requires_grad_(False)


def replace_child(net: Net) -> None:
    net.drop = nn.Dropout(0.5)


def replace_buffer(net: Net) -> None:
    net.seen = torch.ones(1)


def add_attribute(net: Net) -> None:
    net.note = 1  # type: ignore[assignment]


def replace_class(net: Net) -> None:
    net.drop.__class__ = nn.AlphaDropout  # type: ignore[assignment]


def replace_method(net: Net) -> None:
    net.layer.forward = lambda x: x  # type: ignore[assignment]


def assign_number(net: Net) -> None:
    net.drop.p = 0.25


CHANGES: list[Callable[[Net], None]] = [
    replace_bias,
    drop_bias,
    move_weight,
    freeze,
    replace_child,
    replace_buffer,
    add_attribute,
    replace_class,
    replace_method,
]


@pytest.mark.parametrize("change", CHANGES)
def test_an_assignment_shows(change: Callable[[Net], None]) -> None:
    net = Net()
    fingerprint = AttributeFingerprint(net)
    assert fingerprint.is_current()
    assert fingerprint.plain_changes() == []
    change(net)
    assert not fingerprint.is_current()
    assert fingerprint.plain_changes() is None


def test_numbers_can_be_sent_to_a_fork() -> None:
    net, fork = Net(), Net()
    before, there = AttributeFingerprint(net), AttributeFingerprint(fork)
    assign_number(net)
    net.eval()
    changes = before.plain_changes()
    assert changes
    there.apply(changes)
    assert (fork.drop.p, fork.training, fork.layer.training) == (0.25, False, False)


class Annealed:
    """A loss of the user's own."""

    def __init__(self) -> None:
        self.beta, self.teacher = 1.0, Net()

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).mean() * self.beta


def test_a_loss_is_followed_with_what_it_holds() -> None:
    loss = Annealed()
    fingerprint = AttributeFingerprint(Net(), functools.partial(loss, targets=torch.ones(3)))
    assert loss.teacher in fingerprint.modules
    loss.beta = 0.5
    assert fingerprint.plain_changes() == [(fingerprint.objects.index(loss), "beta", 0.5)]
    loss.teacher.layer.weight.requires_grad_(False)
    assert fingerprint.plain_changes() is None


def test_a_function_is_followed_with_what_it_closes_over() -> None:
    teacher, factor = Net(), 1.0

    def forward(module: nn.Module, batch: Any) -> Any:
        return module(batch) - factor * teacher.layer(batch)

    fingerprint = AttributeFingerprint(forward)
    assert teacher in fingerprint.modules
    assert fingerprint.is_current()
    factor = 0.5
    assert fingerprint.plain_changes() is None
