"""Replicas share everything that a module holds, and compute the same bits in every executor."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx import UnsupportedError
from tests.worlds import EXECUTORS, in_every_executor
from tests.zoo import assert_close, assert_same_bits, plain_steps, sgd

F = nn.functional


def batches(steps: int = 3, rows: int = 10) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 6, generator=draw), torch.randn(rows, 3, generator=draw))
        for _ in range(steps)
    ]


def trained(net: nn.Module, executor: str, replicas: int, **options: Any) -> dict[str, Tensor]:
    given = {"loss": F.mse_loss, "microbatches": 4, "batches": batches(), **options}
    data = given.pop("batches")
    with phalanx.Trainer(
        net, given.pop("loss"), sgd, executor=executor, replicas=replicas, **given
    ) as trainer:
        for batch in data:
            trainer.step(batch)
    return net.state_dict()


# --- awkward modules ------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = kind(6, 5, 2, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.flatten_parameters()
        return self.head(self.layer(x.unsqueeze(1))[0][:, 0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        return self.head(self.layer(x, x, x)[0].squeeze(1))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(6, 3), torch.randn(3)])
        self.named = nn.ParameterDict({"scale": torch.ones(3)})

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weights[0] + self.weights[1]) * self.named["scale"]


class Holding(nn.Module):
    """Holds parts of itself, its methods, a lock, and what can be neither copied nor pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.layers, self.table = [self.layer], {"norm": self.norm}
        self.pair = (self.layer.weight, "weight")
        self.method = self.apply_layer
        self.closure = lambda x: self.layer(x) * 0.5
        self.lock, self.generator = threading.Lock(), (i for i in range(3))
        self.norm.register_forward_hook(self.halve)

    def halve(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 0.5 + self.layer.bias

    def apply_layer(self, x: Tensor) -> Tensor:
        return self.layers[0](x)

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            penalty = self.pair[0].square().mean()
        return self.table["norm"](self.method(x) + self.closure(x)) + penalty


class Symmetric(nn.Module):
    """A parametrization of one's own, with a buffer that it writes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.triu() + x.triu(1).T


def symmetric() -> nn.Module:
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Linear(6, 3))


def of_torch(wrap: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(6, 6), *arguments), nn.Dropout(0.3), nn.Linear(6, 3))


def shared_twice() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.BatchNorm1d(6), layer, nn.Linear(6, 3))


class Checkpointed(nn.Module):
    """Recomputes, as `gradient_checkpointing_enable()` of Hugging Face's models lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(7, 5), nn.Linear(5, 3)
        self.function: Any = functools.partial(checkpoint, use_reentrant=True)
        self.first.register_forward_hook(lambda _, __, output: output.requires_grad_())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(self.second, self.first(x.abs().long() % 7).mean(1))
        return out


class Looping(nn.Module):
    """Uses a layer several times under an autocast of its own.

    Torch's cache of cast weights is one for all threads, and cleared by whoever leaves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(5):
                x = torch.tanh(self.layer(x))
            return self.head(x).float()


class Changing(nn.Module):
    """Takes its layers in an order that the rows decide about, and leaves some out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        turn = int(x[0, 0].abs() * 1000) % 4
        for place in [*range(turn, 4), *range(turn)][: 4 - turn // 2]:
            x = torch.tanh(self.layers[place](x))
        return self.head(x)


class Strided(nn.Module):
    """Weights that do not lie in the order of their dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.weight = nn.Parameter(torch.randn(3, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x.reshape(-1, 6, 1, 1))).flatten(1) @ self.weight


class _Viewed(torch.autograd.Function):
    """The gradient is a view of something larger."""

    @staticmethod
    def forward(ctx: object, weight: Tensor) -> Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return torch.stack([gradient, gradient])[1] * 2


class Viewing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, _Viewed.apply(self.weight), self.bias)


class InPlace(nn.Linear):
    """Changes its input, which stays the user's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sub_(1.0).mul_(0.5))


def wrapped() -> nn.Module:
    """Return a module whose forward stays bound to it, as one wrapped by a compiler does."""
    net: Any = nn.Linear(6, 3)
    forward = net.forward
    net.forward = lambda x: forward(x)
    return nn.Sequential(net)


class Flattening(nn.LSTM):
    """On the CPU, moves its weights when it is moved and when it is asked to, as CUDA's does."""

    def flatten_parameters(self) -> None:
        with torch.no_grad():
            for weight in self._flat_weights:
                weight.set_(weight.clone())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "checkpointed": Checkpointed,
    "parametrized": symmetric,
    "weight_norm": functools.partial(of_torch, parametrizations.weight_norm),
    "spectral_norm": functools.partial(of_torch, parametrizations.spectral_norm),
    "orthogonal": functools.partial(of_torch, parametrizations.orthogonal),
    "old weight_norm": functools.partial(of_torch, nn.utils.weight_norm),
    "old spectral_norm": functools.partial(of_torch, nn.utils.spectral_norm),
    "pruned": functools.partial(of_torch, prune.l1_unstructured, "weight", 0.3),
    "rnn": functools.partial(Recurrent, nn.RNN),
    "lstm": functools.partial(Recurrent, nn.LSTM),
    "lstm that moves its weights": functools.partial(Recurrent, Flattening),
    "attention": Attention,
    "autocast inside": Looping,
    "parameter lists": Listed,
    "holding": Holding,
    "shared twice": shared_twice,
    "layers by rows": Changing,
    "strided": Strided,
    "gradients in views": functools.partial(Viewing, 6, 3),
    "in place": functools.partial(InPlace, 6, 3),
    "forward bound to it": wrapped,
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


@pytest.mark.promise("replicas-change-no-bit")
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_awkward_modules_train_to_the_same_bits_in_every_executor(
    make: Callable[[], nn.Module],
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first, *others = [trained(made(make), *executor) for executor in EXECUTORS]
    for executor, state in zip(EXECUTORS[1:], others, strict=True):
        assert_same_bits(state, first, str(executor))
    # Their attributes are computed again, so nothing is said of them.
    assert not [each for each in told if "forward() assigns" in str(each.message)]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    "name",
    [
        *("old weight_norm", "lstm that moves its weights", "attention", "parameter lists"),
        *("strided", "in place", "forward bound to it"),
    ],
)
def test_awkward_modules_train_as_in_plain_pytorch(name: str) -> None:
    net, plain = made(MODELS[name]), made(MODELS[name])
    for module in (net, plain):
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
    plain_steps(plain, F.mse_loss, sgd, batches())
    trained(net, "threads", 2)
    assert_close(list(net.parameters()), list(plain.parameters()), torch.float32, times=10)


class Penalised:
    """A loss with an L2 penalty on the module's own parameters, which changes its targets."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        penalty = torch.stack([each.square().sum() for each in self.net.parameters()]).sum()
        return F.mse_loss(outputs, targets.mul_(0.5)) + 0.1 * penalty


class WithLoss(nn.Linear):
    """Its loss is a method and has a learned variance."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.log_variance = nn.Parameter(torch.zeros(()))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        error = F.mse_loss(outputs, targets)
        return error * (-self.log_variance).exp() + self.log_variance


@pytest.mark.promise("whole-batch-gradients", "state-is-shared")
@pytest.mark.parametrize("loss_of", [Penalised, lambda net: net.loss], ids=["penalty", "method"])
def test_what_reaches_the_module_through_its_loss_is_trained(loss_of: Any) -> None:
    plain = made(WithLoss)
    plain_steps(plain, loss_of(plain), sgd, copy.deepcopy(batches()))
    states = []
    for executor in EXECUTORS:
        net, given = made(WithLoss), batches()
        states.append(trained(net, *executor, loss=loss_of(net), batches=given))
        assert_same_bits(given, batches())
    assert_close(states[0], plain.state_dict(), torch.float32, times=10)
    for executor, state in zip(EXECUTORS[1:], states[1:], strict=True):
        assert_same_bits(state, states[0], str(executor))


# --- what was changed between two passes ----------------------------------------------------------


class Settings(nn.Module):
    """Has attributes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(3, 3), None
        self.factor: Any = 2.0
        self.steps: list[float] = [1.0]
        self.config = {"bias": 1.0}
        self.noise = NoNoise()
        self.register_buffer("seen", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.factor * sum(self.steps) + self.config["bias"]
        x = x + self.noise.level
        return x if self.extra is None else self.extra(x)


class NoNoise:
    level = 0.0


class Negated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def twice(self: Settings, x: Tensor) -> Tensor:
    return self.linear(x) * 2 * self.factor


def replace_class(net: Settings) -> None:
    net.linear.__class__ = Negated


CHANGES: dict[str, Callable[[Settings], object]] = {
    "number": lambda net: setattr(net, "factor", 3),
    "tensor": lambda net: setattr(net, "factor", torch.tensor([1.0, 2.0, 3.0])),
    "list assigned": lambda net: setattr(net, "steps", [1.0, 2.0]),
    "list changed": lambda net: net.steps.append(4.0),
    "dict changed": lambda net: net.config.update(bias=2.0),
    "object changed": lambda net: setattr(net.noise, "level", 5.0),
    "child added": lambda net: setattr(net, "extra", nn.Tanh()),
    "child replaced": lambda net: setattr(net, "linear", nn.Linear(3, 3)),
    "class": replace_class,
    "method": lambda net: setattr(net, "forward", MethodType(twice, net)),
    "hook": lambda net: net.linear.register_forward_hook(lambda _, __, output: output * 2),
    "buffer gone": lambda net: setattr(net, "seen", None),
    "weight written": lambda net: nn.init.ones_(net.linear.weight),
    "weight moved": lambda net: setattr(net.linear.weight, "data", torch.ones(3, 3)),
    "weight replaced": lambda net: setattr(net.linear, "weight", nn.Parameter(torch.ones(3, 3))),
    "bias gone": lambda net: setattr(net.linear, "bias", None),
}


@pytest.mark.promise("attributes-are-followed", "state-is-shared")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_counts_in_the_next_pass(change: Callable[[Settings], object]) -> None:
    net, x = Settings(), torch.randn(7, 3)
    with phalanx.DataParallel(net, 3) as model:
        before = model(x).square().sum()
        change(net)
        for _ in range(2):
            torch.testing.assert_close(model(x), net(x))
        net.zero_grad()
        model(x).sum().backward()
        found = {name: p.grad for name, p in net.named_parameters()}
        net.zero_grad()
        net(x).sum().backward()
        assert before.isfinite()
        torch.testing.assert_close(found, {name: p.grad for name, p in net.named_parameters()})


def test_a_first_prediction_is_made_in_eval_mode() -> None:
    net, x = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)), torch.randn(10, 6)
    with phalanx.Trainer(net, F.mse_loss, sgd, replicas=2) as trainer:
        found = trainer.predict([x])
    torch.testing.assert_close(found, net.eval()(x).detach())


# --- attributes that `forward` assigns ------------------------------------------------------------


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.h = nn.Linear(6, 3), None
        self.register_buffer("late", None)

    @functools.cached_property
    def scale(self) -> float:
        return 0.5

    def forward(self, x: Tensor) -> Tensor:
        self.h = self.layer(x) * self.scale
        return self.h


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Stateful()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.promise("assignments-in-forward-are-named")
@in_every_executor
def test_the_first_step_warns_once_of_attributes_that_forward_assigns(
    executor: str, replicas: int
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trained(Wrapping(), executor, replicas)
    texts = [str(each.message) for each in told if "forward() assigns" in str(each.message)]
    (text,) = texts
    assert text.startswith("forward() assigns `self.inner.h`; replicas do not keep it.")


# --- hooks ----------------------------------------------------------------------------------------


def test_hooks_on_parameters_run_once_on_the_whole_gradient() -> None:
    net, seen = nn.Linear(3, 2), []
    net.bias.register_hook(lambda gradient: seen.append(gradient.tolist()))
    with phalanx.DataParallel(net, 3) as model:
        model(torch.randn(5, 3)).sum().backward()
    assert seen == [[5.0, 5.0]]


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("penalised", [False, True])
def test_hooks_on_parameters_without_a_gradient_do_not_run(register: str, penalised: bool) -> None:
    net, seen, x = Spare(), [], torch.randn(5, 3)
    for name, parameter in net.named_parameters():
        getattr(parameter, register)(lambda _, name=name: seen.append(name))

    def run(model: nn.Module) -> list[str]:
        seen.clear()
        loss = model(x).sum()
        if penalised:
            loss = loss + net.spare.weight.square().sum()
        loss.backward()
        return sorted(seen)

    expected = run(net)
    with phalanx.DataParallel(net, 3) as model:
        assert run(model) == expected


class Reaching(nn.Module):
    """Holds a container whose module reads a parameter of this module by a kept reference."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        scaled = nn.Linear(4, 4)
        scaled.register_forward_hook(lambda _, __, output: output * self.weight)
        self.inner = phalanx.DataParallel(scaled, devices=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def test_an_inner_container_that_reaches_the_outer_module_is_refused() -> None:
    """Its threads know no replica of the outer one: the gradient would be lost."""
    x = torch.ones(6, 4)
    with (
        phalanx.Trainer(Reaching(), nn.functional.mse_loss, sgd, replicas=2) as trainer,
        pytest.raises(UnsupportedError, match="A container inside of another must not reach"),
    ):
        trainer.step((x, x))
