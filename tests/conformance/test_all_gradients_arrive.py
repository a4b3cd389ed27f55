"""No gradient is dropped: what reaches the module itself, beside its replica, counts as well.

The judge is the same loop in plain torch. Tolerance: float32 rounding over some steps, as batches
are cut into microbatches; none between configurations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from tests.worlds import EXECUTORS
from tests.zoo import simple_sgd as sgd

pytestmark = pytest.mark.promise("whole-batch-gradients")

MICROBATCHES = 4


class Net(nn.Module):
    """Two layers, and a loss of its own with a learned variance."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(9, 9), nn.Linear(9, 4)
        self.log_variance = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()) * (-self.log_variance).exp()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return mse(outputs, targets) + self.log_variance + self.log_variance**2


class HoldsLambda(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = lambda x: self.a(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.first(x)) * (-self.log_variance).exp()


class ByGlobal(Net):
    def __init__(self) -> None:
        super().__init__()
        HERE["net"] = self

    def forward(self, x: Tensor) -> Tensor:
        return self.b(HERE["net"].a(x).tanh()) * (-self.log_variance).exp()


HERE: dict[str, Net] = {}


def wrapped() -> nn.Module:
    """Return a module whose forward stays bound to it, as one wrapped by a compiler does."""
    net: Any = Net()
    forward = net.forward
    net.forward = lambda x: forward(x)
    return net


def hooked() -> nn.Module:
    net = Net()
    net.a.register_forward_hook(lambda _, __, out: out * (1 + net.log_variance))
    return net


class Penalised:
    """A loss with an L2 penalty on the module's own parameters."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        penalty = torch.stack([p.pow(2).sum() for p in self.net.parameters()]).sum()
        return mse(outputs, targets) + 0.1 * penalty


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


def plain_loss(_: nn.Module) -> Callable[..., Tensor]:
    return mse


def own_loss(net: Any) -> Callable[..., Tensor]:
    loss: Callable[..., Tensor] = net.loss
    return loss


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    sizes = ((12, 9), (12, 4))
    return [tuple(torch.randn(s, generator=draw) for s in sizes) for _ in range(count)]  # type: ignore[misc]


def trained_plainly(
    net: nn.Module, loss: Callable[..., Tensor], steps: int = 3
) -> dict[str, Tensor]:
    start = copy.deepcopy(net.state_dict())
    optimizer = sgd(list(net.parameters()))
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    trained = copy.deepcopy(net.state_dict())
    net.load_state_dict(start)
    optimizer.zero_grad()
    return trained


def trained(make: Callable[[], nn.Module], of: Callable[..., Any], **options: Any) -> Any:
    torch.manual_seed(0)
    net = make()
    expected = trained_plainly(net, of(net))
    with phalanx.Trainer(net, of(net), sgd, **{"microbatches": None, **options}) as trainer:
        trainer.fit(batches())
    return expected, net.state_dict()


class Twice(Net):
    """Its first weight is met in the replica and in the module itself, once each."""

    def __init__(self) -> None:
        super().__init__()
        self.again = lambda x: self.a(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x) + self.again(x)).tanh()) * (-self.log_variance).exp()


@pytest.mark.parametrize(
    ("make", "of"),
    [
        (HoldsLambda, plain_loss),
        (ByGlobal, plain_loss),
        (wrapped, plain_loss),
        (hooked, plain_loss),
        (Net, Penalised),
        (Net, own_loss),
        (Twice, plain_loss),
        (Twice, Penalised),
        (Twice, own_loss),
    ],
)
def test_what_reaches_the_module_itself_is_trained(
    make: Callable[[], nn.Module], of: Callable[..., Any]
) -> None:
    found = []
    for executor, replicas in EXECUTORS:
        options = {"executor": executor, "replicas": replicas, "microbatches": MICROBATCHES}
        expected, state = trained(make, of, **options)
        torch.testing.assert_close(state, expected)
        found.append(state)
    for state in found[1:]:
        torch.testing.assert_close(state, found[0], rtol=0.0, atol=0.0)


def test_one_gradient_for_two_places_is_counted_once_for_each() -> None:
    """Autograd hands the gradient of a sum to both operands: here to replica and module."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))
            self.own = lambda: self.weight

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.weight + self.own())

    net = Added()
    with phalanx.Trainer(net, lambda out, _: out.sum(), sgd, replicas=1, microbatches=3) as trainer:
        trainer.fit([(torch.zeros(6, 4), torch.zeros(6, 4))])
    torch.testing.assert_close(net.weight.detach(), torch.full((4,), -0.4))


def test_a_container_merges_what_its_replicas_bring_to_the_module() -> None:
    torch.manual_seed(0)
    net = HoldsLambda()
    x, y = batches(1)[0]
    mse(net(x), y).backward()
    expected = [parameter.grad for parameter in net.parameters()]
    found = []
    for _ in range(2):
        net.zero_grad()
        with phalanx.DataParallel(net, devices=3) as model:
            mse(model(x), y).backward()
        found.append([parameter.grad for parameter in net.parameters()])
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[1], found[0], rtol=0.0, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make", "of"), [(HoldsLambda, plain_loss), (Net, Penalised), (Net, own_loss)]
)
def test_replicas_on_one_gpu_bring_what_reaches_the_module_itself(
    make: Callable[[], nn.Module], of: Callable[..., Any], gpu: torch.device
) -> None:
    """Torch's one thread for a GPU would not know for whose microbatch it works."""
    torch.manual_seed(0)
    net = make()
    expected = trained_plainly(net, of(net))
    net.to(gpu)
    with phalanx.Trainer(net, of(net), sgd, replicas=[gpu] * 2, microbatches=3) as trainer:
        trainer.fit(batches())
    torch.testing.assert_close(net.cpu().state_dict(), expected)
