"""The mean of updates: exact where it can be, the same in any order, refused if it has no sense."""

from __future__ import annotations

import itertools
import math
import pickle
from collections import OrderedDict, UserDict, namedtuple
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import phalanx
from phalanx import Update, merge_updates
from phalanx.errors import ConfigError
from phalanx.plan import Node, SummationTree

pytestmark = pytest.mark.promise("oxirs")

NAN, INF = float("nan"), float("inf")
FLOAT32_MAX = torch.finfo(torch.float32).max
Pair = namedtuple("Pair", ["left", "right"])


def t(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def exact_mean(pairs: list[tuple[Any, Any]]) -> Fraction:
    """Return the mean of (weight, value) pairs without any rounding."""
    total = sum(Fraction(weight) for weight, _ in pairs)
    return sum(Fraction(weight) * Fraction(value) for weight, value in pairs) / total


def mean_of(*gradients: Any, weights: Any) -> Any:
    pairs = zip(gradients, weights, strict=True)
    return merge_updates([Update(each, 0.0, weight) for each, weight in pairs]).gradients


# --- what the mean is -----------------------------------------------------------------------------


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
    part = merge_updates([Update(t(3.0), 3.0, 5, weight=0.5), Update(t(0.0), 0.0, 1)])
    assert (part.gradients.tolist(), part.weight) == ([1.0], 1.5)


def test_a_single_update_comes_back_to_the_bit():
    gradient = torch.randn(100, dtype=torch.float64) * 10.0 ** torch.randint(-300, 300, (100,))
    for weight in (1, 3, 7, 0.1, 2**62 + 1):
        merged = merge_updates([Update(gradient, 0.1, 3, weight=weight)])
        assert torch.equal(merged.gradients, gradient)
        assert (merged.loss, merged.samples, merged.weight) == (0.1, 3, weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weights", [(1, 1, 1), (3, 7, 13), (0.1, 0.2, 0.7), (2**62, 1, 3**50)])
def test_the_mean_of_equal_gradients_is_that_gradient(dtype, weights):
    gradient = torch.randn(50).to(dtype)
    assert torch.equal(mean_of(*[gradient] * 3, weights=[7] * 3), gradient)
    updates = [Update(gradient, 0.3, 1, weight=weight) for weight in weights]
    merged = merge_updates(updates)
    assert torch.equal(merged.gradients, gradient)
    assert merged.loss == 0.3


@given(
    st.lists(
        st.tuples(st.integers(0, 2**20), st.integers(-(2**20), 2**20)), min_size=1, max_size=9
    ).filter(lambda pairs: any(weight for weight, _ in pairs))
)
def test_with_counts_and_small_whole_gradients_only_the_division_rounds(pairs):
    updates = [Update([float(value)], value, weight) for weight, value in pairs]
    merged = merge_updates(updates)
    assert merged.gradients == [float(exact_mean(pairs))]
    assert merged.loss == float(exact_mean(pairs))
    assert merged.samples == sum(weight for weight, _ in pairs)


finite = st.floats(-1e30, 1e30).map(lambda value: value if abs(value) > 1e-200 else 0.0)
weights = st.one_of(
    st.integers(1, 2**70),
    st.floats(1e-30, 1e30),
    st.fractions(Fraction(1, 10**6), 10**6, max_denominator=10**6),
)


@given(st.lists(st.tuples(weights, finite), min_size=1, max_size=9), st.data())
def test_in_any_order_the_mean_is_within_rounding_and_the_loss_the_same_bits(pairs, data):
    order = data.draw(st.permutations(pairs))
    there, here = (
        merge_updates([Update([value], value, 1, weight=weight) for weight, value in each])
        for each in (pairs, order)
    )
    exact = exact_mean(pairs)
    assert here.loss == there.loss == float(exact)
    # Each term is rounded as it is scaled and multiplied, each sum at most ⌈log₂ 9⌉ = 4 times, and
    # the division once more.
    bound = (4 + 4) * 2.0**-53 * max(abs(value) for _, value in pairs)
    for merged in (here, there):
        assert abs(Fraction(merged.gradients[0]) - exact) <= bound
    two_orders = 2 * (math.ceil(math.log2(len(pairs))) + 1) * 2.0**-53
    apart = abs(here.gradients[0] - there.gradients[0])
    assert apart <= two_orders * max(abs(value) for _, value in pairs)
    assert here.weight == there.weight


@given(st.lists(st.tuples(weights, finite), min_size=2, max_size=9), st.data())
def test_with_ranks_any_order_makes_the_same_bits(pairs, data):
    updates = [
        Update([value], value, 1, weight=weight, rank=rank)
        for rank, (weight, value) in enumerate(pairs)
    ]
    expected = merge_updates(updates)
    merged = merge_updates(data.draw(st.permutations(updates)))
    assert merged.gradients == expected.gradients
    assert merged.loss == expected.loss


def test_without_ranks_the_order_may_show_in_the_last_bit():
    # So that the test above is known to prove something.
    gradients = [[0.1], [0.2], [0.3]]
    results = {mean_of(*each, weights=(1, 1, 1))[0] for each in itertools.permutations(gradients)}
    assert len(results) == 2


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 11])
def test_sums_follow_the_tree_of_the_plan(count):
    gradients = torch.randn(count, 64, dtype=torch.float64)
    power = 1 << (count - 1).bit_length()
    partial = {Node(0, index): gradients[index] / power for index in range(count)}
    tree = SummationTree(count)
    for level in range(tree.root.level):
        for index in range(tree.width(level)):
            node = Node(level, index)
            if index % 2 == 0:
                partial[tree.parent(node)] = partial[node]
            else:
                partial[tree.parent(node)] = partial[tree.parent(node)] + partial[node]
    assert torch.equal(
        mean_of(*gradients, weights=[1] * count), partial[tree.root] / (count / power)
    )


@given(
    st.lists(st.tuples(st.integers(1, 99), finite), min_size=1, max_size=6), st.integers(2, 2**64)
)
def test_only_proportions_of_weights_count(pairs, factor):
    plain = merge_updates([Update([value], value, weight) for weight, value in pairs])
    many = merge_updates([Update([value], value, weight * factor) for weight, value in pairs])
    assert many.gradients == plain.gradients
    assert many.loss == plain.loss
    assert many.samples == plain.samples * factor


def test_merged_updates_can_be_merged_again():
    updates = [
        Update(t(float(value)), value, samples) for value, samples in ((8, 1), (2, 3), (4, 4))
    ]
    step = merge_updates([merge_updates(updates[:2]), updates[2]])
    whole = merge_updates(updates)
    assert torch.equal(step.gradients, whole.gradients)
    assert (step.loss, step.samples) == (whole.loss, whole.samples) == (3.75, 8)


# --- large numbers --------------------------------------------------------------------------------


def test_counts_have_no_largest_one():
    merged = merge_updates([Update([1.0], 1.0, 2**62), Update([3.0], 3.0, 2**62)])
    assert (merged.gradients, merged.loss, merged.samples) == ([2.0], 2.0, 2**63)
    merged = merge_updates([Update(t(1.0), 1.0, 10**400), Update(t(3.0), 3.0, 3 * 10**400)])
    assert (merged.gradients.tolist(), merged.loss) == ([2.5], 2.5)
    assert merged.samples == 4 * 10**400
    fits = 2**32 - 1  # twice this is no u32
    assert merge_updates([Update([1.0], 1.0, fits), Update([2.0], 2.0, fits)]).gradients == [1.5]


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        (torch.float16, 65504.0),
        (torch.bfloat16, torch.finfo(torch.bfloat16).max),
        (torch.float32, FLOAT32_MAX),
        (torch.float64, torch.finfo(torch.float64).max / 2),
    ],
)
def test_weighted_products_overflow_no_dtype(dtype, largest):
    high, low = t(largest, dtype=dtype), t(-largest, dtype=dtype)
    assert torch.equal(mean_of(high, high, weights=(2**62, 2**62)), high)
    assert mean_of(high, low, high, weights=(10**6, 10**6, 1)).isfinite().all()
    assert torch.equal(mean_of(high, low, weights=(10**6, 10**6)), t(0.0, dtype=dtype))


def test_float_weights_may_be_as_large_as_floats():
    updates = [Update([value], value, 1, weight=1.7e308) for value in (1.0, 2.0, 3.0)]
    merged = merge_updates(updates)
    assert (merged.gradients, merged.loss) == ([2.0], 2.0)
    assert merged.weight == 3 * Fraction(1.7e308)
    again = merge_updates([merged, Update([0.0], 0.0, 1, weight=0.5)])
    assert again.weight == 3 * Fraction(1.7e308) + Fraction(1, 2)


def test_weights_are_added_without_rounding():
    merged = merge_updates([Update([0.0], 0.0, 1, weight=each) for each in (1e16, 1.0, 1.0)])
    assert merged.weight == 10**16 + 2
    merged = merge_updates([Update([0.0], 0.0, 1, weight=Fraction(1, 3)) for _ in range(3)])
    assert merged.weight == 1


# --- nothing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [None, [], [NAN, NAN], [1.0], t(NAN), {"other": t(1.0)}])
def test_an_update_that_stands_for_nothing_changes_no_bit(nothing):
    updates = [Update([value, -value], value, 1) for value in (0.1, 0.2, 0.3)]
    expected = merge_updates(updates)
    empty = Update(nothing, NAN, samples=0)
    for place in range(4):
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
    assert merge_updates([Update(None, 1.0, 1), Update(None, 2.0, 1)]).gradients is None


def test_a_nan_in_a_gradient_is_seen_in_the_merged_one():
    merged = mean_of(t(NAN, 1.0, INF), t(1.0, 1.0, 1.0), weights=(1, 1))
    assert merged.isnan().tolist() == [True, False, False]
    assert merged.isinf().tolist() == [False, False, True]


@pytest.mark.filterwarnings("error")
def test_arrays_are_as_quiet_as_tensors():
    assert np.isnan(mean_of(np.array([INF]), np.array([-INF]), weights=(1, 1))).all()


# --- containers -----------------------------------------------------------------------------------

TREES = [
    lambda value: t(value, 0.0),
    lambda value: torch.tensor(value),
    lambda value: np.array([value, 0.0], dtype=np.float32),
    lambda value: np.array(value),
    lambda value: value,
    lambda value: [value, 0.0, int(value)],
    lambda value: (value, 0.0),
    lambda value: [t(value), t(0.0).reshape(1, 1)],
    lambda value: (t(value), [np.array([value]), value]),
    lambda value: {"w": t(value), "b": [value, 0.0]},
    lambda value: OrderedDict(w=t(value)),
    lambda value: Pair(t(value), value),
    lambda value: [],
    lambda value: {},
    lambda value: t(),
]


@pytest.mark.parametrize("make", TREES)
def test_the_mean_stands_in_the_same_containers(make):
    merged = mean_of(make(8.0), make(4.0), weights=(3, 1))
    expected = make(7.0)
    kind = dict if isinstance(expected, dict) else type(expected)
    assert type(merged) is kind
    own, spec = torch.utils._pytree.tree_flatten(merged)
    want, _ = torch.utils._pytree.tree_flatten(kind(expected) if kind is dict else expected)
    assert torch.utils._pytree.tree_structure(kind(expected) if kind is dict else expected) == spec
    for leaf, other in zip(own, want, strict=True):
        assert type(leaf) is (float if isinstance(other, int) else type(other))
        if not isinstance(leaf, float):
            assert leaf.dtype == other.dtype
            assert leaf.shape == other.shape
        assert np.array_equal(np.asarray(leaf), np.asarray(other))


def test_keys_of_dicts_may_come_in_another_order():
    merged = mean_of(
        {"a": t(1.0), "deep": {"b": 2.0, "c": 3.0}},
        {"deep": {"c": 5.0, "b": 4.0}, "a": t(3.0)},
        weights=(1, 1),
    )
    assert list(merged) == ["a", "deep"]
    assert (merged["a"].tolist(), merged["deep"]) == ([2.0], {"b": 3.0, "c": 4.0})
    assert mean_of(UserDict(a=1.0), {"a": 2.0}, weights=(1, 1)) == {"a": 1.5}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ],
)
def test_dtypes_stay(dtype):
    merged = mean_of(t(1.0, dtype=dtype), t(4.0, dtype=dtype), weights=(2, 1))
    assert merged.dtype == dtype
    assert merged.tolist() == [2.0]


def test_inputs_are_left_alone_and_share_no_memory_with_the_mean():
    gradients = [
        torch.nn.Parameter(t(1.0, 2.0, dtype=torch.float64)),
        torch.nn.Parameter(t(3.0, 4.0, dtype=torch.float64)),
    ]
    arrays = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    for array in arrays:
        array.flags.writeable = False
    for count in (1, 2):
        pairs = list(zip(gradients, arrays, strict=True))[:count]
        merged = mean_of(*pairs, weights=(1,) * count)
        assert type(merged[0]) is torch.Tensor
        assert not merged[0].requires_grad
        merged[0].add_(1)
        merged[1][...] += 1
    assert [each.tolist() for each in gradients] == [[1.0, 2.0], [3.0, 4.0]]
    assert [each.tolist() for each in arrays] == [[1.0, 2.0], [3.0, 4.0]]


def test_losses_may_be_tensors():
    losses = [torch.tensor(2.0, requires_grad=True), np.float32(4.0), np.array([6.0]), 8]
    merged = merge_updates([Update([1.0], loss, 1) for loss in losses])
    assert merged.loss == 5.0
    assert type(merged.loss) is float


def test_counts_may_be_numbers_of_numpy_and_torch():
    update = Update([1.0], 0.0, np.int64(3), weight=torch.tensor(2.5), rank=np.int32(1))
    assert (update.samples, update.weight, update.rank) == (3, 2.5, 1)
    assert (type(update.samples), type(update.weight), type(update.rank)) == (int, float, int)


def test_an_update_can_be_sent_and_shown():
    update = Update({"w": t(1.0)}, 0.5, 3, rank=2)
    twin = pickle.loads(pickle.dumps(update))
    assert torch.equal(twin.gradients["w"], update.gradients["w"])
    assert repr(twin) == repr(update) == "Update(dict, loss=0.5, samples=3, rank=2)"
    assert update != twin
    assert len({update, twin}) == 2


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"samples": -1}, "`samples` must be at least 0, but is -1."),
        ({"samples": 1.0}, "`samples` must be a whole number, but is 1.0."),
        ({"samples": NAN}, "`samples` must be a whole number, but is nan."),
        ({"samples": None}, "`samples` must be a whole number, but is None."),
        ({"weight": NAN}, "`weight` must be a finite number of at least 0, but is nan."),
        ({"weight": INF}, "but is inf."),
        ({"weight": -0.5}, "but is -0.5."),
        ({"weight": -(10**400)}, "but is -1000"),
        ({"weight": Fraction(-1, 3)}, "but is Fraction(-1, 3)."),
        ({"weight": "3"}, "but is '3'."),
        ({"weight": 1j}, "but is 1j."),
        ({"weight": [1.0, 2.0]}, "but is [1.0, 2.0]."),
        ({"samples": 0, "weight": 2}, "`weight` must be 0 where `samples` is 0, but is 2."),
        ({"rank": 0.5}, "`rank` must be a whole number, but is 0.5."),
    ],
)
def test_an_update_of_nonsense_is_refused(arguments, words):
    with pytest.raises(ConfigError) as caught:
        Update(**{"gradients": [1.0], "loss": 0.0, "samples": 1, **arguments})
    assert words in str(caught.value)


def u(gradients: Any, loss: Any = 0.0, samples: int = 1, **options: Any) -> Update:
    return Update(gradients, loss, samples, **options)


def test_nothing_is_computed_before_all_is_checked(monkeypatch):
    monkeypatch.setattr("phalanx.train.merge._means", pytest.fail)
    with pytest.raises(ConfigError):
        merge_updates([u([t(1.0), t(1.0)]), u([t(1.0), t(1.0, 2.0)])])
    with pytest.raises(ConfigError):
        merge_updates([u([t(1.0)]), u([t(1.0)], NAN)])


def test_an_iterator_of_updates_will_do():
    assert merge_updates(iter([u([1.0]), u([3.0])])).gradients == [2.0]


def test_these_are_public_names():
    assert (phalanx.Update, phalanx.merge_updates) == (Update, merge_updates)
    assert {"Update", "merge_updates"} <= set(phalanx.__all__)
