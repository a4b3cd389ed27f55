"""Copies of parameters on another device follow every change, and only changes make them move."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.replicas import ParameterCopies, Replica, parameter_copies

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    """Let the CPU be another device than the one that parameters lie on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_copies, "lies_on", lambda parameter, device: False)
        yield


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the bytes of each copy between devices."""
    sent: list[int] = []
    copy_to = Tensor.copy_

    def counted(self: Tensor, source: Tensor, **options: bool) -> Tensor:
        if "non_blocking" in options:
            sent.append(source.nbytes)
        return copy_to(self, source, **options)

    monkeypatch.setattr(Tensor, "copy_", counted)
    return sent


class Net(nn.Module):
    """Two dtypes, odd sizes, a weight that is used twice, and one that lies by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 3)
        self.again = self.first
        self.scale = nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.last.weight = nn.Parameter(torch.randn(5, 3).t())


def opened(source: nn.Module) -> ParameterCopies:
    copies = ParameterCopies(list(source.parameters()))
    copies.values_on(CPU)
    return copies


def same(source: nn.Module, copies: ParameterCopies) -> bool:
    pairs = zip(source.parameters(), copies.values_on(CPU), strict=True)
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)


def test_replicas_on_one_device_share_their_parameters_and_not_the_sources() -> None:
    source = Net()
    copies = opened(source)
    left, right = (Replica(source, CPU, index, copies=copies) for index in range(2))
    for own, other, theirs in zip(
        left.parameters, right.parameters, source.parameters(), strict=True
    ):
        assert own.data_ptr() == other.data_ptr() != theirs.data_ptr()
        assert own.data_ptr() % 64 == 0
    copies.refresh()
    assert same(source, copies)


def write(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.fill_(5.0)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "in place": lambda net: write(net.last.bias),
    "through data": lambda net: net.last.bias.data.fill_(5.0),
    "another tensor": lambda net: setattr(net.scale, "data", torch.zeros(7, dtype=torch.float64)),
    "one bit": lambda net: net.first.weight.data.view(torch.int32)[0, 0].bitwise_xor_(1),
    "the sign of zero": lambda net: net.scale.data.fill_(-0.0),
    "a fused step": lambda net: fused_step(net),
}


def fused_step(net: Net) -> None:
    net.scale.grad = torch.ones_like(net.scale)
    torch.optim.SGD([net.scale], lr=0.1, fused=True).step()


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_arrives_and_nothing_else_moves(change: str, sent: list[int]) -> None:
    source = Net()
    with torch.no_grad():
        source.scale.zero_()
    copies = opened(source)
    copies.refresh()
    assert sorted(sent) == [64, 64 + 64 + 64 + 64]  # one buffer for each dtype, padded
    for _ in range(2):
        sent.clear()
        copies.refresh()
        assert sent == []
        CHANGES[change](source)
        copies.refresh()
        assert len(sent) <= 1
        pairs = zip(source.parameters(), copies.values_on(CPU), strict=True)
        assert all(torch.equal(bits(a), bits(b)) for a, b in pairs)
    assert len(sent) == (change in ("in place", "a fused step", "one bit"))


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def test_versions_rise_where_the_sources_did() -> None:
    source = nn.Linear(3, 2)
    copies = opened(source)
    copies.refresh()
    found = copies.values_on(CPU)
    before = [value._version for value in found]
    write(source.weight)
    source.bias.data.fill_(7.0)  # raises no version
    copies.refresh()
    assert same(source, copies)
    assert [a._version > b for a, b in zip(found, before, strict=True)] == [True, False]


def test_a_graph_notices_that_its_parameters_have_changed() -> None:
    source = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    copies = opened(source)
    replica = Replica(source, CPU, 0, copies=copies)
    copies.refresh()
    untouched = replica.module(torch.ones(1, 3))
    copies.refresh()
    untouched.sum().backward()
    output = replica.module(torch.ones(1, 3))
    write(source[1].weight)
    copies.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_copies_are_made_in_inference_mode_too() -> None:
    source = Net()
    with torch.inference_mode():
        copies = opened(source)
        replica = Replica(source, CPU, 0, copies=copies)
        copies.refresh()
    assert same(source, copies)
    copy.deepcopy(replica.module).first(torch.ones(1, 3)).sum().backward()
