"""Torch7's flat parameters: exact sizes, and views that stay views, come what may."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.compat import torch7
from tests.contracts.containers import cpu_and_others, draw, stored
from tests.zoo import assert_close, cnn, gradients_of, image_batch, mlp

pytestmark = pytest.mark.devices

F64 = torch.float64
THREE = cpu_and_others(3)
LR = 0.25


def two_layers(flatten=True):
    """The authors' case: 10·5 + 5 elements, in the second of two layers."""
    net = nn.Sequential(nn.Linear(10, 10).to(THREE[0]), torch7.DataParallelTable(0, flatten))
    net[1].add(nn.Linear(10, 5), THREE)
    return net


def test_flat_tensors_have_exactly_the_parameters_elements():
    net = two_layers()
    values, grads = net[1].getParameters()
    assert values.shape == grads.shape == (55,)
    outer, outer_grads = torch7.Explicit(net).getParameters()
    assert outer.shape == outer_grads.shape == (165,)
    inner, inner_grads = net[1].getParameters()
    assert inner.shape == inner_grads.shape == (55,)


def test_a_part_of_a_flat_model_is_a_view_of_it():
    net = two_layers()
    explicit = torch7.Explicit(net)
    outer, outer_grads = explicit.getParameters()
    x, g = torch.ones(4, 10, device=THREE[0]), torch.ones(4, 5)
    explicit.forward(x)
    explicit.backward(x, g)
    inner, inner_grads = net[1].getParameters()
    assert inner.data_ptr() == outer[110:].data_ptr()
    assert torch.equal(inner_grads, outer_grads[110:])
    outer.zero_()
    assert not explicit.forward(x).any()
    inner.fill_(1)
    assert explicit.forward(x).eq(1).all()
    net[1].close()


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("way", [lambda net: net, lambda net: net.clone(), stored])
def test_flat_tensors_stay_the_parameters(flatten, way):
    first = torch7.DataParallelTable(0, flatten).add(cnn(F64), THREE)
    first.getParameters()
    x, y = image_batch(7, F64)[0], draw(7, 4)
    net = way(first)
    values, grads = net.getParameters()
    twin = cnn(F64)
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    for _ in range(3):
        optimizer.zero_grad()
        twin(x).backward(y)
        optimizer.step()
        net.zeroGradParameters()
        net.forward(x)
        net.backward(x, y)
        values.sub_(grads, alpha=LR)  # what Torch7's optim does
        net.clearState()
    assert_close(list(net.parameters()), list(twin.parameters()), F64)
    assert values.data_ptr() == net.getParameters()[0].data_ptr()
    values.zero_()
    assert not net.forward(x).any()
    assert not any(parameter.any() for parameter in net.parameters())
    net.close()
    if net is not first:
        assert first.getParameters()[0].any()


@pytest.mark.parametrize("zero", ["zeroGradParameters", "zero_grad"])
def test_zeroing_keeps_gradients_flat(zero):
    for net in (torch7.Explicit(mlp(F64)), torch7.DataParallelTable(0).add(mlp(F64), THREE)):
        _, grads = net.getParameters()
        net(draw(5, 7)).sum().backward()
        assert grads.any()
        getattr(net, zero)()
        assert not grads.any()
        net(draw(5, 7)).sum().backward()
        assert torch.equal(grads, torch.cat([g.flatten() for g in gradients_of(net)]))
        torch.optim.SGD(net.parameters(), lr=LR).zero_grad()
        assert not net.getParameters()[1].any()
        assert net.getParameters()[1].data_ptr() == grads.data_ptr()


def three_layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))


def apart(net):
    """Parameters of one memory that do not lie side by side."""
    _, grads = torch7.Explicit(net).getParameters()
    grads.copy_(torch.arange(1.0, 19.0))
    return nn.Sequential(net[0], net[2])


def elsewhere(net):
    """Parameters of two memories, the second where it would lie in the first."""
    for memory in (torch.zeros(99), torch.zeros(99)):
        for parameter, start in zip(net[0].parameters(), (0, 4), strict=True):
            place = memory[start : start + parameter.numel()].view_as(parameter)
            parameter.data = place.copy_(parameter.data)
            parameter.grad = torch.ones(99)[start : start + parameter.numel()].view_as(parameter)
            memory = torch.zeros(99)
    return net[0]


def without_some_gradients(net):
    torch7.Explicit(net).getParameters()
    net = stored(net)
    net[0].weight.grad = torch.ones(2, 2)
    return net


def converted(net):
    torch7.Explicit(net).getParameters()
    return net.double()


def in_another_order(_):
    net = nn.Conv2d(2, 3, 2, bias=False)
    net.weight.data = net.weight.data.contiguous(memory_format=torch.channels_last)
    net.weight.grad = torch.arange(24.0).reshape(3, 2, 2, 2)
    return net


@pytest.mark.parametrize(
    "make", [apart, elsewhere, without_some_gradients, converted, in_another_order]
)
def test_flat_tensors_are_right_wherever_parameters_lay(make):
    net = torch7.Explicit(make(three_layers()))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    grads_before = [None if g is None else g.clone() for g in gradients_of(net)]
    values, grads = net.getParameters()
    assert values.numel() == grads.numel() == sum(value.numel() for value in before)
    for own, old in zip(gradients_of(net), grads_before, strict=True):
        assert torch.equal(own, torch.zeros_like(own) if old is None else old)
    values.sub_(grads)
    for own, old, gradient in zip(net.parameters(), before, gradients_of(net), strict=True):
        assert torch.equal(own, old - gradient)


@pytest.mark.parametrize("change", ["share", "double"])
def test_flat_tensors_follow_parameters_that_were_exchanged(change):
    net, other = torch7.Explicit(mlp(F64)), mlp(F64, seed=1)
    net.getParameters()
    net.float() if change == "double" else net.share(other)
    values, _ = net.getParameters()
    expected = [parameter.detach().flatten() for parameter in net.parameters()]
    assert torch.equal(values, torch.cat(expected))
    values.zero_()
    assert not any(parameter.any() for parameter in net.parameters())


def test_a_module_without_parameters_has_empty_flat_tensors():
    values, grads = torch7.Explicit(nn.Tanh()).getParameters()
    assert values.numel() == grads.numel() == 0
    with torch7.DataParallelTable(0, True).add(nn.Tanh(), THREE) as net:
        assert net.forward(torch.zeros(5, 2)).eq(0).all()


def test_parameters_are_flat_again_after_a_change_of_type():
    with torch7.DataParallelTable(0, True).add(mlp(F64), THREE) as net:
        net.float()
        net.forward(draw(5, 7).float())
        assert len({p.untyped_storage().data_ptr() for p in net.parameters()}) == 1
