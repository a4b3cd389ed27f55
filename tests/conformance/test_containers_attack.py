"""What an attack on the containers found: right as in plain PyTorch, or refused by a sentence."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import DataParallel, Layout, ModelParallel
from tests.conformance.containers import assert_equal_pass, draw, parallel
from tests.zoo import (
    assert_close,
    assert_same_bits,
)

F32, F64 = torch.float32, torch.float64
X = draw(7, 4)
EACH_SPARSE = ["to_sparse_coo", "to_sparse_csr", "to_sparse_csc"]
WHOLE = Layout(dims={"graph": None})


def linear(inputs: int = 4, outputs: int = 3, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=F64)


def jagged() -> Tensor:
    return torch.nested.nested_tensor([draw(2, 4), draw(3, 4)], layout=torch.jagged)


# --- sparse and nested tensors --------------------------------------------------------------------


def graph_of(kind: str) -> Tensor:
    return getattr(torch.arange(25, dtype=F64).view(5, 5) % 3, kind)()


class Passes(nn.Module):
    def forward(self, inputs: Tensor, graph: Tensor) -> dict[str, Tensor]:
        return {"rows": inputs, "graph": graph}


@pytest.mark.parametrize("make", [*EACH_SPARSE, "jagged"])
def test_an_output_that_is_an_input_is_a_copy(make: str) -> None:
    graph = jagged() if make == "jagged" else graph_of(make)
    with parallel(Passes(), layout=WHOLE, output={"graph": "first"}) as model:
        found = model(X, graph)["graph"]
    values = [each._values() if each.is_sparse else each.values() for each in (found, graph)]
    assert torch.equal(*values)
    assert values[0].data_ptr() != values[1].data_ptr()


# --- drawing in inference mode --------------------------------------------------------------------


class RngMode(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        drawn = F.dropout(inputs, 0.3) + torch.randn_like(inputs) + torch.rand(inputs.shape)
        F.dropout(drawn, 0.1, inplace=True)
        return F.rrelu(drawn + F.alpha_dropout(inputs, 0.5, training=True), training=True)


DRAWING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout()), (6, 4)),
    "functions": (RngMode, (6, 4)),
    "channels": (lambda: nn.Dropout2d(), (6, 3, 5, 5)),
    "rnn": (lambda: nn.GRU(4, 4, 2, dropout=0.5, batch_first=True), (6, 5, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (6, 5, 8)),
}


@pytest.mark.parametrize("name", DRAWING)
def test_layers_draw_the_same_numbers_in_inference_mode(name: str) -> None:
    make, shape = DRAWING[name]
    torch.manual_seed(1)
    net, inputs = make().float(), draw(*shape, dtype=F32)
    rule: Any = {"1": "cat(1)"} if name == "rnn" else None
    found = []
    with parallel(net, output=rule) as model:
        for mode in (torch.no_grad, torch.inference_mode, torch.inference_mode):
            torch.manual_seed(2)
            with mode():
                outputs = model(inputs)
            found.append(outputs[0] if isinstance(outputs, tuple) else outputs)
        with torch.inference_mode():
            other = model(inputs)
        model(inputs)  # and it trains on
    assert_close(found[1], found[0], F32)  # operators taken apart round otherwise
    assert_same_bits(found[2], found[1])
    assert not torch.equal(other[0] if isinstance(other, tuple) else other, found[1])


# --- other ways to differentiate, and to compile --------------------------------------------------


def test_a_compiled_model_leaves_its_containers_as_they_are() -> None:
    torch._dynamo.reset()
    net = nn.Sequential(linear(), nn.Tanh(), linear(3, 2))
    twin = copy.deepcopy(net)
    columns = ModelParallel(dim=1).add(linear(2, 2)).add(linear(2, 3))
    whole = nn.Sequential(DataParallel(net, 2), nn.Tanh(), columns)
    assert_equal_pass(
        torch.compile(whole, backend="eager"),
        nn.Sequential(twin, nn.Tanh(), copy.deepcopy(columns)),
        X,
    )


def test_the_compiler_is_not_imported_with_us_nor_by_a_pass() -> None:
    program = (
        "import sys, phalanx, torch\n"
        "with phalanx.DataParallel(torch.nn.Dropout(0.5), 2) as model:\n"
        "    model(torch.ones(3, 2, requires_grad=True)).sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


# --- one buffer under two names -------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=F64))
        self.inner = nn.Module()
        self.inner.register_buffer("again", self.seen)

    def forward(self, inputs: Tensor) -> Tensor:
        self.inner.again += len(inputs)
        return inputs + self.seen


@pytest.mark.parametrize("rule", ["mean", "sum", "first"])
def test_a_buffer_under_two_names_is_one(rule: str) -> None:
    net = Twice()
    with parallel(net, replicas=2, buffers=rule) as model:
        for step in range(3):
            before = float(net.seen)
            found = model(draw(6, 1)) - draw(6, 1)
            assert_close(found, torch.full((6, 1), before + 3, dtype=F64), F64)
            assert net.seen is net.inner.again
            assert float(net.seen) == before + (6 if rule == "sum" else 3), step
        net.inner.again = torch.zeros((), dtype=F64)  # no longer one
        model(draw(6, 1))
        assert float(net.seen) > float(net.inner.again)


class Summed(nn.Module):
    """Autograd gives both parameters one tensor for their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(8, 8, dtype=F64))
        self.flat = nn.Parameter(torch.randn(64, dtype=F64))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ (self.square.view(-1) + self.flat.view(64)).view(8, 8))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_gradients_of_a_sum_are_counted_once(replicas: int) -> None:
    """Plain torch, 2.13, adds each further backward pass to the one tensor twice."""
    net, inputs = Summed(), draw(13, 8)
    expected = torch.autograd.grad(net(inputs).sum(), [*net.parameters()])
    with parallel(net, replicas=replicas) as model:
        for _ in range(3):
            model(inputs).sum().backward()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert_close(parameter.grad, 3 * gradient, F64)
