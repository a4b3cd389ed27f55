"""The test device copies and draws as the CPU does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

# It changes with `native/` alone.
pytestmark = pytest.mark.night

FIRST, LAST = "dev:0", "dev:1"


@pytest.fixture(autouse=True)
def doubles() -> None:
    torch.set_default_dtype(torch.float64)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("ways", [("cpu", "dev:0"), ("dev:1", "cpu"), ("dev:0", "dev:1")])
@pytest.mark.parametrize("source", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2]])
def test_copies_convert_and_are_counted(ways: tuple[str, str], source: Any) -> None:
    x = drawn(3, 4)
    first, last = source(x.to(ways[0])), source(x.flip(0).clone().to(ways[1]).float())
    number, num_bytes = torch.dev.copies(*ways)
    last.copy_(first)
    assert torch.equal(last.cpu(), source(x).float())
    assert torch.dev.copies(*ways) == (number + 1, num_bytes + last.nbytes)


def test_a_backward_runs_on_the_device_and_stream_of_its_forward() -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append((torch.dev.current_device(), torch.dev.current_stream()))
            return grad * 2

    x = torch.ones(3, device=LAST, requires_grad=True)
    stream = torch.Stream(LAST)
    stream.wait_stream(torch.dev.current_stream(1))
    with stream:
        loss = Look.apply(x).sum()
    torch.dev.current_stream(1).wait_stream(stream)
    loss.backward()
    assert seen == [(1, stream)]
    assert x.grad.tolist() == [2, 2, 2]


def test_each_device_has_a_generator() -> None:
    torch.manual_seed(5)
    first, last = (torch.randn(3, device=device) for device in (FIRST, LAST))
    assert torch.equal(first.cpu(), last.cpu())
    state = torch.dev.get_rng_state(1)
    own = torch.Generator(device="dev:1").manual_seed(9)
    drawn_by_own = torch.rand(3, generator=own, device=LAST)
    assert torch.equal(
        drawn_by_own.cpu(), torch.rand(3, generator=own.manual_seed(9), device=LAST).cpu()
    )
    assert torch.equal(torch.dev.get_rng_state(1), state)
    next_one = torch.rand(2, device=LAST)
    torch.dev.set_rng_state(state, 1)
    assert torch.equal(torch.rand(2, device=LAST), next_one)
    before = torch.get_rng_state()
    F.dropout(torch.ones(50, device=LAST))
    torch.randperm(5, device=LAST)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(torch.dev.get_rng_state(1), state)
    with torch.random.fork_rng(devices=[1], device_type="dev"):
        torch.rand(1, device=LAST)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, generator=torch.Generator(), device=LAST)
