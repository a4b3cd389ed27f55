"""Every rule of merging on every kind of leaf, as tables; what cannot be merged is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.plan import Merging

NAN = float("nan")


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def s(value: complex) -> Tensor:
    return torch.tensor(value)


def same(left: Any, right: Any) -> bool:
    if isinstance(right, Tensor):
        return isinstance(left, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in right)
    if isinstance(right, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(right):
        return type(left) is type(right) and same(vars(left), vars(right))
    return left is right or left == right


NO_RULES = "|median|CAT|cat(|cat(1|cat 1|cat(1.5)|cat(a)|cat(1, 2)|cat(--1)|mean(0)|sum(1)|stack(1)"
NO_RULES += "|first(0)|per_replica(2)|cats|sum,mean"


@pytest.mark.parametrize("text", NO_RULES.split("|"))
def test_a_text_that_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="`output` must hold rules out of"):
        Merging({"y": text})


# --- one leaf -------------------------------------------------------------------------------------

ROWS = [t(0, 1, 2), t(3, 4), t(5)]
WIDE = [torch.arange(4.0).view(2, 2), torch.arange(4.0, 6.0).view(2, 1)]

ONE_LEAF = [
    (None, ROWS, [3, 2, 1], t(0, 1, 2, 3, 4, 5)),
    ("cat", ROWS, [3, 2, 1], t(0, 1, 2, 3, 4, 5)),
    ("cat(0)", ROWS, [3, 2, 1], t(0, 1, 2, 3, 4, 5)),
    ("cat(-1)", ROWS, [3, 2, 1], t(0, 1, 2, 3, 4, 5)),
    ("cat", ROWS, [9, 9, 9], t(0, 1, 2, 3, 4, 5)),  # a rule of the user's does not count rows
    ("cat(1)", WIDE, [2, 1], torch.tensor([[0.0, 1.0, 4.0], [2.0, 3.0, 5.0]])),
    ("cat(-1)", WIDE, [2, 1], torch.tensor([[0.0, 1.0, 4.0], [2.0, 3.0, 5.0]])),
    (None, [s(1), s(2), s(3)], [3, 2, 1], torch.tensor([1, 2, 3])),
    (None, [s(7.0)], [3], t(7)),  # a vector of one, whatever the number of parts
    ("stack", [s(1.0), s(2.0)], [3, 2], t(1, 2)),
    ("stack", [t(1, 2), t(3, 4)], [1, 1], torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
    ("stack", [t(1, 2)], [1], torch.tensor([[1.0, 2.0]])),
    ("mean", [s(1.0), s(4.0)], [2, 1], s(2.0)),
    ("mean", [t(1, 2), t(4, 8)], [2, 1], t(2, 4)),
    ("mean", [s(2.0), s(4.0)], [0, 0], s(3.0)),  # nobody has rows: all count the same
    ("mean", [s(5.0)], [3], s(5.0)),
    ("mean", [s(2 + 2j), s(4 + 0j)], [1, 1], s(3 + 1j)),
    ("sum", [s(1.0), s(4.0), s(0.5)], [2, 1, 1], s(5.5)),
    ("sum", [s(1), s(4)], [2, 1], s(5)),
    ("sum", [t(1, 2), t(4, 8)], [2, 1], t(5, 10)),
    ("sum", [s(5)], [3], s(5)),
    ("first", ROWS, [3, 2, 1], t(0, 1, 2)),
    ("first", [t(1), s(2.0)], [1, 1], t(1)),  # what the others have does not matter
    ("first", ["a", t(1)], [1, 1], "a"),
    (None, ["a", "b"], [1, 1], "a"),
    (None, [3, 4], [1, 1], 3),
    (None, [None, None], [1, 1], None),
    ("per_replica", ROWS, [3, 2, 1], ROWS),
    ("per_replica", [s(5.0)], [3], [s(5.0)]),
    ("per_replica", ["a", None], [1, 1], ["a", None]),
]


@pytest.mark.parametrize(("rule", "parts", "sizes", "merged"), ONE_LEAF)
def test_one_leaf(rule: str | None, parts: list[Any], sizes: list[int], merged: Any) -> None:
    assert same(Merging(rule).merge(parts, sizes), merged)


def test_a_part_without_rows_brings_no_nan_into_a_mean() -> None:
    """The mean over no rows is NaN, and weighs nothing."""
    assert same(Merging("mean").merge([s(2.0), s(NAN), s(5.0)], [2, 0, 1]), s(3.0))


def test_sums_are_taken_in_the_order_of_the_parts() -> None:
    huge, tiny = 2.0**24, 1.0  # float32: huge + tiny == huge
    parts = [s(huge), s(tiny), s(tiny), s(-huge)]
    assert Merging("sum").merge(parts, [1] * 4).item() == 0.0
    assert Merging("sum").merge(parts[1:3] + parts[:1] + parts[3:], [1] * 4).item() == 2.0


# --- structures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "scores", "loss", "deep"),
    [
        ({}, t(1, 2, 3), t(1, 4), t(5, 6, 7)),
        ({"loss": "mean"}, t(1, 2, 3), s(2.0), t(5, 6, 7)),
        ({"aux": "per_replica"}, t(1, 2, 3), t(1, 4), [t(5, 6), t(7)]),
        ({"aux.1": "first"}, t(1, 2, 3), t(1, 4), t(5, 6)),
        ({"aux": "first", "aux.1.x": "cat"}, t(1, 2, 3), t(1, 4), t(5, 6, 7)),
        ({"aux": "sum", "loss": "sum", "aux.1": "first"}, t(1, 2, 3), s(5.0), t(5, 6)),
    ],
)
def test_a_path_covers_what_is_below_it_and_yields_to_a_longer_one(
    rules: dict[str, Any], scores: Any, loss: Any, deep: Any
) -> None:
    parts = [
        {"scores": t(1, 2), "loss": s(1.0), "aux": [s(1.0), {"x": t(5, 6)}]},
        {"scores": t(3), "loss": s(4.0), "aux": [s(1.0), {"x": t(7)}]},
    ]
    merged = Merging(rules).merge(parts, [2, 1])
    assert same(merged["scores"], scores)
    assert same(merged["loss"], loss)
    assert same(merged["aux"][1]["x"], deep)


def test_a_rule_for_a_leaf_that_is_missing_is_ignored() -> None:
    """As the loss of a model that returns one only where it is given labels."""
    parts = [{"y": s(2.0)}, {"y": s(5.0)}]
    assert same(Merging({"loss": "mean", "y": "sum"}).merge(parts, [2, 1]), {"y": s(7.0)})


# --- refusals -------------------------------------------------------------------------------------


def test_without_a_rule_the_merging_dim_counts() -> None:
    parts = [torch.zeros(3, 2), torch.ones(3, 1)]
    assert Merging(dim=1).merge(parts, [2, 1]).shape == (3, 3)
    assert Merging(dim=-1).merge(parts, [2, 1]).shape == (3, 3)
    with pytest.raises(ConfigError, match=r"2 rows along dim 0, but has shape \(3, 2\)"):
        Merging().merge(parts, [2, 1])
    with pytest.raises(ConfigError, match=r"2 rows along dim 2, but has shape \(3, 2\)"):
        Merging(dim=2).merge(parts, [2, 1])


@pytest.mark.parametrize("leaves", [[t(1, 2), None], [None, t(1, 2)], [t(1, 2), "text"]], ids=str)
def test_a_tensor_that_only_some_replicas_return_is_not_lost(leaves: list[Any]) -> None:
    """Without a rule nothing says that one replica's rows stand for all."""
    with pytest.raises(ConfigError, match=r"`aux`"):
        Merging().merge([{"aux": leaf} for leaf in leaves], [2, 2])
