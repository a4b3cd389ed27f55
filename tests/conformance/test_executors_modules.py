"""Modules that torch itself cannot pickle train in worker processes as they do in threads."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import phalanx

pytestmark = pytest.mark.promise("attributes-are-followed")

F = nn.functional


class Symmetric(nn.Module):
    """A parametrization of one's own, with a buffer that it writes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.triu() + x.triu(1).T


def own() -> nn.Module:
    layer = nn.Linear(5, 5)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    parametrizations.weight_norm(layer, "bias", None)
    return nn.Sequential(layer, nn.ReLU(), parametrizations.spectral_norm(nn.Linear(5, 3)))


def made_by(wrap: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(5, 5), *arguments), nn.ReLU(), nn.Linear(5, 3))


def checkpointed() -> nn.Module:
    """What `gradient_checkpointing_enable()` of Hugging Face's models does."""
    module = Checkpointed()
    module.function = functools.partial(checkpoint, use_reentrant=True)
    module.enable_input_grads()
    return module


class Checkpointed(nn.Module):
    function: Any

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(7, 5), nn.Linear(5, 3)
        self.handles: list[Any] = []

    def enable_input_grads(self) -> None:
        def make_inputs_require_grads(module: nn.Module, args: Any, output: Tensor) -> None:
            output.requires_grad_(True)

        self.handles.append(self.first.register_forward_hook(make_inputs_require_grads))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(self.second, self.first(x.abs().long() % 7).mean(1))
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": functools.partial(made_by, parametrizations.spectral_norm),
    "weight_norm": functools.partial(made_by, parametrizations.weight_norm),
    "orthogonal": functools.partial(made_by, parametrizations.orthogonal),
    "several": own,
    "checkpointed": checkpointed,
}


def trained(build: Callable[[], nn.Module], executor: str, replicas: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = build()
    with phalanx.Trainer(
        module,
        F.mse_loss,
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        executor=executor,
        replicas=replicas,
        microbatches=2,
    ) as trainer:
        for _ in range(3):
            trainer.step((torch.randn(8, 5), torch.randn(8, 3)))
        return {name: value.clone() for name, value in module.state_dict().items()}


BY_NIGHT = {"spectral_norm", "weight_norm"}  # which "several" has, too


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.night] * (each in BY_NIGHT)) for each in MODELS],
)
def test_they_train_alike_in_threads_and_processes(name: str) -> None:
    threads, processes = trained(MODELS[name], "threads", 2), trained(MODELS[name], "processes", 1)
    assert threads.keys() == processes.keys()
    for key, value in threads.items():
        assert torch.equal(value, processes[key]), key


def halved(self: nn.Linear, x: Tensor) -> Tensor:
    return nn.Linear.forward(self, x) * 0.5


def forward(self: nn.Linear, x: Tensor) -> Tensor:
    return nn.Linear.forward(self, x) * 0.25


class Doubled(nn.Linear):
    """Takes the place of a layer's class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def put(name: str, value: Any, net: nn.Sequential) -> None:
    made = types.MethodType(value, net[0]) if name == "forward" else value
    setattr(net[0], name, made)


@pytest.mark.parametrize(
    "change",
    [
        functools.partial(put, "forward", halved),
        functools.partial(put, "forward", forward),  # the name of a method of the class
        functools.partial(put, "__class__", Doubled),
    ],
    ids=["method", "method_of_that_name", "class"],
)
def test_a_layers_method_or_class_may_be_replaced_between_steps(
    change: Callable[[nn.Sequential], None],
) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(8, 5), torch.randn(8, 3)) for _ in range(3)]

    def weights(**options: Any) -> Tensor:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
        if not options:  # plain PyTorch
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for step, (x, y) in enumerate(batches):
                if step == 2:
                    change(net)
                optimizer.zero_grad()
                F.mse_loss(net(x), y).backward()
                optimizer.step()
            return net[0].weight.detach()  # type: ignore[return-value]
        with phalanx.Trainer(
            net, F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), microbatches=1, **options
        ) as trainer:
            for step, batch in enumerate(batches):
                if step == 2:
                    change(net)
                trainer.step(batch)
        return net[0].weight.detach()  # type: ignore[return-value]

    plain = weights()
    for executor in ("inline", "threads", "processes"):
        assert torch.equal(plain, weights(executor=executor, replicas=1)), executor


def test_a_bound_lambda_trains_as_in_threads() -> None:
    def weights(executor: str) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 3))
        scale = 2.0
        forward = types.MethodType(lambda self, x: F.linear(x, self.weight * scale), net[0])
        net[0].forward = forward  # type: ignore[method-assign]
        with phalanx.Trainer(
            net,
            F.mse_loss,
            lambda p: torch.optim.SGD(p, lr=0.1),
            executor=executor,
            microbatches=None,
            replicas=1,
        ) as trainer:
            trainer.step((torch.randn(8, 5), torch.randn(8, 3)))
        return net[0].weight.detach()

    assert torch.equal(weights("threads"), weights("processes"))
