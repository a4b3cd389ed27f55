"""What is cut, what is given whole, and how parts come together."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.plan import (
    Layout,
    Merging,
    Rows,
    leaf_paths,
    open_rows,
    workload_sizes,
)

pytestmark = pytest.mark.promise("batches-of-any-structure")

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Sample:
    tokens: Tensor
    mask: Tensor | None
    scale: float = 1.0


def rows(count: int, *shape: int) -> Tensor:
    return torch.arange(count * max(1, torch.Size(shape).numel())).view(count, *shape)


def num_rows(batch: Any, layout: Layout) -> int:
    return open_rows(batch, layout).count()


def join(parts: list[Any], sizes: list[int], dim: int = 0) -> Any:
    return Merging(dim=dim).merge(parts, sizes)


# --- cutting --------------------------------------------------------------------------------------


@given(
    total=st.integers(0, 20),
    workloads=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    dim=st.integers(0, 2),
)
def test_what_is_cut_along_any_dim_comes_together_again(
    total: int, workloads: list[int], dim: int
) -> None:
    shape = [2, 3, 4]
    shape[dim] = total
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    sizes = workload_sizes(total, workloads)
    parts = open_rows(x, Layout(dim=dim)).cut(sizes)
    assert [part.shape[dim] for part in parts] == sizes
    assert torch.equal(torch.cat(parts, dim), x)
    assert torch.equal(join(parts, sizes, dim), x)


@pytest.mark.parametrize(
    "batch",
    [
        rows(5),
        [rows(5), rows(5, 2)],
        (rows(5), [rows(5, 2), {"a": rows(5)}]),
        {"b": rows(5), "a": (rows(5),)},
        OrderedDict(b=rows(5), a=rows(5, 3)),
        Pair(rows(5), {"x": rows(5)}),
        {"empty": [], "nothing": None, "x": rows(5)},
    ],
    ids=["tensor", "list", "nested tuple", "dict", "ordered dict", "named tuple", "hollow"],
)
def test_every_kind_of_nest_keeps_its_kind(batch: Any) -> None:
    parts = open_rows(batch, Layout()).cut([2, 0, 3])
    for part in parts:
        assert type(part) is type(batch)
    assert equal_nests(join(parts, [2, 0, 3]), batch)


def equal_nests(left: Any, right: Any) -> bool:
    if isinstance(right, Tensor):
        return torch.equal(left, right)
    if isinstance(right, dict):
        return list(left) == list(right) and all(
            equal_nests(left[key], right[key]) for key in right
        )
    if isinstance(right, list | tuple):
        return type(left) is type(right) and all(map(equal_nests, left, right))
    return left is right or left == right


@pytest.mark.parametrize(
    "value",
    ["text", 3, 2.5, True, None, object(), torch.float64, torch.tensor(4.0)],
    ids=lambda value: type(value).__name__,
)
def test_values_without_rows_are_given_whole_and_are_the_same_object(value: object) -> None:
    parts = open_rows({"x": rows(4), "value": value}, Layout()).cut([3, 1])
    assert parts[0]["value"] is value
    assert parts[1]["value"] is value


# --- paths ----------------------------------------------------------------------------------------

NEST = {
    "x": rows(4),
    "items": [rows(4, 2), {"a": rows(2, 4), "b.c": rows(4)}],
    "pair": Pair(rows(4), Sample(rows(4), None)),
    "none": None,
}


def test_leaves_have_the_paths_that_errors_print() -> None:
    assert leaf_paths(NEST) == [
        "x",
        "items.0",
        "items.1.a",
        "items.1.b.c",
        "pair.left",
        "pair.right.tokens",
        "pair.right.mask",
        "pair.right.scale",
        "none",
    ]
    assert leaf_paths(rows(3)) == [""]
    assert leaf_paths({}) == []
    assert leaf_paths({2: [rows(3)]}) == ["2.0"]


DIMS = [
    ({}, [0, 0, 0, 0, 0, 0, None, None, None]),
    ({"x": None}, [None, 0, 0, 0, 0, 0, None, None, None]),
    ({"items": None}, [0, None, None, None, 0, 0, None, None, None]),
    ({"items.1": None}, [0, 0, None, None, 0, 0, None, None, None]),
    ({"items.1.a": 1}, [0, 0, 1, 0, 0, 0, None, None, None]),
    ({"items": None, "items.1.a": 1}, [0, None, 1, None, 0, 0, None, None, None]),
    ({"items.1.a": 1, "items": None}, [0, None, 1, None, 0, 0, None, None, None]),
    ({"items": None, "items.0": 0, "items.1": 0}, [0, 0, 0, 0, 0, 0, None, None, None]),
    ({"items.1.b.c": None}, [0, 0, 0, None, 0, 0, None, None, None]),
    ({"pair": -1}, [0, 0, 0, 0, -1, -1, None, None, None]),
    ({"pair.right": None}, [0, 0, 0, 0, 0, None, None, None, None]),
    ({"none": 3, "pair.right.scale": 7}, [0, 0, 0, 0, 0, 0, None, None, None]),  # no tensors
]


@pytest.mark.parametrize(("dims", "expected"), DIMS)
def test_a_path_covers_all_leaves_below_it_and_yields_to_a_longer_one(
    dims: dict[str | int, int | None], expected: list[int | None]
) -> None:
    assert Rows(NEST, Layout(dims=dims)).dims == expected


def test_a_batch_of_which_all_is_given_whole() -> None:
    with pytest.raises(ConfigError, match=r"at least one tensor that is split .*, but holds none"):
        num_rows({"x": rows(4)}, Layout(dims={"x": None}))


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (
            {"tokens": rows(12), "mask": rows(10)},
            r"`mask` must have 12 rows along dim 0 like `tokens`, but has 10",
        ),
        ((rows(8, 2), rows(7)), r"`1` must have 8 rows along dim 0 like `0`, but has 7.* y of a"),
        (
            [{"a": rows(3)}, [rows(3), rows(1)]],
            r"`1\.1` must have 3 rows along dim 0 like `0\.a`, but has 1",
        ),
        (
            Sample(rows(4), rows(5)),
            r"`mask` must have 4 rows along dim 0 like `tokens`, but has 5",
        ),
        (
            {"x": rows(2), "none": torch.zeros(0, 3)},
            r"`none` must have 2 rows along dim 0 like `x`, but has 0",
        ),
    ],
)
def test_leaves_of_different_batch_size_are_named(batch: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        num_rows(batch, Layout())


# --- lists, arrays and mappings -------------------------------------------------------------------

WORDS = ["a", "bb", "ccc", "d", "ee"]


@pytest.mark.parametrize(
    "values",
    [
        WORDS,
        tuple(WORDS),
        [1, 2, 3, 4, 5],
        (1, 2, 3, 4, 5),
        [{"id": 1}, {"id": 2}, {"id": 3}, {"id": 4, "more": [1, 2]}, {}],
        [[1], [2, 3], [], [4], [5, 6, 7]],
        ["a", None, "c", None, "e"],
    ],
    ids=["str", "tuple", "int", "numbers", "dict", "ragged", "None too"],
)
def test_a_list_that_the_layout_names_is_split_by_its_items(values: Any) -> None:
    batch = {"x": rows(5, 2), "more": values}
    parts = open_rows(batch, Layout(dims={"more": 0})).cut([3, 0, 2])
    assert [part["more"] for part in parts] == [values[:3], values[3:3], values[3:]]
    assert type(parts[0]["more"]) is type(values)
    with pytest.raises(ConfigError, match=r"`more` must have 5 rows .* like `x`, but has 4"):
        num_rows({"x": rows(5, 2), "more": values[:4]}, Layout(dims={"more": 0}))
