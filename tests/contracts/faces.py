"""Every way to run a module on several replicas or in columns, each beside its twin in plain torch.

A law that holds for all of them is one test in `test_containers.py`, marked `in_all`, or by one of
the other marks at the end: `in_modules`, `in_containers` and so on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.compat.mxnet import DataDesc, DataParallelExecutorGroup
from tests.contracts.containers import places
from tests.zoo import twin_of

K = 3
Build = Callable[..., nn.Module]


class SideBySide(nn.Module):
    """The twin of columns: they see the whole input, and their outputs are joined."""

    def __init__(self, columns: list[nn.Module], join: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.columns, self.join = nn.ModuleList(columns), join

    def forward(self, *inputs: Any) -> Tensor:
        return self.join([column(*inputs) for column in self.columns])


class Sum(phalanx.AbstractParallel):
    """A third party's container: every column sees the whole input, outputs are added."""

    def distribute(self, inputs: Any) -> list[Any]:
        return [inputs] * len(self)

    def merge(self, outputs: list[Tensor]) -> Tensor:
        return added(outputs)


def added(outputs: list[Tensor]) -> Tensor:
    return torch.stack([output.to(outputs[0].device) for output in outputs]).sum(0)


def side_by_side(outputs: list[Tensor]) -> Tensor:
    return torch.cat(outputs, -1)


class Grouped(nn.Module):
    """MXNet's executor group in the form of a module, bound by the first pass."""

    def __init__(self, module: nn.Module, devices: list[torch.device]) -> None:
        super().__init__()
        self.module, self.devices = module, devices
        self.group: DataParallelExecutorGroup | None = None

    def bind(self, inputs: tuple[Tensor, ...]) -> DataParallelExecutorGroup:
        if self.group is None:
            names = inspect.signature(self.module.forward).parameters
            described = [
                DataDesc(name, x.shape, x.dtype) for name, x in zip(names, inputs, strict=True)
            ]
            self.group = DataParallelExecutorGroup(
                self.module,
                self.devices,
                data_shapes=described,
                inputs_need_grad=any(each.is_floating_point() for each in inputs),
                grad_req="add",
            )
        return self.group

    def forward(self, *inputs: Tensor) -> Tensor:
        # The group writes the parameters' gradients by itself; the leaf lets autograd call it.
        leaf = torch.zeros((), requires_grad=torch.is_grad_enabled())
        return GroupPass.apply(self, leaf, *inputs)

    def close(self) -> None:
        if self.group is not None:
            self.group.close()


class GroupPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: Grouped, leaf: Tensor, *inputs: Tensor) -> Tensor:
        ctx.homes = [each.device if each.is_floating_point() else None for each in inputs]
        ctx.group = owner.bind(inputs)
        ctx.group.forward(list(inputs), is_train=owner.training)
        return ctx.group.get_outputs()[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.group.backward([gradient])
        found = iter(ctx.group.get_input_grads() if any(ctx.homes) else ())
        return None, None, *(next(found).to(home) if home else None for home in ctx.homes)


@dataclass(frozen=True)
class Face:
    """A way to run modules.

    Attributes:
        make: Returns the model, of ``num_modules`` modules and their devices.
        num_modules: How many modules it is made of: one, or one for each column.
        join: How the twin joins the outputs of columns.
    """

    name: str
    make: Callable[[list[nn.Module], list[torch.device]], nn.Module]
    num_modules: int = 1
    join: Callable[[list[Tensor]], Tensor] = side_by_side

    @contextmanager
    def open(self, build: Build, device: torch.device) -> Iterator[tuple[Any, nn.Module]]:
        """Give the model and its twin, made of the modules that ``build(seed=…)`` returns."""
        nets = [build(seed=seed) for seed in range(self.num_modules)]
        twins = [twin_of(net).to(device) for net in nets]
        model = self.make([net.to(device) for net in nets], places(device, K))
        try:
            yield model, twins[0] if len(twins) == 1 else SideBySide(twins, self.join)
        finally:
            for module in model.modules():
                if hasattr(type(module), "close"):
                    module.close()

    def part(self, model: Any) -> Any:
        """Return the (first) module that the model, or its twin, was made of."""
        if isinstance(model, SideBySide):
            return model.columns[0]
        if self.num_modules > 1:
            return model.get(0)
        return model.module if hasattr(model, "module") else model


def columns(kind: Callable[..., Any]) -> Callable[..., Any]:
    def make(nets: list[nn.Module], devices: list[torch.device]) -> Any:
        model = kind(-1)
        for net in nets:
            model.add(net, devices[0])  # where its twin is; test_columns.py spreads them
        return model

    return make


def replicas(**options: Any) -> Callable[..., Any]:
    return lambda nets, devices: phalanx.DataParallel(nets[0], devices, **options)


REPLICATED = [
    Face("DataParallel", replicas()),
    Face("workloads", replicas(workloads=[2, 5, 9])),
    Face("microbatches", replicas(microbatches=4)),
]
IN_COLUMNS = [
    Face("ModelParallel", columns(phalanx.ModelParallel), K),
    Face("AbstractParallel", columns(Sum), K, added),
]
PLACED = [
    Face("OnDevice", lambda nets, devices: phalanx.OnDevice(nets[0], devices[0])),
]
GROUP = Face("executor group", lambda nets, devices: Grouped(nets[0], devices))


ON_DEVICE_BY_DAY = (REPLICATED[0], REPLICATED[2], IN_COLUMNS[1])  # groups: test_mxnet.py


def each_of(*faces: Face) -> pytest.MarkDecorator:
    by_night = [hasattr(torch, "dev") and face not in ON_DEVICE_BY_DAY for face in faces]
    cases = [
        pytest.param(face, id=face.name, marks=pytest.mark.night if night else ())
        for face, night in zip(faces, by_night, strict=True)
    ]
    return pytest.mark.parametrize("face", cases)


in_all = each_of(*REPLICATED, *IN_COLUMNS, *PLACED, GROUP)
in_modules = each_of(*REPLICATED, *IN_COLUMNS, *PLACED)
in_containers = each_of(*REPLICATED, *IN_COLUMNS)
in_wrappers = each_of(*REPLICATED, *PLACED)
in_ours = each_of(REPLICATED[0], IN_COLUMNS[1])
