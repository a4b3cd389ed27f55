"""A replica shares the source's memory on its device, and follows it from another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.plan import BufferRules
from phalanx.replicas import Replica

CPU = torch.device("cpu")


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


def test_modes_and_freezing_follow_the_source() -> None:
    source = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    replica = Replica(source, CPU, 0)
    source.eval()
    source[0].weight.requires_grad_(False)
    replica.refresh()
    assert not any(child.training for child in replica.module.modules())
    assert [p.requires_grad for p in replica.parameters] == [False, True]


# --- the copy -------------------------------------------------------------------------------------


def test_subclasses_and_notes_on_parameters_are_kept() -> None:
    class Marked(nn.Parameter):
        pass

    source = nn.Linear(3, 2)
    source.weight = Marked(source.weight.detach())
    source.weight.note = "decays"
    replica = Replica(source, CPU, 0)
    assert type(replica.parameters[0]) is Marked
    assert replica.parameters[0].note == "decays"
    assert replica.parameters[0].is_leaf


def test_what_the_source_has_accumulated_is_not_the_replicas() -> None:
    source = nn.Linear(3, 2)
    source(torch.ones(1, 3)).sum().backward()
    replica = Replica(source, CPU, 0)
    assert all(parameter.grad is None for parameter in replica.parameters)
    assert all(parameter.grad is not None for parameter in source.parameters())


def test_a_change_of_the_source_before_backward_is_noticed() -> None:
    """Replica and source share the version counter with the memory."""
    source = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    output = Replica(source, CPU, 0).module(torch.ones(1, 3))
    with torch.no_grad():
        source[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_frozen_parameter_is_frozen_from_the_start_and_may_thaw() -> None:
    source = nn.Linear(3, 2)
    source.weight.requires_grad_(False)
    replica = Replica(source, CPU, 0)
    assert [p.requires_grad for p in replica.parameters] == [False, True]
    source.weight.requires_grad_(True)
    replica.refresh()
    assert [p.requires_grad for p in replica.parameters] == [True, True]


def test_a_copy_made_in_inference_mode_can_be_trained() -> None:
    source = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with torch.inference_mode():
        replica = Replica(source, CPU, 0)
        replica.refresh()
    assert not any(tensor.is_inference() for tensor in replica.module.state_dict().values())
    replica.module(torch.randn(4, 3)).sum().backward()
    assert replica.take_gradients()[0] is not None


def test_a_source_made_in_inference_mode_can_be_run_in_it() -> None:
    """As plain torch runs it."""
    with torch.inference_mode():
        source = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        replica = Replica(source, CPU, 0)
        replica.refresh()
        x = torch.randn(4, 3)
        assert torch.equal(replica.module(x), source(x))


# --- gradients ------------------------------------------------------------------------------------


def test_gradients_are_handed_over_once_in_the_order_of_the_executor() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(2, 4, bias=False)
    everything = [second.weight, *first.parameters(), nn.Parameter(torch.ones(7))]
    replica = Replica(first, CPU, 1, all_parameters=everything)
    replica.module(torch.ones(5, 3)).sum().backward()
    gradients = replica.take_gradients()
    assert [None if g is None else g.tolist() for g in gradients] == [
        None,
        [5.0] * 6,
        [5.0, 5.0],
        None,
    ]
    assert replica.take_gradients() == [None] * 4


def test_a_gradient_lies_in_the_order_of_its_parameters_memory() -> None:
    source = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    twin = nn.Conv2d(3, 4, 2)
    twin.load_state_dict(source.state_dict())
    replica, x = Replica(source, CPU, 0), torch.randn(2, 3, 4, 4)
    replica.module(x).square().sum().backward()
    twin(x).square().sum().backward()
    gradient = replica.take_gradients()[0]
    assert gradient.dim() == 1
    in_place = gradient.as_strided(source.weight.shape, source.weight.stride())
    torch.testing.assert_close(in_place, twin.weight.grad)


def test_what_a_failed_pass_left_is_dropped() -> None:
    replica = Replica(nn.Linear(3, 2), CPU, 0)
    replica.module(torch.ones(5, 3)).sum().backward()
    replica.drop_gradients()
    assert replica.take_gradients() == [None, None]


def test_gradients_that_share_memory_are_taken_apart() -> None:
    """Autograd hands the gradient of a sum to both operands."""
    source = nn.Module()
    source.a, source.b = (nn.Parameter(torch.ones(3)) for _ in range(2))
    replica = Replica(source, CPU, 0)
    (replica.module.a + replica.module.b).sum().backward()
    first, second = replica.take_gradients()
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)


# --- another device -------------------------------------------------------------------------------


def test_buffers_that_were_written_elsewhere_are_copied_again_when_outdated() -> None:
    source = nn.BatchNorm1d(3)
    replica = Replica(source, CPU, 0)
    source.running_mean.data.fill_(4.0)  # raises no version, as writes of another process
    replica.outdate()
    replica.begin()
    assert replica.module.running_mean.tolist() == [4.0] * 3


def test_rules_and_names_of_buffers_are_passed_on() -> None:
    source = nn.BatchNorm1d(2)
    rules = BufferRules({"7.running_*": "sum", "*": "first"})
    replica = Replica(source, CPU, 0, prefix="7.", rules=rules)
    replica.refresh()
    replica.module(torch.randn(4, 2))
    found = {name: each.rule for name, each in replica.statistics.collect(1.0).items()}
    assert found == {
        "7.running_mean": "sum",
        "7.running_var": "sum",
        "7.num_batches_tracked": "first",
    }
