"""Models and comparisons that the tests of containers have in common.

A pass of a wrapped model is held against the same pass of its twin in plain PyTorch, mostly in
float64, where another order of the same sums shows in the sixteenth digit and a fault in the first.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import phalanx
from tests.zoo import ACCELERATOR_FIRST, assert_close, gradients_of

CPU = torch.device("cpu")


def places(device: torch.device, count: int) -> list[torch.device]:
    """Return ``count`` devices of that kind: all that there are in turn, or one several times."""
    if device.type == "cpu":
        return [device] * count
    have = torch.get_device_module(device).device_count()
    return [torch.device(device.type, index % have) for index in range(count)]


def cpu_and_others(count: int) -> list[str]:
    """Return the CPU and, with `--device dev`, the test device's devices in turn behind it.

    With TEST_DEV_FIRST=1 one of these comes first, and the CPU second.
    """
    if not hasattr(torch, "dev"):
        return ["cpu"] * count
    have = torch.dev.device_count()
    others = [f"dev:{index % have}" for index in range(count)]
    found = [others[0], "cpu", *others[1:]] if ACCELERATOR_FIRST else ["cpu", *others]
    return found[:count]


def parallel(
    module: nn.Module, device: torch.device = CPU, replicas: int = 3, **options: Any
) -> phalanx.DataParallel:
    return phalanx.DataParallel(module, places(device, replicas), **options)


def stored(module: nn.Module) -> nn.Module:
    """Return the module as another program would read it from a file."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {"file": stored, "deepcopy": copy.deepcopy}


def draw(
    *shape: int, seed: int = 0, device: torch.device = CPU, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return normal numbers that depend on ``seed`` and the shape alone."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return, on the CPU, what several devices have of one tensor."""
    return torch.cat([part.cpu() for part in parts], dim)


def leaves_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def fresh(inputs: Any) -> Any:
    """Return the same values; floating ones ask for a gradient, as a layer in front would."""

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.is_floating_point())

    return pytree.tree_map(own, inputs)


def loss_of(outputs: Any) -> Tensor:
    """Return a sum over all outputs whose gradient differs from element to element."""
    return torch.stack([leaf.sin().sum().cpu() for leaf in leaves_of(outputs)]).sum()


def one_pass(module: nn.Module, *inputs: Any, **options: Any) -> dict[str, Any]:
    """Run ``module`` forward and back, and return all that comes of it."""
    for parameter in module.parameters():
        parameter.grad = None
    args, kwargs = fresh(inputs), fresh(options)
    outputs = module(*args, **kwargs)
    loss_of(outputs).backward()
    return {
        "outputs": leaves_of(outputs),
        "inputs": [leaf.grad for leaf in leaves_of((args, kwargs))],
        "parameters": gradients_of(module),
    }


def assert_equal_pass(
    model: nn.Module,
    twin: nn.Module,
    *inputs: Any,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> None:
    """Compare outputs, input gradients and parameter gradients of one pass."""
    got, expected = one_pass(model, *inputs, **options), one_pass(twin, *inputs, **options)
    assert got.keys() == expected.keys()
    for what, values in expected.items():
        assert [v is None for v in got[what]] == [v is None for v in values], what
        assert_close(got[what], values, dtype)


def spread(columns: Sequence[nn.Module], device: torch.device, to: Any) -> Any:
    """Add the columns to the container ``to``, over the devices that there are."""
    for column, place in zip(columns, places(device, len(columns)), strict=True):
        to.add(column, place)
    return to


def settings() -> tuple[object, ...]:
    """Return what torch keeps per thread."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


class Colours(nn.Module):
    """Takes a table of three images, returns a table of a map and a vector (cunn's own case)."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Conv2d(1, 3, 3, padding=1) for _ in range(3))
        self.mixed = nn.Conv2d(9, 4, 3)

    def forward(self, colours: Sequence[Tensor]) -> list[Tensor]:
        seen = [conv(colour).tanh() for conv, colour in zip(self.each, colours, strict=True)]
        joined = torch.cat(seen, dim=1)
        return [self.mixed(joined), joined.mean(dim=(2, 3))]


class Scale(nn.Module):
    """Multiplies a tensor of any shape; shows what it was given."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(start, dtype=torch.float64))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ZeroDivisionError("asked to")
        return x * self.scale


class MixedTypes(nn.Module):
    """Parameters, inputs and outputs of two dtypes, one leaf that is frozen and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Linear(7, 5, dtype=torch.float64)
        self.coarse = nn.Linear(5, 4)

    def forward(self, x: Tensor, shift: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine = self.fine(x).tanh()
        return fine, self.coarse(fine.float() + shift), rows * 2


class Total(nn.Module):
    """Takes a table of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2).double()

    def forward(self, table: list[Tensor]) -> Tensor:
        return self.linear(torch.stack(table).sum(0))


class Weighed(nn.Module):
    """Weights every row by one vector that belongs to no row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 4)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.linear(x * weights)


class Columns(phalanx.AbstractParallel):
    """A third party's container: all columns see the whole input, and a gate weighs the sum."""

    def __init__(self, num_features: int, num_columns: int) -> None:
        super().__init__()
        self.gate = nn.Linear(num_features, num_columns)
        self.weights: Tensor | None = None

    def distribute(self, inputs: Any) -> list[Any]:
        self.weights = self.gate(inputs).softmax(-1)
        return [inputs] * len(self)

    def merge(self, outputs: list[Tensor]) -> Tensor:
        weights, self.weights = self.weights, None
        return mixed(weights, outputs)


class PlainMixture(nn.Module):
    """The same in plain PyTorch."""

    def __init__(self, mixture: Columns) -> None:
        super().__init__()
        self.gate = copy.deepcopy(mixture.gate)
        self.columns = nn.ModuleList(
            copy.deepcopy(mixture.get(index)) for index in range(len(mixture))
        )

    def forward(self, x: Tensor) -> Tensor:
        return mixed(self.gate(x).softmax(-1), [column(x) for column in self.columns])


def mixed(weights: Tensor | None, outputs: Sequence[Tensor]) -> Tensor:
    home = outputs[0].device
    assert weights is not None
    total = torch.zeros_like(outputs[0])
    for weight, output in zip(weights.unbind(-1), outputs, strict=True):
        total = total + weight.to(home).unsqueeze(-1) * output.to(home)
    return total


class Slices(phalanx.AbstractParallel):
    """Columns that each see their piece of one dim (fbcunn's data parallelism without its sums)."""

    def distribute(self, inputs: Tensor) -> list[Tensor]:
        return list(inputs.chunk(len(self), self.dim))
