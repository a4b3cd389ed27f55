"""The mean of updates: that of all samples, the same with ranks in any order, or an error."""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict, namedtuple
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx import Update, merge_updates
from phalanx.errors import ConfigError

pytestmark = pytest.mark.promise("oxirs")

NAN, INF = float("nan"), float("inf")
Pair = namedtuple("Pair", ["left", "right"])


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


def test_weights_take_the_place_of_samples():
    merged = merge_updates(
        [Update(t(3.0), 3.0, samples=5, weight=1), Update(t(0.0), 0.0, samples=5, weight=2)]
    )
    assert merged.gradients.tolist() == [1.0]
    assert (merged.loss, merged.samples, merged.weight) == (1.0, 10, 3)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weighted_products_do_not_overflow(dtype):
    largest = t(torch.finfo(dtype).max, dtype=dtype)
    assert torch.equal(mean_of(largest, largest, weights=(2**62, 2**62)), largest)
    assert torch.equal(mean_of(largest, -largest, weights=(10**6, 10**6)), t(0.0, dtype=dtype))


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
    lambda value: np.array([value, 0.0], dtype=np.float32),
    lambda value: value,
    lambda value: [value, 0.0, value],
    lambda value: (t(value), [np.array([value]), value]),
    lambda value: {"w": t(value), "b": [value, 0.0]},
    lambda value: OrderedDict(w=t(value)),
    lambda value: Pair(t(value), value),
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


def test_inputs_are_left_alone_and_share_no_memory_with_the_mean():
    gradient = torch.nn.Parameter(t(1.0, 2.0, dtype=torch.float64))
    array = np.array([1.0, 2.0])
    merged = mean_of((gradient, array), weights=(1,))
    assert type(merged[0]) is torch.Tensor
    assert not merged[0].requires_grad
    merged[0].add_(1)
    merged[1][...] += 1
    assert (gradient.tolist(), array.tolist()) == ([1.0, 2.0], [1.0, 2.0])


def test_numbers_of_numpy_and_torch_will_do():
    update = Update([1.0], 0.0, np.int64(3), weight=torch.tensor(2.5), rank=np.int32(1))
    assert (update.samples, update.weight, update.rank) == (3, 2.5, 1)
    losses = [torch.tensor(2.0, requires_grad=True), np.float32(4.0), 6, 8]
    merged = merge_updates(iter([Update([1.0], loss, 1) for loss in losses]))
    assert merged.loss == 5.0


def test_an_update_can_be_sent_and_shown():
    update = Update({"w": t(1.0)}, 0.5, 3, rank=2)
    twin = pickle.loads(pickle.dumps(update))
    assert torch.equal(twin.gradients["w"], update.gradients["w"])
    assert repr(twin) == repr(update) == "Update(dict, loss=0.5, samples=3, rank=2)"


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"samples": -1}, "`samples` must be at least 0, but is -1."),
        ({"samples": 1.0}, "`samples` must be a whole number, but is 1.0."),
        ({"weight": NAN}, "`weight` must be a finite number of at least 0"),
        ({"weight": -0.5}, "but is -0.5"),
        ({"weight": "many"}, "but is 'many'"),
        ({"samples": 0, "weight": 2}, "0 where there are no samples, but is 2 for 0 samples."),
        ({"rank": 0.5}, "`rank` must be a whole number, but is 0.5."),
    ],
)
def test_an_update_of_nonsense_is_refused(arguments, words):
    with pytest.raises(ConfigError) as caught:
        Update(**{"gradients": [1.0], "loss": 0.0, "samples": 1, **arguments})
    assert words in str(caught.value)


def u(gradients: Any, loss: Any = 0.0, samples: int = 1) -> Update:
    return Update(gradients, loss, samples)


@pytest.mark.parametrize(
    ("updates", "words"),
    [
        ([], "`updates` must have a weight above 0 together, but all 0 have weight 0."),
        ([u([1.0], samples=0)], "but all 1 have weight 0."),
        ([3], "update 0 is 'int'"),
        ([u([1.0]), u([1.0], NAN)], "`loss` of update 1 must be a finite number, but is nan."),
        ([u([1.0], t(1.0, 2.0))], "`loss` of update 0 must be a finite number"),
        ([u([1.0]), u([1.0, 2.0])], "of update 1 must stand in the same containers as"),
        ([u({"a": t(1.0)}), u({"b": t(1.0)})], "of update 1 must stand in the same containers as"),
        ([u([t(1.0)]), u([t(1.0, 2.0)])], "Gradient `0` of update 1 must be like that of update 0"),
        ([u(t(1.0)), u(1.0)], "Gradient of update 1 must be like"),
        ([u(torch.tensor([1]))], "must be a number, or a tensor or array of a floating dtype"),
        ([u("text")], "but is of type 'str'"),
    ],
)
def test_updates_without_a_mean_are_refused(updates, words):
    with pytest.raises(ConfigError) as caught:
        merge_updates(updates)
    assert words in str(caught.value)


def test_counts_have_no_largest_one():
    merged = merge_updates([Update([1.0], 1.0, 2**62), Update([3.0], 3.0, 2**62)])
    assert (merged.gradients, merged.loss, merged.samples) == ([2.0], 2.0, 2**63)
    assert math.isfinite(merged.loss)
