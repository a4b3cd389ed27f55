"""Buffers that replicas write are merged by weight, counters are not, and each once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.errors import UnsupportedError

pytestmark = pytest.mark.promise("buffers-are-merged")


class Twice(nn.Module):
    """Uses one batch norm at two places of its tree, and one whose statistics were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(3)
        self.again = self.first
        self.bare = nn.BatchNorm1d(3)
        self.bare.running_mean = self.bare.running_var = None

    def forward(self, x: Tensor) -> Tensor:
        return self.bare(self.again(self.first(x)))


class Reassigns(nn.Module):
    """Makes its buffer anew in every forward pass, instead of writing to it."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("nothing", None)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.mean(dim=0)
        return x * self.weight


def test_a_module_at_two_places_is_counted_once() -> None:
    module = Twice()
    with phalanx.DataParallel(module, ["cpu", "cpu"]) as model:
        model(torch.randn(8, 3))
    assert module.first.num_batches_tracked.item() == 2
    assert module.first.running_mean is not None
    assert module.first.running_mean.abs().max() > 0


def test_what_the_user_writes_into_a_buffer_is_where_replicas_start() -> None:
    module = Reassigns()
    with phalanx.DataParallel(module, ["cpu", "cpu"]) as model:
        model(torch.zeros(4, 2))
        module.seen.fill_(7.0)
        model(torch.zeros(4, 2))
    assert module.seen.tolist() == [7.0, 7.0]


# --- buffers of every kind ------------------------------------------------------------------------


class Several(nn.Module):
    """Has buffers of every kind, and writes to them what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("count", torch.tensor(4))
        self.register_buffer("third", torch.zeros(1))
        self.register_buffer("phase", torch.tensor(1 + 1j))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + x.mean(0)
        self.count += len(x)
        self.third = torch.full((1,), 1 / 3)
        self.phase = self.phase + 2j
        return x


X = torch.arange(14.0).view(7, 2)
MICROBATCHES = pytest.mark.parametrize("microbatches", [None, 5])


@MICROBATCHES
def test_by_default_floats_are_averaged_and_integers_the_first_ones(
    microbatches: int | None,
) -> None:
    module = Several()
    with phalanx.DataParallel(module, 3, microbatches=microbatches) as model:
        model(X)
    torch.testing.assert_close(module.mean, 1 + X.mean(0))  # weighted by rows: of all rows
    assert module.third.item() == torch.tensor(1 / 3).item()  # to the bit: summed in float64
    assert module.phase.item() == 1 + 3j
    assert module.count.item() == 4 + (3 if microbatches is None else 2)


def test_a_shared_buffer_is_brought_by_whoever_trains() -> None:
    """Batch norm's kernel tells nobody that it writes, so only a training owner can be asked."""
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    for key in net[0]._buffers:
        net[1]._buffers[key] = net[0]._buffers[key]
    net[0].eval()
    with phalanx.DataParallel(net, 2) as model:
        for done in (1, 2):
            model(X)
            assert net[0].num_batches_tracked.item() == done
    assert net[0].running_mean.abs().max() > 0


def test_a_buffer_that_has_grown_is_refused_and_nothing_is_written() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("fine", torch.zeros(()))
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.fine = self.fine + 1
            self.seen = torch.zeros(len(x) + 5)
            return x

    for rule in ("mean", "first"):
        module = Grows()
        with (
            phalanx.DataParallel(module, 3, buffers=rule) as model,
            pytest.raises(UnsupportedError, match=r"Buffer `seen` must keep its shape \(2,\)"),
        ):
            model(torch.ones(9, 2))
        assert module.fine.item() == 0
        assert module.seen.shape == (2,)


def test_a_buffer_whose_elements_share_memory_is_refused() -> None:
    module = Reassigns()
    module.seen = torch.zeros(1).expand(2)
    with phalanx.DataParallel(module, 2) as model, pytest.raises(UnsupportedError, match="`seen`"):
        model(X)


@pytest.mark.parametrize("rule", ["mean", "first"])
def test_in_evaluation_a_batch_norm_keeps_its_statistics(rule: str) -> None:
    module = nn.BatchNorm1d(2).eval()
    with phalanx.DataParallel(module, 3, buffers=rule) as model:
        model(torch.randn(7, 2))
    assert module.running_mean.tolist() == [0.0, 0.0]
    assert module.num_batches_tracked.item() == 0
