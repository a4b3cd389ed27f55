"""Who gets which samples, as tables; what cannot be dealt out is named."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx import split_batch
from phalanx.errors import ConfigError
from phalanx.plan import equal_sizes, workload_sizes

pytestmark = pytest.mark.promise("oxirs")

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


class Readings:
    """A map-style data set: a length, and one sample per index, but no slices."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        assert isinstance(index, int)
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        return torch.tensor([float(index)]), index


def x(rows: int) -> torch.Tensor:
    return torch.arange(rows * 2.0).reshape(rows, 2)


@pytest.mark.parametrize(
    ("num_samples", "workers", "strategy", "expected"),
    [
        (7, 3, "round_robin", [[0, 3, 6], [1, 4], [2, 5]]),
        (7, 3, "contiguous", [[0, 1, 2], [3, 4], [5, 6]]),
        (7, 3, [2, 1, 0], [[0, 1, 2, 3, 4], [5, 6], []]),
        (7, 3, (0, 0.5, 0.5), [[], [0, 1, 2, 3], [4, 5, 6]]),
        (7, 3, torch.tensor([2, 1, 0]), [[0, 1, 2, 3, 4], [5, 6], []]),
        (7, 3, np.array([2.0, 1.0, 0.0]), [[0, 1, 2, 3, 4], [5, 6], []]),
        (8, 4, "round_robin", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (2, 4, "round_robin", [[0], [1], [], []]),
        (2, 4, "contiguous", [[0], [1], [], []]),
        (2, 4, [1, 1, 1, 1], [[0], [1], [], []]),
        (0, 3, "round_robin", [[], [], []]),
        (0, 3, "contiguous", [[], [], []]),
        (0, 3, [1, 2, 3], [[], [], []]),
        (5, 1, "round_robin", [[0, 1, 2, 3, 4]]),
    ],
)
def test_every_strategy_gives_these_samples(num_samples, workers, strategy, expected):
    samples = list(range(num_samples))
    assert split_batch(samples, workers, strategy) == expected
    assert [
        part.tolist() for part in split_batch(torch.arange(num_samples), workers, strategy)
    ] == (expected)


@given(
    num_samples=st.integers(0, 40),
    workloads=st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any),
)
def test_all_strategies_are_the_plans(num_samples, workloads):
    samples, workers = list(range(num_samples)), len(workloads)
    assert split_batch(samples, workers) == [samples[w::workers] for w in range(workers)]
    for strategy, sizes in (
        ("contiguous", equal_sizes(num_samples, workers)),
        (workloads, workload_sizes(num_samples, workloads)),
    ):
        parts = split_batch(samples, workers, strategy)
        assert [len(part) for part in parts] == sizes
        assert list(itertools.chain(*parts)) == samples


@pytest.mark.parametrize("strategy", ["round_robin", "contiguous", [3, 1, 2]])
@pytest.mark.parametrize(
    "make",
    [
        lambda: x(7),
        lambda: x(7).numpy(),
        lambda: {"x": x(7), "y": torch.arange(7)},
        lambda: OrderedDict(x=x(7), deep={"y": [torch.arange(7), torch.ones(7, 1, 3)]}),
        lambda: (x(7), torch.arange(7)),
        lambda: [x(7), {"y": np.arange(7)}],
        lambda: Pair(x(7), torch.arange(7)),
        lambda: Batch(x(7), torch.arange(7)),
    ],
)
def test_every_leaf_of_a_batch_is_cut_alike_and_not_copied(make, strategy):
    samples = make()
    parts = split_batch(samples, 3, strategy)
    leaves, spec = torch.utils._pytree.tree_flatten(samples)
    for worker, part in enumerate(parts):
        own, own_spec = torch.utils._pytree.tree_flatten(part)
        assert own_spec == spec
        for leaf, whole in zip(own, leaves, strict=True):
            expected = torch.as_tensor(whole)[split_batch(list(range(7)), 3, strategy)[worker]]
            assert type(leaf) is type(whole)
            assert torch.equal(torch.as_tensor(leaf), expected)
            leaf[...] = -1  # a view: the whole has it too
    assert all((leaf == -1).all() for leaf in leaves)


def test_more_workers_than_rows_leave_empty_rows_of_the_same_kind():
    parts = split_batch({"x": x(2).half()}, 5)
    assert [part["x"].shape for part in parts] == [(1, 2), (1, 2), (0, 2), (0, 2), (0, 2)]
    assert {part["x"].dtype for part in parts} == {torch.float16}


def test_a_mapping_of_another_class_is_a_batch_too():
    parts = split_batch(UserDict(x=x(3)), 2)
    assert [part["x"].tolist() for part in parts] == [x(3)[::2].tolist(), x(3)[1::2].tolist()]


@pytest.mark.parametrize("strategy", ["round_robin", "contiguous", [1, 2]])
def test_gradients_go_through_a_split(strategy):
    samples = x(5).requires_grad_()
    parts = split_batch(samples, 2, strategy)
    sum((1 + index) * part.sum() for index, part in enumerate(parts)).backward()
    owners = [0] * 5
    for worker, indices in enumerate(split_batch(list(range(5)), 2, strategy)):
        for index in indices:
            owners[index] = 1 + worker
    assert samples.grad[:, 0].tolist() == owners


@pytest.mark.parametrize(
    ("samples", "parts"),
    [
        (["a", "b", "c"], [["a", "c"], ["b"]]),
        (("a", "b", "c"), [("a", "c"), ("b",)]),
        (range(3), [range(0, 3, 2), range(1, 3, 2)]),
        ("abc", [["a", "c"], ["b"]]),
        (collections.deque("abc"), [["a", "c"], ["b"]]),
        ([("x", 1), ("y", 2), ("z", 3)], [[("x", 1), ("z", 3)], [("y", 2)]]),
        ([{"id": 1}, {"id": 2}], [[{"id": 1}], [{"id": 2}]]),
        ([], [[], []]),
        ((), [(), ()]),
    ],
)
def test_any_sequence_is_dealt_out(samples, parts):
    assert split_batch(samples, 2) == parts


def test_samples_are_the_same_objects():
    samples = [object() for _ in range(5)]
    first, second = split_batch(samples, 2)
    assert [id(each) for each in first] == [id(each) for each in samples[::2]]
    assert [id(each) for each in second] == [id(each) for each in samples[1::2]]


def test_a_data_set_that_knows_no_slices_is_dealt_out():
    parts = split_batch(Readings(5), 2)
    assert [[label for _, label in part] for part in parts] == [[0, 2, 4], [1, 3]]
    parts = split_batch(Readings(5), 2, [1, 4])
    assert [[label for _, label in part] for part in parts] == [[0], [1, 2, 3, 4]]


def refusal(call: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1, 2], 0), "`n_workers` must be at least 1, but is 0."),
        (([1, 2], -3), "but is -3."),
        (([1, 2], 1.5), "`n_workers` must be a whole number, but is 1.5."),
        (([1, 2], 2, "random"), "`strategy` must be 'round_robin', 'contiguous' or one workload"),
        (([1, 2], 2, [1]), "`workloads` must hold one share per device (2), but holds 1."),
        (([1, 2], 2, [1, "a"]), "`workloads` must hold one share"),
        (([1, 2], 2, [0, 0]), "at least one share above 0"),
        ((torch.tensor(1.0), 2), "of some rows along dim 0, but is 'Tensor'."),
        (({}, 2), "`samples` must hold a tensor to be cut, but is {}."),
        (({"x": x(3), "y": x(4)}, 2), "Leaf `y` of `samples` must be a tensor or array of 3 rows"),
        (({"x": x(3), "y": "abc"}, 2), "Leaf `y` of `samples` must be a tensor or array of 3 rows"),
        (((x(3), torch.tensor(1)), 2), "Leaf `1` of `samples` must be a tensor or array of 3"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(arguments, words):
    assert words in refusal(lambda: split_batch(*arguments))
