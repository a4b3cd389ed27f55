"""A replica shares the source's memory on its device, and follows it from another."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.replicas import Replica

CPU = torch.device("cpu")


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
