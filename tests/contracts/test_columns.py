"""Columns and rules of one's own: what a container derived from `AbstractParallel` may count on."""

from __future__ import annotations

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from tests.columns import columns_of_layer
from tests.contracts.containers import (
    COPIES,
    Columns,
    PlainMixture,
    Slices,
    assert_equal_pass,
    draw,
    fresh,
    loss_of,
    one_pass,
    spread,
)
from tests.zoo import assert_close, assert_same_bits, gradients_of, sgd

pytestmark = pytest.mark.promise("containers", "torch7")

F64 = torch.float64
CPU = torch.device("cpu")
A, B = torch.ones(2), torch.zeros(3)
Pair = namedtuple("Pair", ["left", "right"])


class ToAll(phalanx.AbstractParallel):
    """Gives every column the whole input; concatenates, as the base does."""

    def distribute(self, inputs: Any) -> list[Any]:
        return [inputs] * len(self)


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.value


def of(kind: Any, *columns: nn.Module, **options: Any) -> Any:
    made = kind(**options)
    for column in columns:
        made.add(column, "cpu")
    return made


# --- columns --------------------------------------------------------------------------------------


def test_columns_are_counted_found_and_named() -> None:
    columns = [nn.Linear(4, 2) for _ in range(3)]
    model = ToAll()
    assert (len(model), model.devices) == (0, ())
    for count, column in enumerate(columns, start=1):
        assert model.add(column, "cpu") is model
        assert len(model) == count
    assert [model.get(index) for index in (0, 1, 2, -1, -3)] == [*columns, columns[2], columns[0]]
    assert model.devices == (CPU,) * 3
    assert list(model.state_dict())[:2] == ["0.weight", "0.bias"]
    assert sorted(dict(model.named_children())) == ["0", "1", "2"]
    one = of(phalanx.ModelParallel, columns[0], dim=1)
    assert repr(one).startswith("ModelParallel(\n  devices=[cpu], dim=1\n  (0): Linear(")


def test_one_module_as_several_columns_gets_the_sum_of_their_gradients() -> None:
    shared = nn.Linear(4, 2).double()
    with of(Slices, shared, shared, shared, dim=0) as model:
        assert len(list(model.parameters())) == 2
        assert_equal_pass(model, copy.deepcopy(shared), draw(9, 4))


def test_parameters_tied_across_columns_get_the_sum() -> None:
    columns = [nn.Linear(4, 4).double() for _ in range(3)]
    columns[2].weight = columns[0].weight
    twins = copy.deepcopy(nn.ModuleList(columns))
    x = draw(9, 4)
    with of(Slices, *columns, dim=0) as container:
        got = one_pass(container, x)
        assert container.get(2).weight is container.get(0).weight
    loss_of([twin(piece) for twin, piece in zip(twins, x.split(3), strict=True)]).backward()
    assert_close(got["parameters"], gradients_of(twins), F64)


def test_a_column_whose_output_is_not_used_gets_no_gradient() -> None:
    class First(ToAll):
        def merge(self, outputs: list[Tensor]) -> Tensor:
            return outputs[0]

    with of(First, nn.Linear(4, 2), nn.Linear(4, 2)) as model:
        model(torch.ones(5, 4)).sum().backward()
        assert [grad is None for grad in gradients_of(model)] == [False, False, True, True]


# --- where columns go -----------------------------------------------------------------------------


def test_columns_without_a_device_go_where_the_fewest_are(monkeypatch) -> None:
    devices = CPU, torch.device("meta")
    monkeypatch.setattr("phalanx.parallel.abstract_parallel.known_devices", lambda: devices)
    model = ToAll().add(nn.Tanh(), "cpu")
    for _ in range(3):
        model.add(nn.Tanh())
    assert [each.type for each in model.devices] == ["cpu", "meta", "cpu", "meta"]


# --- distribute -----------------------------------------------------------------------------------

CALLS: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = [
    ((A,), {}, A),
    (([A, B],), {}, [A, B]),
    (((A, B),), {}, (A, B)),  # one argument, which is a tuple
    (({"x": A},), {}, {"x": A}),
    ((None,), {}, None),
    ((A, B), {}, (A, B)),
    ((A, 3, "word"), {}, (A, 3, "word")),
    ((A,), {"mask": B, "scale": 2.0}, A),
    ((A, B), {"mask": None}, (A, B)),
    ((), {"x": A, "nested": {"y": [B]}}, ()),
]


@pytest.mark.parametrize(("args", "kwargs", "inputs"), CALLS)
def test_arguments_reach_the_rule_and_the_columns(
    args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Any
) -> None:
    given: list[Any] = []

    class Shows(ToAll):
        def distribute(self, inputs: Any) -> list[Any]:
            given.append(inputs)
            return super().distribute(inputs)

    with of(Shows, Returns(A), Returns(A)) as model:
        model.get(0).register_forward_hook(
            lambda _, args, kwargs, __: given.append((args, kwargs)), with_kwargs=True
        )
        model(*args, **kwargs)
    assert_same_bits(given[0], inputs)
    assert_same_bits(given[1], (args, kwargs))
    assert list(given[1][1]) == list(kwargs)


def test_parts_may_be_of_any_shape_and_structure() -> None:
    class Splits(phalanx.AbstractParallel):
        def distribute(self, inputs: Tensor) -> list[Any]:
            return [inputs[:1], {"input": inputs[1:]}, None]

        def merge(self, outputs: list[Any]) -> Any:
            return outputs

    class Whole(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    x = draw(3, 4)
    with of(Splits, Whole(), Whole(), Whole()) as model:
        assert_same_bits(model(x), [x[:1], {"input": x[1:]}, None])


# --- merge ----------------------------------------------------------------------------------------


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


@pytest.mark.parametrize("kind", [ToAll, phalanx.ModelParallel])
@pytest.mark.parametrize(
    ("dim", "outputs", "expected"),
    [
        (0, [zeros(1, 2), ones(2, 2)], torch.cat([zeros(1, 2), ones(2, 2)])),
        (1, [zeros(2, 1), ones(2, 2)], torch.cat([zeros(2, 1), ones(2, 2)], 1)),
        (-1, [zeros(2, 1), ones(2, 2)], torch.cat([zeros(2, 1), ones(2, 2)], 1)),
        (
            0,
            [{"y": zeros(1), "n": 3}, {"y": ones(2), "n": 4}],
            {"y": torch.tensor([0.0, 1, 1]), "n": 3},
        ),
        (0, [(zeros(1), None)] * 2, (zeros(2), None)),
        (0, [Pair(zeros(1), "a"), Pair(ones(1), "b")], Pair(torch.tensor([0.0, 1.0]), "a")),
        (0, ["a", "b"], "a"),
        (0, [[], []], []),
        (0, [ones(2)], ones(2)),
    ],
)
def test_by_default_outputs_are_concatenated_leaf_by_leaf(
    kind: Any, dim: int, outputs: list[Any], expected: Any
) -> None:
    with of(kind, *map(Returns, outputs), dim=dim) as model:
        assert_same_bits(model(draw(5, 4)), expected)


# --- whole containers -----------------------------------------------------------------------------


def test_a_mixture_with_parameters_of_its_own_equals_plain_torch(device: torch.device) -> None:
    torch.manual_seed(0)
    columns = [
        nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).double()
        for width in (4, 7, 3)
    ]
    mixture = spread(columns, device, Columns(5, 3).double().to(device))
    twin = PlainMixture(mixture).to(device)
    with mixture:
        for seed in range(3):
            x = draw(7, 5, seed=seed, device=device)
            got, expected = one_pass(mixture, x), one_pass(twin, x)
            assert_close(got["outputs"], expected["outputs"], F64)
            assert_close(got["inputs"], expected["inputs"], F64)
            for own, other in zip(got["parameters"], expected["parameters"], strict=True):
                assert_close(own.to(device), other, F64)
            for each in (mixture, twin):
                sgd(each.parameters()).step()
        with COPIES["file"](mixture) as copied:
            assert torch.equal(copied(x), mixture(x))
    assert list(mixture.state_dict())[:3] == ["gate.weight", "gate.bias", "0.0.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_a_convolution_of_64_filters_in_four_columns_equals_the_unsplit_one(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fbcunn's own test, of smaller images. Sums have up to 363 terms of order 0.1."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 64, 11).to(device, dtype)
    model = spread(columns_of_layer(layer, 4), device, phalanx.ModelParallel(dim=1))
    assert [model.get(index).out_channels for index in range(4)] == [16] * 4
    x = draw(3, 3, 17, 19, device=device, dtype=dtype)
    mine, theirs = fresh(x), fresh(x)
    with model:
        for each, leaf in ((model, mine), (layer, theirs)):
            each(leaf).square().mean().backward()
        assert_close(mine.grad, theirs.grad, dtype)
        for each in (model, layer):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        assert_close(model(x), layer(x), dtype)
    for index in range(4):
        own, column = slice(16 * index, 16 * (index + 1)), model.get(index)
        for name in ("weight", "bias"):
            whole, part = getattr(layer, name), getattr(column, name)
            assert_close(part.cpu(), whole[own].cpu(), dtype)
            assert_close(part.grad.cpu(), whole.grad[own].cpu(), dtype)
            assert part.grad.any()


@pytest.mark.gpu
def test_columns_on_the_gpu_and_the_cpu(gpu: torch.device) -> None:
    layer = nn.Linear(3, 5).double()
    left, right = columns_of_layer(layer, 2)
    x = draw(4, 3)
    with phalanx.ModelParallel(-1).add(left, gpu).add(right, "cpu") as model:
        got, expected = one_pass(model, x), one_pass(layer, x)
    assert got["outputs"][0].device == gpu
    assert_close(got["inputs"], expected["inputs"], F64)
    assert_close(torch.cat([left.weight.grad.cpu(), right.weight.grad]), layer.weight.grad, F64)
