"""The arguments of a call as one nested value, there and back."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest

from phalanx.parallel.call import Call

Pair = namedtuple("Pair", ["left", "right"])
PAIR = Pair(1, 2)

TABLE: list[tuple[list[Any], dict[str, Any], dict[str, Any]]] = [
    ([], {}, {}),
    ([5], {}, {"0": 5}),
    ([5, [6]], {}, {"0": 5, "1": [6]}),
    ([], {"mask": 7}, {"mask": 7}),
    ([5, None], {"mask": 7, "a": 8}, {"0": 5, "1": None, "mask": 7, "a": 8}),
    ([(1, 2)], {}, {"0": (1, 2)}),
]


@pytest.mark.parametrize(("args", "kwargs", "leaves"), TABLE)
def test_positions_go_by_number_and_keywords_by_name(
    args: list[Any], kwargs: dict[str, Any], leaves: dict[str, Any]
) -> None:
    call = Call(args, kwargs)
    assert call.leaves == leaves
    assert list(call.leaves) == list(leaves)  # positions first, in order
    assert call.num_args == len(args)


@pytest.mark.parametrize(("args", "kwargs", "leaves"), TABLE)
def test_values_of_the_same_places_are_a_call_again(
    args: list[Any], kwargs: dict[str, Any], leaves: dict[str, Any]
) -> None:
    call = Call(args, kwargs)
    assert call.split(call.leaves) == (args, kwargs)
    other = {name: (name, "part") for name in leaves}
    own_args, own_kwargs = call.split(other)
    assert own_args == [(str(place), "part") for place in range(len(args))]
    assert own_kwargs == {name: (name, "part") for name in kwargs}
    assert list(own_kwargs) == list(kwargs)


def test_many_positions_stay_in_order() -> None:
    call = Call(range(12), {})
    assert call.split(call.leaves)[0] == list(range(12))


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        (5, [5], {}),
        (None, [None], {}),
        ((5, 6), [5, 6], {}),
        ((5,), [5], {}),
        ((), [], {}),
        ([5, 6], [[5, 6]], {}),  # a list is one argument, as a batch of several tensors often is
        (PAIR, [PAIR], {}),  # a named tuple is a value of the user's
        ({"x": 5, "y": 6}, [], {"x": 5, "y": 6}),
        (OrderedDict(y=6, x=5), [], {"y": 6, "x": 5}),
        ({}, [], {}),
    ],
    ids=repr,
)
def test_inputs_of_a_loss_are_read_as_the_users_call(
    inputs: Any, args: list[Any], kwargs: dict[str, Any]
) -> None:
    call = Call.with_inputs(inputs)
    assert call.split(call.leaves) == (args, kwargs)
