"""Buffers that replicas write are merged by weight, counters are not, and each once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import phalanx


class Twice(nn.Module):
    """Uses one batch norm at two places of its tree."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(3)
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.first(x))


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


def test_running_statistics_are_the_mean_weighted_by_rows() -> None:
    module, x = nn.BatchNorm1d(3), torch.randn(9, 3)
    slices = x.split([5, 4])
    with phalanx.DataParallel(module, ["cpu", "cpu"]) as model:
        model(x)
    means = torch.stack([0.1 * part.mean(dim=0) for part in slices])
    expected = (5 * means[0] + 4 * means[1]) / 9
    torch.testing.assert_close(module.running_mean, expected, rtol=1e-6, atol=1e-7)
    assert module.num_batches_tracked is not None
    assert module.num_batches_tracked.item() == 1


def test_a_reassigned_buffer_reaches_the_module() -> None:
    module, x = Reassigns(), torch.arange(12.0).view(6, 2)
    with phalanx.DataParallel(module, ["cpu", "cpu", "cpu"]) as model:
        model(x)
        model(x)
    torch.testing.assert_close(module.seen, 2 * x.mean(dim=0))


def test_what_the_user_writes_into_a_buffer_is_where_replicas_start() -> None:
    module = Reassigns()
    with phalanx.DataParallel(module, ["cpu", "cpu"]) as model:
        model(torch.zeros(4, 2))
        module.seen.fill_(7.0)
        model(torch.zeros(4, 2))
    assert module.seen.tolist() == [7.0, 7.0]
