"""Columns, two rules, and nothing else: what a third party's container may count on."""

from __future__ import annotations

import copy
import pickle
import threading
import traceback
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import AbstractParallel
from phalanx.parallel import abstract_parallel
from tests.zoo import assert_same_bits

CPU = torch.device("cpu")
DEADLINE_S = 30
Pair = namedtuple("Pair", ["left", "right"])


class ToAll(AbstractParallel):
    """Gives every column the whole input; concatenates, as the base does."""

    def distribute(self, inputs: Any) -> list[Any]:
        return [inputs] * len(self)


class Sum(ToAll):
    def merge(self, outputs: list[Tensor]) -> Tensor:
        return torch.stack([output.to(outputs[0].device) for output in outputs]).sum(0)


class Takes(nn.Module):
    """Records what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen.append((args, kwargs))
        return torch.ones(1)


def of(kind: type[AbstractParallel], *columns: nn.Module, **options: Any) -> Any:
    made = kind(**options)
    for column in columns:
        made.add(column, "cpu")
    return made


def linears(count: int = 3, rows: int = 4, features: int = 2) -> list[nn.Module]:
    return [nn.Linear(rows, features) for _ in range(count)]


def x_of(*shape: int) -> Tensor:
    return torch.randn(*(shape or (5, 4)))


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


# --- columns --------------------------------------------------------------------------------------


def test_columns_are_counted_found_and_named() -> None:
    columns = linears()
    model = ToAll()
    assert (len(model), model.devices) == (0, ())
    for count, column in enumerate(columns, start=1):
        assert model.add(column, "cpu") is model
        assert len(model) == count
    assert [model.get(index) for index in (0, 1, 2, -1, -3)] == [*columns, columns[2], columns[0]]
    assert model.devices == (CPU,) * 3
    assert list(model.state_dict())[:2] == ["0.weight", "0.bias"]
    assert sorted(dict(model.named_children())) == ["0", "1", "2"]


def test_a_column_may_be_added_between_passes() -> None:
    x = x_of()
    with of(Sum, *linears(2)) as model:
        model(x)
        model.add(nn.Linear(4, 2), "cpu")
        assert_close(model(x), sum(model.get(index)(x) for index in range(3)))


def test_inside_of_a_column_changes_are_followed() -> None:
    x = x_of()
    with of(Sum, nn.Sequential(nn.Linear(4, 2)), nn.Linear(4, 2)) as model:
        model(x)
        model.get(0)[0] = nn.Linear(4, 2)
        model.get(1).weight = nn.Parameter(torch.ones(2, 4))
        assert_close(model(x), model.get(0)(x) + model.get(1)(x))


def test_columns_run_at_the_same_time_each_in_its_thread() -> None:
    barrier = threading.Barrier(3)

    class Meets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            barrier.wait(DEADLINE_S)
            names.append(threading.current_thread().name)
            return x

    names: list[str] = []
    with of(ToAll, Meets(), Meets(), Meets()) as model:
        model(x_of())
    assert sorted(names) == [f"phalanx-replica-{index}" for index in range(3)]


def test_the_next_device_has_fewest_bytes_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of columns that were placed by hand, and of what a column has become since."""
    meta = torch.device("meta")
    monkeypatch.setattr(abstract_parallel, "known_devices", lambda: (CPU, meta))
    monkeypatch.setattr(abstract_parallel, "resolve_device", torch.device)
    model = ToAll()
    assert model.next_device() == CPU
    model.add(nn.Linear(10, 10), "cpu")
    assert model.next_device() == meta
    model.add(nn.Linear(10, 5))
    assert model.devices == (CPU, meta)
    assert model.get(1).weight.device == meta
    model.add(nn.Linear(10, 5), "meta")
    assert model.next_device() == CPU  # as many bytes there, in fewer columns
    model.get(0).double()
    assert model.next_device() == meta
    model.add(nn.Identity())
    assert model.devices[-1] == meta  # without parameters a column lies where it was placed


def test_by_default_columns_go_to_the_device_that_is_least_loaded(device: torch.device) -> None:
    model = ToAll().add(nn.Linear(4, 2))
    assert model.get(0).weight.device.type == model.devices[0].type
    assert model.devices[0] in phalanx.replicas.known_devices()


# --- distribute -----------------------------------------------------------------------------------


A, B = torch.ones(2), torch.zeros(3)
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

    columns = [Takes(), Takes()]
    with of(Shows, *columns) as model:
        model.get(0).register_forward_hook(
            lambda _, args, kwargs, __: given.append((args, kwargs)), with_kwargs=True
        )
        model(*args, **kwargs)
    assert_same_bits(given[0], inputs)
    assert_same_bits(given[1], (args, kwargs))
    assert list(given[1][1]) == list(kwargs)


def test_parts_may_be_of_any_shape_and_structure() -> None:
    shapes: list[Any] = []

    class Splits(AbstractParallel):
        def distribute(self, inputs: Tensor) -> list[Any]:
            return [inputs[:1], {"a": inputs[1:]}, None]

        def merge(self, outputs: list[Any]) -> Any:
            return outputs

    class Shape(nn.Module):
        def forward(self, x: Any) -> Any:
            shapes.append(x if x is None else (x["a"] if isinstance(x, dict) else x).shape)
            return x

    with of(Splits, Shape(), Shape(), Shape()) as model:
        first, second, third = model(x_of(3, 4))
    assert (first.shape, second["a"].shape, third) == ((1, 4), (2, 4), None)
    assert sorted(map(str, shapes)) == ["None", "torch.Size([1, 4])", "torch.Size([2, 4])"]


# --- merge ----------------------------------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return self.value


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


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
    dim: int, outputs: list[Any], expected: Any
) -> None:
    with of(ToAll, *map(Returns, outputs), dim=dim) as model:
        assert_same_bits(model(x_of()), expected)


def test_a_rule_of_ones_own_gets_outputs_as_they_are() -> None:
    got: list[Any] = []

    class Takes2(ToAll):
        def merge(self, outputs: list[Any]) -> str:
            got.extend(outputs)
            return "merged"

    with of(Takes2, Returns({"y": ones(2)}), Returns("word"), Returns(None)) as model:
        assert model(x_of()) == "merged"
    assert got[0]["y"].tolist() == [1.0, 1.0]
    assert got[1:] == ["word", None]


def test_a_rule_that_fails_keeps_its_error_and_buffers_stay_as_they_were() -> None:
    class Breaks(ToAll):
        def merge(self, outputs: list[Tensor]) -> Tensor:
            raise KeyError("merge")

    norm = nn.BatchNorm1d(4)
    with of(Breaks, norm, nn.Identity()) as model, pytest.raises(KeyError, match="merge"):
        model(x_of())
    assert norm.num_batches_tracked.item() == 0
    assert norm.running_mean.tolist() == [0.0] * 4


# --- modules of every kind as columns -------------------------------------------------------------


def in_turn(model: Any, x: Tensor) -> Tensor:
    """Return what columns compute one after the other, in plain torch."""
    return torch.stack([model.get(index)(x) for index in range(len(model))]).sum(0)


def assert_as_in_turn(model: Any, x: Tensor, twin: Any = None) -> None:
    model.zero_grad()
    twin = copy.deepcopy(model) if twin is None else twin
    twin.zero_grad()
    x, y = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = model(x).cpu(), in_turn(twin, y)
    assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert_close(x.grad, y.grad)
    assert_close(gradients(model), gradients(twin))
    assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_one_module_as_several_columns_gets_the_sum_of_their_gradients() -> None:
    shared = nn.Linear(4, 2)
    with of(Sum, shared, shared, nn.Linear(4, 2)) as model:
        assert len(list(model.parameters())) == 4
        assert_as_in_turn(model, x_of())


def test_buffers_of_columns_are_written() -> None:
    with of(Sum, nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))) as model:
        twin = copy.deepcopy(model)
        for _ in range(2):
            assert_as_in_turn(model, x_of(), twin)
        model.eval()
        assert_as_in_turn(model, x_of())


def test_a_column_whose_output_is_not_used_gets_no_gradient() -> None:
    class First(ToAll):
        def merge(self, outputs: list[Tensor]) -> Tensor:
            return outputs[0]

    with of(First, *linears()) as model:
        model(x_of()).sum().backward()
        assert [grad is None for grad in gradients(model)] == [False, False] + [True] * 4


# --- copies ---------------------------------------------------------------------------------------


def test_columns_that_were_placed_elsewhere_run_on_what_this_machine_has() -> None:
    """A column without parameters has no tensor that `map_location` could have moved."""
    model = of(Sum, nn.Tanh(), nn.Linear(4, 4))
    model._placed[0] = torch.device("cuda", 99)  # as on the machine where it was made
    with pytest.warns(UserWarning, match="cuda:99"):
        other = pickle.loads(pickle.dumps(model))
    with other:
        assert_as_in_turn(other, x_of())


# --- failures -------------------------------------------------------------------------------------


class Picky(nn.Linear):
    """Fails on numbers that are not, forward or backward."""

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise KeyError("forward")
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(self.look)
        return output

    def look(self, gradient: Tensor) -> None:
        if gradient.isnan().any():
            raise IndexError("backward")


def test_an_error_in_one_column_keeps_type_and_place_and_names_the_column() -> None:
    x = x_of()
    with of(Sum, nn.Linear(4, 2), Picky(4, 2), nn.Linear(4, 2)) as model:
        with pytest.raises(KeyError, match="forward") as caught:
            model(x * float("nan"))
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert frames[-1] == "forward"
        assert "1" in caught.value.__notes__[0]
        assert len(caught.value.__notes__) == 1
        assert_as_in_turn(model, x)


def test_an_error_on_the_way_back_leaves_no_gradient_and_a_usable_container() -> None:
    x = x_of()
    with of(Sum, nn.Linear(4, 2), Picky(4, 2)) as model:
        with pytest.raises(IndexError, match="backward") as caught:
            (model(x) * float("nan")).sum().backward()
        assert "1" in caught.value.__notes__[0]
        assert gradients(model) == [None] * 4
        assert_as_in_turn(model, x)
