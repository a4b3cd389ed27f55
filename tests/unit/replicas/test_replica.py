"""A replica shares the source's memory on its device, and follows it from another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.replicas import Replica

CPU = torch.device("cpu")


def elsewhere(source: nn.Module) -> Replica:
    """Return a replica as it is on another device: with parameters of its own."""
    replica = Replica(source, CPU, 0)
    for module in replica.module.modules():
        for key, parameter in module._parameters.items():
            module._parameters[key] = nn.Parameter(parameter.detach().clone())
    replica.parameters = list(replica.module.parameters())
    replica._shared = [False] * len(replica.parameters)
    return replica


def test_parameters_are_the_sources_memory_and_buffers_are_not() -> None:
    source = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    replica = Replica(source, CPU, 0)
    for own, theirs in zip(replica.parameters, source.parameters(), strict=True):
        assert own is not theirs
        assert own.data_ptr() == theirs.data_ptr()
    buffers = zip(replica.module.buffers(), source.buffers(), strict=True)
    assert all(own.data_ptr() != theirs.data_ptr() for own, theirs in buffers)


def test_ties_stay_inside_the_replica() -> None:
    source = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    source[1].weight = source[0].weight
    replica = Replica(source, CPU, 0)
    assert isinstance(replica.module, nn.Sequential)
    assert replica.module[0].weight is replica.module[1].weight
    assert len(replica.parameters) == 3


def test_a_remote_replica_copies_what_has_changed_and_only_that() -> None:
    source = nn.Linear(3, 2)
    replica = elsewhere(source)
    replica.refresh()
    with torch.no_grad():
        source.weight.fill_(5.0)
        replica.parameters[1].fill_(9.0)  # not the source's doing: it must stay until outdated
    replica.refresh()
    assert replica.parameters[0].tolist() == [[5.0] * 3] * 2
    assert replica.parameters[1].tolist() == [9.0, 9.0]
    replica.outdate()
    replica.refresh()
    assert torch.equal(replica.parameters[1], source.bias)


def test_modes_and_freezing_follow_the_source() -> None:
    source = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    replica = Replica(source, CPU, 0)
    source.eval()
    source[0].weight.requires_grad_(False)
    replica.refresh()
    assert not any(child.training for child in replica.module.modules())
    assert [p.requires_grad for p in replica.parameters] == [False, True]


def test_a_module_that_cannot_be_copied_says_so() -> None:
    class Stubborn(nn.Module):
        def __deepcopy__(self, memo: object) -> Stubborn:
            raise RuntimeError("not me")

    with pytest.raises(RuntimeError, match="not me") as caught:
        Replica(Stubborn(), CPU, 0)
    assert "`Stubborn` must be copyable by `copy.deepcopy`" in caught.value.__notes__[0]
