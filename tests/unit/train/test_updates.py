"""A step over workers of the user's own: samples dealt out, and the mean of their updates."""

from __future__ import annotations

import collections
import dataclasses
from collections import OrderedDict, namedtuple
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx import Update, merge_updates, split_batch
from phalanx.errors import ConfigError

pytestmark = pytest.mark.promise("oxirs")

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


def x(rows: int) -> torch.Tensor:
    return torch.arange(rows * 2.0).reshape(rows, 2)


@pytest.mark.parametrize(
    ("num_samples", "workers", "expected"),
    [
        (7, 3, [[0, 3, 6], [1, 4], [2, 5]]),
        (8, 4, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (2, 4, [[0], [1], [], []]),
        (0, 3, [[], [], []]),
        (5, 1, [[0, 1, 2, 3, 4]]),
    ],
)
def test_samples_are_dealt_out_in_turn(num_samples, workers, expected):
    assert split_batch(list(range(num_samples)), workers) == expected
    parts = split_batch(torch.arange(num_samples), workers)
    assert [part.tolist() for part in parts] == expected


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
def test_every_leaf_of_a_batch_is_cut_alike_and_not_copied(make):
    samples = make()
    parts = split_batch(samples, 3)
    leaves, spec = torch.utils._pytree.tree_flatten(samples)
    for worker, part in enumerate(parts):
        own, own_spec = torch.utils._pytree.tree_flatten(part)
        assert own_spec == spec
        for leaf, whole in zip(own, leaves, strict=True):
            expected = torch.as_tensor(whole)[worker::3]
            assert type(leaf) is type(whole)
            assert torch.equal(torch.as_tensor(leaf), expected)
            leaf[...] = -1  # a view: the whole has it too
    assert all((leaf == -1).all() for leaf in leaves)


def test_more_workers_than_rows_leave_empty_rows_of_the_same_kind():
    parts = split_batch({"x": x(2).half()}, 5)
    assert [part["x"].shape for part in parts] == [(1, 2), (1, 2), (0, 2), (0, 2), (0, 2)]
    assert {part["x"].dtype for part in parts} == {torch.float16}


def test_gradients_go_through_a_split():
    samples = x(5).requires_grad_()
    parts = split_batch(samples, 2)
    sum((1 + index) * part.sum() for index, part in enumerate(parts)).backward()
    assert samples.grad[:, 0].tolist() == [1, 2, 1, 2, 1]


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1, 2], 0), "`n_workers` must be at least 1, but is 0."),
        ((torch.tensor(1.0), 2), "must be a tensor or array with as many rows"),
        (({}, 2), "`samples` must hold a tensor to be cut, but is {}."),
        (({"x": x(3), "y": x(4)}, 2), "Leaf `y` of `samples` must be a tensor or array with"),
        (({"x": x(3), "y": "abc"}, 2), "Leaf `y` of `samples` must be a tensor or array with"),
        (((x(3), torch.tensor(1)), 2), "Leaf `1` of `samples` must be a tensor or array with"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(arguments, words):
    with pytest.raises(ConfigError) as caught:
        split_batch(*arguments)
    assert words in str(caught.value)


NAN, INF = float("nan"), float("inf")


def t(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def mean_of(*gradients: Any, weights: Any) -> Any:
    pairs = zip(gradients, weights, strict=True)
    return merge_updates([Update(each, 0.0, weight) for each, weight in pairs]).gradients


# --- the mean -------------------------------------------------------------------------------------


def test_gradients_and_losses_are_weighted_by_samples():
    merged = merge_updates([Update([4.0, 1.0], 2.0, samples=1), Update([0.0, 5.0], 0.0, samples=3)])
    assert merged.gradients == [1.0, 4.0]
    assert (merged.loss, merged.samples, merged.weight, merged.rank) == (0.5, 4, None, None)
    assert merged.stands_for == 4


finite = st.floats(-1e30, 1e30).map(lambda value: value if abs(value) > 1e-200 else 0.0)
weights = st.one_of(st.integers(1, 2**70), st.floats(1e-30, 1e30))


@given(st.lists(st.tuples(weights, finite), min_size=1, max_size=9))
def test_the_mean_is_within_float64_rounding(pairs):
    merged = merge_updates([Update([value], value, 1, weight=weight) for weight, value in pairs])
    total = sum(Fraction(weight) for weight, _ in pairs)
    exact = sum(Fraction(weight) * Fraction(value) for weight, value in pairs) / total
    bound = 16 * 2.0**-53 * max(abs(value) for _, value in pairs)
    assert abs(Fraction(merged.gradients[0]) - exact) <= bound
    assert abs(Fraction(merged.loss) - exact) <= bound


@given(st.lists(st.tuples(weights, finite), min_size=2, max_size=9), st.data())
def test_with_ranks_any_order_makes_the_same_bits(pairs, data):
    updates = [
        Update([value], value, 1, weight=weight, rank=rank)
        for rank, (weight, value) in enumerate(pairs)
    ]
    expected = merge_updates(updates)
    merged = merge_updates(data.draw(st.permutations(updates)))
    assert (merged.gradients, merged.loss) == (expected.gradients, expected.loss)


def test_merged_updates_can_be_merged_again():
    updates = [
        Update(t(float(value)), value, samples) for value, samples in ((8, 1), (2, 3), (4, 4))
    ]
    step = merge_updates([merge_updates(updates[:2]), updates[2]])
    whole = merge_updates(updates)
    assert torch.equal(step.gradients, whole.gradients)
    assert (step.loss, step.samples) == (whole.loss, whole.samples) == (3.75, 8)


# --- nothing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [None, [], [NAN, NAN], t(NAN), {"other": t(1.0)}])
def test_an_update_of_weight_zero_changes_no_bit(nothing):
    updates = [Update([value, -value], value, 1) for value in (0.1, 0.2, 0.3)]
    expected = merge_updates(updates)
    for place in range(4):
        empty = Update(nothing, NAN, samples=0)
        merged = merge_updates([*updates[:place], empty, *updates[place:]])
        assert merged.gradients == expected.gradients
        assert (merged.loss, merged.samples) == (expected.loss, 3)


def test_samples_of_weight_zero_are_counted_as_samples():
    merged = merge_updates([Update(t(NAN), INF, 4, weight=0), Update(t(2.0), 2.0, 3, weight=0.5)])
    assert (merged.gradients.tolist(), merged.loss) == ([2.0], 2.0)
    assert (merged.samples, merged.weight) == (7, 0.5)


def test_a_gradient_of_none_is_zero():
    merged = merge_updates(
        [Update([None, t(2.0), None], 0.0, 1), Update([t(4.0), None, None], 0.0, 3)]
    )
    assert [merged.gradients[0].tolist(), merged.gradients[1].tolist()] == [[3.0], [0.5]]
    assert merged.gradients[2] is None


def test_a_nan_in_a_gradient_is_seen_in_the_merged_one():
    merged = mean_of(t(NAN, 1.0, INF), t(1.0, 1.0, 1.0), weights=(1, 1))
    assert merged.isnan().tolist() == [True, False, False]
    assert merged.isinf().tolist() == [False, False, True]


# --- containers -----------------------------------------------------------------------------------

TREES = [
    lambda value: t(value, 0.0),
    lambda value: torch.tensor(value),
    lambda value: value,
    lambda value: [value, 0.0, value],
    lambda value: (t(value), [t(value), value]),
    lambda value: {"w": t(value), "b": [value, 0.0]},
    lambda value: OrderedDict(w=t(value)),
    lambda value: [],
    lambda value: t(),
]


@pytest.mark.parametrize("make", TREES)
def test_the_mean_stands_in_the_same_containers(make):
    merged, expected = mean_of(make(8.0), make(4.0), weights=(3, 1)), make(7.0)
    own, spec = torch.utils._pytree.tree_flatten(merged)
    want, wanted_spec = torch.utils._pytree.tree_flatten(expected)
    assert spec == wanted_spec
    for leaf, other in zip(own, want, strict=True):
        assert type(leaf) is type(other)
        assert getattr(leaf, "dtype", None) == getattr(other, "dtype", None)
        assert np.array_equal(np.asarray(leaf), np.asarray(other))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes_stay(dtype):
    merged = mean_of(t(1.0, dtype=dtype), t(4.0, dtype=dtype), weights=(2, 1))
    assert merged.dtype == dtype
    assert merged.tolist() == [2.0]


def test_numbers_of_numpy_and_torch_will_do():
    update = Update([1.0], 0.0, np.int64(3), weight=torch.tensor(2.5), rank=np.int32(1))
    assert (update.samples, update.weight, update.rank) == (3, 2.5, 1)
    losses = [torch.tensor(2.0, requires_grad=True), np.float32(4.0), 6, 8]
    merged = merge_updates(iter([Update([1.0], loss, 1) for loss in losses]))
    assert merged.loss == 5.0


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"samples": -1}, "`samples` must be at least 0, but is -1."),
        ({"samples": 1.0}, "`samples` must be a whole number, but is 1.0."),
        ({"weight": NAN}, "`weight` must be a finite number of at least 0"),
        ({"weight": -0.5}, "but is -0.5"),
        ({"samples": 0, "weight": 2}, "0 where there are no samples, but is 2 for 0 samples."),
        ({"rank": 0.5}, "`rank` must be a whole number, but is 0.5."),
    ],
)
def test_an_update_of_nonsense_is_refused(arguments, words):
    with pytest.raises(ConfigError) as caught:
        Update(**{"gradients": [1.0], "loss": 0.0, "samples": 1, **arguments})
    assert words in str(caught.value)


def u(gradients: Any, loss: Any = 0.0) -> Update:
    return Update(gradients, loss, 1)


@pytest.mark.parametrize(
    ("updates", "words"),
    [
        ([], "`updates` must have a weight above 0 together, but all 0 have weight 0."),
        (
            [u([1.0]), u([1.0], NAN)],
            "`loss` of update 1 must be a finite number, but is nan.",
        ),
        ([u([1.0]), u([1.0, 2.0])], "of update 1 must stand in the same containers as"),
        (
            [u({"a": t(1.0)}), u({"b": t(1.0)})],
            "of update 1 must stand in the same containers as",
        ),
        (
            [u([t(1.0)]), u([t(1.0, 2.0)])],
            "Gradient `0` must be a number, or a tensor of one",
        ),
        ([u(t(1.0)), u(1.0)], "torch.float32, on cpu and a float."),
        ([u(torch.tensor([1]))], "but is a tensor of shape (1,), torch.int64"),
        ([u("text")], "but is of type 'str'"),
    ],
)
def test_updates_without_a_mean_are_refused(updates, words):
    with pytest.raises(ConfigError) as caught:
        merge_updates(updates)
    assert words in str(caught.value)
