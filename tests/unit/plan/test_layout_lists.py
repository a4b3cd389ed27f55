"""Lists, arrays and mappings in a batch: split like tensors, or refused."""

from __future__ import annotations

import dataclasses
from collections import UserDict, UserList
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.plan import Layout, cut, join, num_rows

WORDS = ["a", "bb", "ccc", "d", "ee"]


def rows(count: int, *shape: int) -> Tensor:
    return torch.arange(count * max(1, torch.Size(shape).numel())).view(count, *shape)


@pytest.mark.parametrize(
    "values",
    [
        WORDS,
        tuple(WORDS),
        UserList(WORDS),
        [1, 2, 3, 4, 5],
        [{"id": 1}, {"id": 2}, {"id": 3}, {"id": 4, "more": [1, 2]}, {}],
        [[1], [2, 3], [], [4], [5, 6, 7]],
        [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5)],
        [object() for _ in range(5)],
        ["a", None, "c", None, "e"],
    ],
    ids=["str", "tuple", "user", "int", "dict", "ragged", "pairs", "objects", "None too"],
)
def test_a_list_of_values_is_split_by_its_items(values: Any) -> None:
    parts = cut({"x": rows(5, 2), "more": values}, [3, 0, 2], Layout())
    assert [part["more"] for part in parts] == [values[:3], values[3:3], values[3:]]
    assert type(parts[0]["more"]) is type(values)


@pytest.mark.parametrize(
    "values",
    ["text", b"text", (2, 2), (1.0, 2.0, None), None, [], [None] * 12, range(3), torch.Size([5])],
    ids=repr,
)
def test_a_single_value_is_given_whole(values: Any) -> None:
    for count in (4, 5):
        parts = cut({"x": rows(count), "more": values}, [1, count - 1], Layout())
        assert all(part["more"] == values for part in parts)


def test_a_list_that_the_layout_names_with_none_is_given_whole() -> None:
    layout = Layout(dims={"sizes": None})
    parts = cut({"x": rows(4), "sizes": [1, 2]}, [2, 2], layout)
    assert [part["sizes"] for part in parts] == [[1, 2], [1, 2]]


def test_a_batch_without_tensors_has_the_rows_of_its_lists() -> None:
    assert cut(WORDS, [2, 3], Layout()) == [WORDS[:2], WORDS[2:]]
    assert cut((WORDS, [0, 1, 2, 3, 4]), [4, 1], Layout())[1] == (["ee"], [4])
    assert num_rows({"0": [[1, 2], [3]]}, Layout()) == 2


def test_lists_are_split_whatever_the_dim_of_the_tensors() -> None:
    parts = cut((rows(2, 5), WORDS), [2, 3], Layout(dim=1))
    assert [(part[0].shape, part[1]) for part in parts] == [
        ((2, 2), WORDS[:2]),
        ((2, 3), WORDS[2:]),
    ]


def test_columns_in_a_list_are_split_each() -> None:
    parts = cut(((WORDS, [1, 2, 3, 4, 5]), rows(5)), [2, 3], Layout())
    assert parts[0][0] == (WORDS[:2], [1, 2])
    assert parts[1][0] == (WORDS[2:], [3, 4, 5])


def test_a_list_that_holds_rows_or_columns_is_refused_until_it_is_said() -> None:
    batch = {"pairs": [["a", "b"], ["c", "d"]], "x": rows(2)}
    with pytest.raises(ConfigError, match=r"Input `pairs` must hold .* but may be either"):
        num_rows(batch, Layout())
    by_rows = cut(batch, [1, 1], Layout(dims={"pairs": 0}))
    assert by_rows[0]["pairs"] == [["a", "b"]]
    by_columns = cut(batch, [1, 1], Layout(dims={"pairs.0": 0, "pairs.1": 0}))
    assert by_columns[0]["pairs"] == [["a"], ["c"]]


def test_tensors_as_arguments_in_a_list_are_split_each() -> None:
    parts = cut([rows(2, 3), rows(2)], [1, 1], Layout())
    assert [part[0].shape for part in parts] == [(1, 3), (1, 3)]


def test_what_the_layout_gives_whole_is_given_whole_with_all_below_it() -> None:
    batch = {"x": rows(3), "more": {"ids": {1, 2, 3}}}
    assert cut(batch, [2, 1], Layout(dims={"more": None}))[1]["more"] == {"ids": {1, 2, 3}}


def test_a_list_of_inputs_and_targets_that_are_dicts_is_a_batch() -> None:
    assert num_rows([{"a": rows(6)}, {"a": rows(6)}], Layout()) == 6
    assert num_rows([(rows(6), rows(6, 2)), (rows(6), rows(6))], Layout()) == 6


@pytest.mark.parametrize("value", [[[5]], [("a",)], [{"boxes": [[1, 2]], "labels": [1]}]])
def test_a_list_in_a_batch_of_one_row_needs_no_word_about_it(value: Any) -> None:
    assert cut({"x": rows(1), "more": value}, [1, 0], Layout())[0]["more"] == value


@pytest.mark.parametrize(("dim", "shape"), [(0, (5, 2)), (1, (2, 5)), (-1, (3, 5))])
def test_arrays_are_split_as_views(dim: int, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape)
    parts = cut({"x": array}, [2, 0, 3], Layout(dim=dim))
    assert [part["x"].shape[dim] for part in parts] == [2, 0, 3]
    assert all(part["x"].base is not None for part in parts)
    assert np.concatenate([part["x"] for part in parts], dim).shape == shape


class Batch(dict[str, Any]):
    """As EasyDict and its like: attributes are keys."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Fixed(Mapping[str, Any]):
    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@pytest.mark.parametrize("kind", [Batch, UserDict, Fixed])
def test_mappings_of_any_class_are_split_and_merged_by_their_values(kind: Any) -> None:
    batch = kind({"x": rows(5, 2), "words": WORDS})
    first, second = cut(batch, [3, 2], Layout())
    assert type(first) is kind
    assert (first["x"].shape, second["words"]) == ((3, 2), WORDS[3:])
    assert torch.equal(
        join([kind({"x": first["x"]}), kind({"x": second["x"]})], [3, 2])["x"], batch["x"]
    )


@dataclasses.dataclass
class Shifted:
    x: Tensor
    by: dataclasses.InitVar[int] = 0

    def __post_init__(self, by: int) -> None:
        self.x = self.x + by


@dataclasses.dataclass(frozen=True)
class Counted:
    x: Tensor
    words: list[str]
    count: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", self.x.clone())
        object.__setattr__(self, "words", list(self.words))
        object.__setattr__(self, "count", len(self.x))


def test_a_dataclass_makes_what_it_derives_from_its_fields_anew() -> None:
    first, second = cut(Counted(rows(5, 2), WORDS), [2, 3], Layout())
    assert (first.count, second.count, second.words) == (2, 3, WORDS[2:])
    assert cut(Shifted(rows(4), 3), [3, 1], Layout())[1].x.tolist() == [6]


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes_of_any_kind_are_one_value(kind: Callable[[bytes], Any]) -> None:
    value = kind(b"abcd")
    assert cut({"x": rows(4), "id": value}, [3, 1], Layout())[1]["id"] is value


def test_the_users_own_functions_take_a_batch_apart_and_put_it_together() -> None:
    layout = Layout(split=lambda text: text.split(), collate=" ".join)
    assert num_rows("a b c", layout) == 3
    assert cut("a b c", [2, 0, 1], layout) == ["a b", None, "c"]
    assert cut("", [0, 0], layout) == ["", ""]


def test_arrays_that_replicas_return_are_concatenated_as_tensors_are() -> None:
    joined = join([{"a": np.zeros((3, 2))}, {"a": np.ones((2, 2))}], [3, 2])
    assert np.array_equal(joined["a"], np.repeat([[0.0, 0.0], [1.0, 1.0]], [3, 2], 0))
    with pytest.raises(ConfigError, match=r"Output `a` .* must have its slice's 3 rows"):
        join([{"a": np.zeros(1)}, {"a": np.ones(1)}], [3, 2])
