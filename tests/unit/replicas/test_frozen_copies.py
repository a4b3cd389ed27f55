"""A loss with tensors of its own, where replicas need it."""

from __future__ import annotations

import pickle
import threading

import torch
from torch import Tensor, nn

from phalanx.replicas import FrozenCopies

CPU, META = torch.device("cpu"), torch.device("meta")


class Perceptual(nn.Module):
    """Compares features of a network that is not trained; it has one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(3, 3).requires_grad_(False)
        self.features = nn.Sequential(layer, nn.BatchNorm1d(3).requires_grad_(False), layer)
        self.calls: list[int] = []

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.features(output) - self.features(target)).square().mean()


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def test_where_the_tensors_lie_it_is_the_module_itself() -> None:
    for loss in (Perceptual(), nn.MSELoss()):
        assert FrozenCopies(loss).on(CPU) is loss
    assert FrozenCopies(loss).on(META) is loss  # it has none


def test_elsewhere_all_tensors_are_copies_and_the_rest_is_the_same() -> None:
    loss = Perceptual()
    state = {name: each.clone() for name, each in loss.state_dict().items()}
    other = FrozenCopies(loss).on(META)
    assert {each.device for each in tensors_of(other)} == {META}
    assert list(other.state_dict()) == list(loss.state_dict())
    assert other.features[0] is other.features[2]
    assert other.calls is loss.calls
    assert not any(each.requires_grad for each in tensors_of(other))
    assert all(torch.equal(state[name], each) for name, each in loss.state_dict().items())


def test_only_what_has_changed_is_copied_again() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    loss.register_buffer("other", torch.ones(3))
    copies = FrozenCopies(loss)
    first, same = copies.on(META), copies.on(META)
    assert first.weight is same.weight
    loss.weight.mul_(2)
    loss.label_smoothing = 0.5
    changed = copies.on(META)
    assert changed.weight is not first.weight
    assert changed.other is first.other
    assert changed.label_smoothing == 0.5
    loss.weight = torch.ones(3, dtype=torch.float64)
    assert copies.on(META).weight.dtype == torch.float64


def test_threads_have_copies_of_their_own() -> None:
    copies = FrozenCopies(nn.CrossEntropyLoss(weight=torch.ones(3)))
    found = [copies.on(META).weight]
    thread = threading.Thread(target=lambda: found.append(copies.on(META).weight))
    thread.start()
    thread.join(60)
    assert found[0] is not found[1]


def test_a_module_that_is_trained_stays_where_it_is() -> None:
    loss = Perceptual()
    loss.features[1].weight.requires_grad_()
    assert FrozenCopies(loss).on(META) is loss


def test_it_is_sent_without_its_copies() -> None:
    copies = FrozenCopies(nn.CrossEntropyLoss(weight=torch.ones(3)))
    copies.on(META)
    there = pickle.loads(pickle.dumps(copies))
    assert there.on(CPU).weight.tolist() == [1, 1, 1]
