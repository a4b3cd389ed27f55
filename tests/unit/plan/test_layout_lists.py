"""Lists, arrays and mappings in a batch: split like tensors, or refused."""

from __future__ import annotations

import dataclasses
from collections import UserDict, UserList, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.plan import Layout, cut, join, num_rows

WORDS = ["a", "bb", "ccc", "d", "ee"]


def rows(count: int, *shape: int) -> Tensor:
    return torch.arange(count * max(1, torch.Size(shape).numel())).view(count, *shape)


class Own(list[Any]):
    """A list of the user's own class."""


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


def test_a_list_of_another_length_is_refused_with_both_names() -> None:
    with pytest.raises(ConfigError, match=r"`1` must have 5 items, one per row, like `0`, but has"):
        num_rows((rows(5), ["a", "b"]), Layout())


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


def test_a_list_of_one_dict_of_tensors_per_row_is_refused() -> None:
    samples = [{"boxes": rows(4, 4)} for _ in range(4)]
    with pytest.raises(ConfigError, match=r"list of 4 dicts .* Layout\(split=.*collate"):
        num_rows((rows(4), samples), Layout())
    with pytest.raises(ConfigError, match="rows along dim 0"):
        num_rows((rows(5), [{"boxes": rows(k, 4)} for k in (1, 2, 0, 3)]), Layout())
    views = cut({"views": samples, "x": rows(4)}, [3, 1], Layout(dims={"views": 0}))
    assert views[1]["views"][0]["boxes"].shape == (1, 4)


def test_tensors_as_arguments_in_a_list_are_split_each() -> None:
    parts = cut([rows(2, 3), rows(2)], [1, 1], Layout())
    assert [part[0].shape for part in parts] == [(1, 3), (1, 3)]


def test_an_object_of_as_many_items_as_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="`ids` must be a tensor, an array or a list to be split"):
        num_rows({"x": rows(3), "ids": {1, 2, 3}}, Layout())
    whole = cut({"x": rows(3), "ids": {1, 2, 3}}, [2, 1], Layout(dims={"ids": None}))
    assert whole[1]["ids"] == {1, 2, 3}


def test_what_the_layout_gives_whole_is_given_whole_with_all_below_it() -> None:
    batch = {"x": rows(3), "more": {"ids": {1, 2, 3}}}
    assert cut(batch, [2, 1], Layout(dims={"more": None}))[1]["more"] == {"ids": {1, 2, 3}}


@pytest.mark.parametrize("kind", [UserList, Own])
def test_tensors_in_a_sequence_that_is_no_list_are_refused(kind: Any) -> None:
    batch = {"x": kind([rows(3, 2), rows(3)]), "y": rows(3)}
    with pytest.raises(ConfigError, match=f"`x` must be .* but is '{kind.__name__}' that holds"):
        num_rows(batch, Layout())
    assert cut(batch, [2, 1], Layout(dims={"x": None}))[1]["x"] is batch["x"]


def test_a_tensor_without_dims_is_a_value_as_a_number_is() -> None:
    labels = [torch.tensor(k) for k in range(3)]
    parts = cut((rows(3, 2), labels), [2, 1], Layout())
    assert [part[1] for part in parts] == [labels[:2], labels[2:]]
    boxes = [{"label": each, "name": "a"} for each in labels]
    assert cut((rows(3, 2), boxes), [2, 1], Layout())[1][1] == boxes[2:]
    for values in (tuple(labels), tuple(np.arange(3))):
        with pytest.raises(ConfigError, match="A tuple of 3 numbers in a batch of 3 rows"):
            num_rows((rows(3), values), Layout())
        assert cut((rows(4), values), [3, 1], Layout())[1][1] == values


@pytest.mark.parametrize(
    "samples",
    [
        [{"ids": rows(6), "label": torch.tensor(1)}] * 4,
        [{"ids": rows(6), "label": 1}],
        [{"ids": rows(6), "mask": rows(6)}] * 3,
        [(rows(6), torch.tensor(1))] * 4,
        [(rows(6), "text")] * 2,
    ],
)
def test_a_list_of_samples_is_refused(samples: Any) -> None:
    with pytest.raises(ConfigError, match=r"must not be a list of samples.*Layout\(split=list"):
        num_rows(samples, Layout())
    layout = Layout(split=list, collate=list)
    assert cut(samples, [1, len(samples) - 1], layout)[0] == samples[:1]


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


def test_an_array_of_other_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="`1` must have 3 rows along dim 0 like `0`, but has 2"):
        num_rows((rows(3), np.zeros(2)), Layout())


def test_a_tuple_of_as_many_numbers_as_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="A tuple of 3 numbers in a batch of 3 rows"):
        num_rows({"x": rows(3), "size": (1, 2, 3)}, Layout())
    parts = cut({"x": rows(3), "size": (1, 2, 3)}, [2, 1], Layout(dims={"size": None}))
    assert parts[1]["size"] == (1, 2, 3)
    assert num_rows({"x": rows(1), "size": (1,)}, Layout()) == 1


def test_a_sequence_without_slices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'deque' has none\. Give list\(\.\.\.\)"):
        cut({"x": rows(3), "words": deque("abc")}, [2, 1], Layout())


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


class Odd(UserDict[str, Any]):
    def __init__(self, one: int = 0, *more: int) -> None:
        super().__init__()


def test_a_mapping_that_cannot_be_made_from_a_dict_is_refused() -> None:
    odd = Odd()
    odd["x"] = rows(3)
    with pytest.raises(UnsupportedError, match=r"Odd\(dict\) makes one .* Give dict\(\.\.\.\)"):
        cut(odd, [2, 1], Layout())


@dataclasses.dataclass
class Halved:
    x: Tensor

    def __post_init__(self) -> None:
        self.x = self.x / 2


@dataclasses.dataclass
class Shifted:
    x: Tensor
    by: dataclasses.InitVar[int] = 0

    def __post_init__(self, by: int) -> None:
        self.x = self.x + by


@dataclasses.dataclass
class Needs:
    x: Tensor
    device: dataclasses.InitVar[str]


@dataclasses.dataclass(frozen=True)
class Counted:
    x: Tensor
    words: list[str]
    count: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", self.x.clone())
        object.__setattr__(self, "words", list(self.words))
        object.__setattr__(self, "count", len(self.x))


@pytest.mark.parametrize("batch", [Halved(rows(4)), Needs(rows(4), "cpu")])
def test_a_dataclass_that_does_not_keep_its_fields_is_refused(batch: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=r"\(\*\*fields\) makes one .* not in `__post_init__`"
    ):
        cut(batch, [2, 2], Layout())


def test_a_dataclass_makes_what_it_derives_from_its_fields_anew() -> None:
    first, second = cut(Counted(rows(5, 2), WORDS), [2, 3], Layout())
    assert (first.count, second.count, second.words) == (2, 3, WORDS[2:])
    assert cut(Shifted(rows(4), 3), [3, 1], Layout())[1].x.tolist() == [6]


@dataclasses.dataclass
class Late:
    x: Tensor
    mask: Tensor | None = dataclasses.field(init=False, default=None)


def test_a_field_that_was_set_after_the_dataclass_was_made_is_refused() -> None:
    batch = Late(rows(4))
    assert cut(batch, [2, 2], Layout())[1].mask is None
    batch.mask = rows(4)  # no part would have it
    with pytest.raises(UnsupportedError, match=r"Late\(\*\*fields\) makes .* or later"):
        cut(batch, [2, 2], Layout())


def test_packed_sequences_are_not_cut_along_time() -> None:
    packed = pack_padded_sequence(torch.ones(1, 5, 3), torch.tensor([5]), batch_first=True)
    with pytest.raises(UnsupportedError, match="`p` must be padded to be split"):
        cut({"p": packed}, [3, 2], Layout())
    parts = cut({"p": packed, "x": rows(4)}, [3, 1], Layout(dims={"p": None}))
    assert [part["p"] is packed for part in parts] == [True, True]


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes_of_any_kind_are_one_value(kind: Callable[[bytes], Any]) -> None:
    value = kind(b"abcd")
    assert cut({"x": rows(4), "id": value}, [3, 1], Layout())[1]["id"] is value


def test_the_users_own_functions_take_a_batch_apart_and_put_it_together() -> None:
    layout = Layout(split=lambda text: text.split(), collate=" ".join)
    assert num_rows("a b c", layout) == 3
    assert cut("a b c", [2, 0, 1], layout) == ["a b", None, "c"]
    assert cut("", [0, 0], layout) == ["", ""]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"split": list}, "`collate` must be given with the other"),
        ({"collate": list}, "`split` must be given with the other"),
        ({"split": 3, "collate": list}, "`split` must be"),
        ({"split": list, "collate": list, "dims": {"x": 0}}, "`dims` must be empty"),
    ],
)
def test_functions_that_cannot_work_are_refused(options: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Layout(**options)


def test_a_split_that_returns_no_list_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="`split` must return a list of samples, but returned 'int'"
    ):
        num_rows("a", Layout(split=len, collate=list))


def test_arrays_that_replicas_return_are_concatenated_as_tensors_are() -> None:
    joined = join([{"a": np.zeros((3, 2))}, {"a": np.ones((2, 2))}], [3, 2])
    assert np.array_equal(joined["a"], np.repeat([[0.0, 0.0], [1.0, 1.0]], [3, 2], 0))
    with pytest.raises(ConfigError, match=r"Output `a` .* must have its slice's 3 rows"):
        join([{"a": np.zeros(1)}, {"a": np.ones(1)}], [3, 2])
