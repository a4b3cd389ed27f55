"""What happens to a container between a forward pass and its backward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from phalanx import DataParallel


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


def test_a_weight_that_is_changed_before_backward_is_noticed_as_in_plain_torch() -> None:
    for wrap in (lambda net: net, lambda net: DataParallel(net, 3)):
        net = two_layers()
        model = wrap(net)
        output = model(torch.randn(7, 4))
        with torch.no_grad():
            net[1].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
        if isinstance(model, DataParallel):
            model.close()


def test_a_weight_that_backward_does_not_need_may_change() -> None:
    net = two_layers()
    with DataParallel(net, 3) as model:
        output = model(torch.randn(7, 4))
        with torch.no_grad():
            net[0].weight.mul_(2)  # the input needs no gradient
            net[1].bias.zero_()
        output.sum().backward()
    assert net[0].weight.grad is not None


@pytest.mark.parametrize("end", ["close", "threads", "replaced"])
def test_a_backward_pass_outlives_the_threads_of_its_forward_pass(end: str) -> None:
    net = two_layers()
    twin = copy.deepcopy(net)
    x = torch.randn(7, 4)
    model = DataParallel(net, 3)
    output = model(x)
    if end == "threads":
        model.threads(lambda: None)
    elif end == "replaced":
        net[0] = nn.Linear(4, 5)
        model(x)
    else:
        model.close()
    output.square().sum().backward()
    twin(x).square().sum().backward()
    assert torch.allclose(net[1].weight.grad, twin[1].weight.grad, atol=1e-5)
    model.close()
