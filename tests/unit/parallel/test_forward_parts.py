"""`DataParallel.forward_parts`: inputs that somebody has cut already."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from phalanx import DataParallel


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out = x @ self.weight
        return (out if mask is None else out * mask), out.sum()


def test_outputs_stay_apart_and_gradients_are_summed() -> None:
    net = Two()
    twin = copy.deepcopy(net)
    parts = [torch.randn(1, 4), torch.randn(5, 4), torch.randn(3, 4)]
    own = [part.clone().requires_grad_() for part in parts]
    with DataParallel(net, 3) as model:
        outputs = model.forward_parts([own[0], (own[1],), {"x": own[2], "mask": torch.ones(3)}])
        assert [out[0].shape[0] for out in outputs] == [1, 5, 3]
        sum(out[1] for out in outputs).backward()
    whole = torch.cat(parts).requires_grad_()
    twin(whole)[1].backward()
    assert torch.allclose(net.weight.grad, twin.weight.grad, atol=1e-6)
    assert torch.allclose(torch.cat([part.grad for part in own]), whole.grad)


def test_a_replica_without_a_part_takes_no_part() -> None:
    seen: list[int] = []
    net = nn.Identity()
    net.register_forward_hook(lambda *_: seen.append(1))
    with DataParallel(net, 3) as model:
        outputs = model.forward_parts([None, torch.ones(2), None])
    assert outputs[0] is None
    assert outputs[2] is None
    assert outputs[1].tolist() == [1.0, 1.0]
    assert seen == [1]


def test_parts_may_differ_in_everything() -> None:
    with DataParallel(nn.Identity(), 2) as model:
        outputs = model.forward_parts([torch.ones(2, 3), {"input": torch.zeros(0, 7)}])
    assert [tuple(out.shape) for out in outputs] == [(2, 3), (0, 7)]
