"""Models and comparisons that the tests of executor groups have in common.

A group is held against plain PyTorch on the whole batch, mostly in float64, where another order of
the same sums shows in the sixteenth digit and a fault in the first.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.compat.mxnet import DataDesc, DataParallelExecutorGroup
from tests.contracts.containers import cpu_and_others
from tests.zoo import assert_close, gradients_of

F64 = torch.float64
TWO = cpu_and_others(2)
THREE = cpu_and_others(3)
WORKLOADS = [1, 5, 9]
CLASSES = 4


class Net(nn.Module):
    """One named input, one output: logits."""

    def __init__(self, features: int = 5, outputs: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(features, 7)
        self.head = nn.Linear(7, outputs)
        self.double()

    def forward(self, data: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(data)))


class Loss(Net):
    """The same with its criterion inside, as MXNet's symbols had it."""

    def forward(self, data: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(data), label)


class Sum(nn.Module):
    """MXNet's own case: a + 2b + 3c, without parameters."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a + 2 * b + 3 * c


def desc(name: str, *shape: int, layout: str | None = None, dtype: torch.dtype = F64) -> DataDesc:
    return DataDesc(name, shape, dtype, layout)


def labels_desc(rows: int, name: str = "label") -> DataDesc:
    return DataDesc(name, (rows,), torch.int64)


def group_of(
    module: nn.Module,
    *data: DataDesc,
    devices: Sequence[Any] | int | None = None,
    **options: Any,
) -> DataParallelExecutorGroup:
    """Return a group of three replicas with unequal workloads, unless told otherwise."""
    if devices is None:
        devices = THREE
        options.setdefault("workload", WORKLOADS)
    return DataParallelExecutorGroup(module, devices, data_shapes=data, **options)


def classes(rows: int, seed: int = 0, count: int = CLASSES) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rows)
    return torch.randint(count, (rows,), generator=generator)


def forget_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def check_against_plain(
    group: DataParallelExecutorGroup,
    module: nn.Module,
    inputs: dict[str, Tensor],
    out_grad: Tensor | None = None,
) -> None:
    """Run the group and a copy of ``module`` in plain PyTorch on the whole batch, and compare.

    Outputs, the parameters' gradients (which the group writes) and, where the group computes them,
    the inputs' gradients.
    """
    twin = copy.deepcopy(module)
    forget_gradients(twin)
    wants = group_wants_input_grads(group)
    leaves = {
        name: value.detach().clone().requires_grad_(wants and value.is_floating_point())
        for name, value in inputs.items()
    }
    expected = twin(**leaves)
    expected.backward(out_grad)
    group.forward(inputs)
    assert_close(group.get_outputs()[0], expected.detach(), F64)
    group.backward(None if out_grad is None else [out_grad])
    assert_close(gradients_of(module), gradients_of(twin), F64)
    if wants:
        floating = [leaf.grad for leaf in leaves.values() if leaf.requires_grad]
        assert_close(list(group.get_input_grads()), floating, F64)


def group_wants_input_grads(group: DataParallelExecutorGroup) -> bool:
    return bool(getattr(group, "inputs_need_grad", False))
