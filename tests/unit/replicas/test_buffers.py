"""Buffers that replicas write are merged by weight, counters are not, and each once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.errors import UnsupportedError
from phalanx.plan import BufferRules
from phalanx.replicas import (
    Replica,
    Statistic,
    merge_statistics,
    write_statistics,
)
from phalanx.replicas.buffers import statistic_specs

pytestmark = pytest.mark.promise("buffers-are-merged")

CPU = torch.device("cpu")


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


# --- statistics by themselves ---------------------------------------------------------------------


def t(*values: float) -> Tensor:
    return torch.tensor(values)


def test_means_are_summed_in_float64() -> None:
    buffer = torch.zeros(1)
    third = torch.full((1,), 1 / 3)
    merged: dict[str, Statistic] = {}
    for _ in range(1000):
        merge_statistics(merged, {"seen": Statistic(third.double() * 7, 7.0, "mean")})
    write_statistics({"seen": buffer}, merged)
    assert torch.equal(buffer, third)  # to the bit


# --- what one replica brings ----------------------------------------------------------------------


class Several(nn.Module):
    """Has a buffer of every kind, and writes to them what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", t(1.0, 1.0))
        self.register_buffer("count", torch.tensor(4))
        self.register_buffer("idle", t(3.0))
        self.inner = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + x.mean(0)
        self.count += len(x)
        return x


class Rare(nn.Module):
    """Has buffers that are neither floats nor counters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("phase", torch.tensor(1 + 1j))

    def forward(self, x: Tensor) -> Tensor:
        self.flag |= bool((x > 5).any())
        self.phase = self.phase + 2
        return x


def replica_of(source: nn.Module, rules: Any = "mean", prefix: str = "") -> Any:
    replica = Replica(source, CPU, 0, prefix=prefix, rules=BufferRules(rules))
    replica.statistics.start()
    return replica


def brought(replica: Any, x: Tensor, weight: float) -> dict[str, Statistic]:
    replica.module(x)
    found: dict[str, Statistic] = replica.statistics.collect(weight)
    replica.statistics.start()
    return found


@pytest.mark.parametrize("rule", ["mean", "sum", "first"])
def test_every_rule_takes_flags(rule: str) -> None:
    """A flag has no difference to add; its sum is that one of the replicas has set it."""
    source = Rare()
    found = brought(replica_of(source, rule), torch.full((3, 2), 9.0), 3.0)
    write_statistics(dict(source.named_buffers()), {"flag": found["flag"]})
    assert source.flag.item() is True


def test_complex_numbers_are_averaged_too() -> None:
    """They are no counters."""
    assert brought(replica_of(Rare()), torch.ones(3, 2), 3.0)["phase"].rule == "mean"


@pytest.mark.parametrize("rule", ["mean", "sum", "first"])
def test_the_next_microbatch_begins_where_the_first_began(rule: str) -> None:
    source = Several()
    replica = replica_of(source, rule)
    first = brought(replica, torch.full((3, 2), 2.0), 3.0)
    kept = first["mean"].value.clone()
    second = brought(replica, torch.full((3, 2), 2.0), 3.0)
    assert torch.equal(first["mean"].value, kept)
    assert torch.equal(second["mean"].value, kept)
    assert source.count.item() == 4
    assert source.mean.tolist() == [1.0, 1.0]


def test_buffers_are_replaced_and_never_overwritten() -> None:
    """A graph that is still to run backward may hold them."""
    source = nn.BatchNorm1d(2)
    replica = replica_of(source)
    held = replica.module.running_mean
    value = held.clone()
    brought(replica, torch.randn(3, 2), 3.0)
    after_forward = held.clone()
    with torch.no_grad():
        source.running_mean.fill_(9.0)
    replica.statistics.start()
    assert torch.equal(held, after_forward)
    assert not torch.equal(held, value)
    assert replica.module.running_mean.tolist() == [9.0, 9.0]


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

    for rule in ("mean", "sum", "first"):
        module = Grows()
        with (
            phalanx.DataParallel(module, 3, buffers=rule) as model,
            pytest.raises(UnsupportedError, match=r"Buffer `seen` must keep its shape \(2,\)"),
        ):
            model(torch.ones(9, 2))
        assert module.fine.item() == 0
        assert module.seen.shape == (2,)


# --- rules over replicas --------------------------------------------------------------------------


def test_rules_over_unequal_replicas() -> None:
    module, x = Several(), torch.arange(14.0).view(7, 2)
    rules = {"mean": "mean", "count": "sum", "*": "first"}
    with phalanx.DataParallel(module, 3, buffers=rules) as model:
        model(x)
    torch.testing.assert_close(module.mean, 1 + x.mean(0))  # weighted by rows: of all rows
    assert module.count.item() == 4 + 7


def test_a_sum_of_floats_adds_what_each_replica_has_added() -> None:
    module, x = Several(), torch.arange(14.0).view(7, 2)
    with phalanx.DataParallel(module, 3, buffers={"mean": "sum"}) as model:
        model(x)
        model(x)
    each = torch.stack([part.mean(0) for part in x.split([3, 2, 2])]).sum(0)
    torch.testing.assert_close(module.mean, 1 + 2 * each)


def test_the_first_replica_counts_under_first() -> None:
    module, x = Several(), torch.arange(14.0).view(7, 2)
    with phalanx.DataParallel(module, 3, buffers="first") as model:
        model(x)
    torch.testing.assert_close(module.mean, 1 + x[:3].mean(0))
    assert module.count.item() == 4 + 3


@pytest.mark.parametrize("rule", ["mean", "first", "sum"])
def test_in_evaluation_a_batch_norm_keeps_its_statistics(rule: str) -> None:
    module = nn.BatchNorm1d(2).eval()
    with phalanx.DataParallel(module, 3, buffers=rule) as model:
        model(torch.randn(7, 2))
    assert module.running_mean.tolist() == [0.0, 0.0]
    assert module.num_batches_tracked.item() == 0


def test_a_rule_by_pattern_goes_by_the_modules_own_names() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2)))
    x = torch.arange(14.0).view(7, 2)
    with phalanx.DataParallel(net, 3, buffers={"1.0.*": "sum"}) as model:
        model(x)
    assert net[0].num_batches_tracked.item() == 1
    assert net[1][0].num_batches_tracked.item() == 3


def test_a_shared_buffer_is_brought_by_whoever_trains() -> None:
    """Batch norm's kernel tells nobody that it writes, so only a training owner can be asked."""
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    for key in ("running_mean", "running_var"):
        net[1]._buffers[key] = net[0]._buffers[key]
    net[0].eval()
    replica = Replica(net, CPU, 0)
    replica.statistics.start()
    replica.module[1](torch.randn(7, 2))
    found = replica.statistics.collect(7.0)
    assert {"0.running_mean", "0.running_var"} <= found.keys()  # by its first name, as ever


@pytest.mark.parametrize("buffers", ["mean", "first", {"*flags": "sum", "*count": "sum"}])
def test_specs_foretell_what_microbatches_leave(buffers: Any) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("flags", torch.zeros(2, dtype=torch.bool))
            self.register_buffer("count", torch.tensor(5))
            self.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
            self.register_buffer("nothing", None)

        def forward(self, x: Tensor) -> Tensor:
            self.flags |= True
            self.count += 1
            self.wave += 1j
            return self.norm(x)

    net, rules = Writes(), BufferRules(buffers)
    replica = Replica(net, CPU, 0, rules=rules)
    replica.statistics.start()
    replica.module(torch.randn(7, 3))
    written = replica.statistics.collect(7.0)
    specs = {spec.name: spec for spec in statistic_specs(net, rules)}
    assert list(specs) == list(written)
    assert all(specs[name].fits(statistic) for name, statistic in written.items())


def test_a_buffer_under_two_names_starts_anew_though_only_its_second_owner_trains() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    first, second = module
    for key in first._buffers:
        second._buffers[key] = first._buffers[key]
    first.eval()
    replica = Replica(module, CPU, 0)
    rows, left = torch.randn(5, 3), []
    for _ in range(3):
        replica.statistics.start()
        replica.module(rows)
        left.append(replica.statistics.collect(5.0))
    assert {*left[0]} == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    for each in left[1:]:
        assert each.keys() == left[0].keys()
        assert all(torch.equal(each[name].value, left[0][name].value) for name in each)
