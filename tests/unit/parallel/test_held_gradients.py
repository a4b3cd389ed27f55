"""What `no_sync` holds is merged by a pass for the parameters, and by no other."""

from __future__ import annotations

import torch
from torch import nn

from phalanx import DataParallel


def test_a_pass_for_the_input_alone_neither_merges_nor_forgets() -> None:
    net = nn.Linear(3, 2)
    first, second = torch.randn(5, 3), torch.randn(7, 3)
    asked = torch.randn(4, 3, requires_grad=True)
    with DataParallel(net, 3) as model:
        with model.no_sync():
            model(first).sum().backward()
        assert net.weight.grad is None
        (gradient,) = torch.autograd.grad(model(asked).sum(), [asked])
        assert torch.allclose(gradient, net.weight.detach().sum(0).expand(4, 3))
        model(second).sum().backward()
    expected = (first.sum(0) + second.sum(0)).expand(2, 3)
    assert torch.allclose(net.weight.grad, expected, atol=1e-5)


def test_a_pass_for_the_input_alone_holds_nothing() -> None:
    net = nn.Linear(3, 2)
    batch, asked = torch.randn(5, 3), torch.randn(4, 3, requires_grad=True)
    with DataParallel(net, 3) as model:
        with model.no_sync():
            torch.autograd.grad(model(asked).sum(), [asked])
        model(batch).sum().backward()
    assert torch.allclose(net.weight.grad, batch.sum(0).expand(2, 3), atol=1e-5)


def test_flat_convolutions_stay_where_they_are() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    with DataParallel(net, 2) as model:
        values, gradients = model.flat_parameters()
        model(torch.randn(5, 3, 4, 4)).sum().backward()
        assert gradients.abs().sum() > 0
        values.zero_()
        assert not model(torch.randn(5, 3, 4, 4)).any()
    assert not net[0].weight.any()
