"""How outputs of replicas come together: every rule, every refusal by its sentence."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.plan import Merge, Merging

Pair = namedtuple("Pair", "left right")
SIZES = [3, 1, 2]


@dataclass
class Found:
    logits: Tensor
    note: str


def rows(dim: int = 0) -> list[Tensor]:
    """Return three parts of SIZES rows along ``dim``, with distinct values."""
    whole = torch.arange(6.0 * 4).view(6, 4)
    return [part.movedim(0, dim) for part in whole.split(SIZES)]


def equal_parts() -> list[Tensor]:
    return [torch.full((2, 4), float(index)) for index in (1, 2, 4)]


@pytest.mark.parametrize(
    ("rule", "parts", "expected"),
    [
        ("cat", rows(), torch.arange(24.0).view(6, 4)),
        ("cat(1)", rows(1), torch.arange(24.0).view(6, 4).T),
        ("cat(-1)", rows(1), torch.arange(24.0).view(6, 4).T),
        (Merge.cat(1), rows(1), torch.arange(24.0).view(6, 4).T),
        ("stack", equal_parts(), torch.stack(equal_parts())),
        ("sum", equal_parts(), torch.full((2, 4), 7.0)),
        ("mean", equal_parts(), torch.full((2, 4), (3 * 1 + 1 * 2 + 2 * 4) / 6)),
        ("first", equal_parts(), torch.full((2, 4), 1.0)),
        ("first", rows(), rows()[0]),
        ("sum", [torch.tensor(n) for n in (1, 2, 4)], torch.tensor(7)),
        (None, rows(), torch.arange(24.0).view(6, 4)),
        (None, [torch.tensor(float(n)) for n in (1, 2, 4)], torch.tensor([1.0, 2.0, 4.0])),
        (None, ["a", "b", "c"], "a"),
        (None, [None, None, None], None),
    ],
)
def test_rules(rule: Any, parts: list[Any], expected: Any) -> None:
    merged = Merging(rule).merge(parts, SIZES)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(merged, expected, rtol=1e-6, atol=0)
    else:
        assert merged == expected


def test_parts_stay_apart_when_asked_whatever_their_structure() -> None:
    parts = [torch.ones(2), (torch.ones(1), "x"), None]
    assert Merging("per_replica").merge(parts, SIZES) == parts
    some = Merging({"a": "per_replica"}).merge([{"a": 1, "b": part} for part in rows()], SIZES)
    assert some["a"] == [1, 1, 1]
    assert some["b"].shape == (6, 4)


def test_rules_go_by_path_and_cover_what_is_below() -> None:
    parts = [
        {"loss": torch.tensor(float(n)), "aux": [part, {"deep": part.sum()}], "x": part}
        for n, part in zip((1, 2, 4), rows(), strict=True)
    ]
    merging = Merging({"loss": "mean", "aux": "first", "aux.1.deep": "sum"})
    merged = merging.merge(parts, SIZES)
    assert merged["loss"].item() == pytest.approx(13 / 6)
    assert torch.equal(merged["aux"][0], rows()[0])
    assert merged["aux"][1]["deep"].item() == sum(range(24))
    assert merged["x"].shape == (6, 4)


def test_a_leaf_that_may_be_missing() -> None:
    merging = Merging({"loss?": "mean"})
    with_it = merging.merge([{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(4.0)}], [2, 1])
    assert with_it["loss"].item() == 2.0
    without = merging.merge([{"x": torch.ones(2)}, {"x": torch.ones(1)}], [2, 1])
    assert without["x"].shape == (3,)


def test_places_in_a_tuple_are_paths_too() -> None:
    parts = [(part, part.sum()) for part in rows()]
    merged = Merging({1: "sum"}).merge(parts, SIZES)
    assert isinstance(merged, tuple)
    assert merged[1].item() == sum(range(24))


def test_every_kind_of_nest_keeps_its_kind() -> None:
    pair = Merging().merge([Pair(part, "n") for part in rows()], SIZES)
    assert isinstance(pair, Pair)
    found = Merging().merge([Found(part, "n") for part in rows()], SIZES)
    assert isinstance(found, Found)
    assert found.logits.shape == (6, 4)
    assert Merging().merge([[], [], []], SIZES) == []


def test_the_default_dim_is_the_layouts() -> None:
    assert Merging(dim=1).merge(rows(1), SIZES).shape == (4, 6)


def test_a_mean_over_no_rows_counts_every_part_alike() -> None:
    parts = [torch.tensor(1.0), torch.tensor(3.0)]
    assert Merging("mean").merge(parts, [0, 0]).item() == 2.0


def test_one_part_is_its_own_mean_and_sum() -> None:
    part = torch.randn(3)
    for rule in ("mean", "sum", "first"):
        assert Merging(rule).merge([part], [3]) is part


def test_gradients_flow_through_a_weighted_mean() -> None:
    parts = [torch.ones(2, requires_grad=True) for _ in SIZES]
    Merging("mean").merge(parts, SIZES).sum().backward()
    found = [part.grad[0].item() for part in parts]
    assert found == pytest.approx([3 / 6, 1 / 6, 2 / 6])


@pytest.mark.parametrize(
    ("rule", "parts", "match"),
    [
        ("cat", [torch.ones(2, 3), torch.ones(2, 4)], r"'cat\(0\)' can merge.*\(2, 3\), \(2, 4\)"),
        ("cat(2)", [torch.ones(2, 3)] * 2, r"'cat\(2\)' can merge"),
        ("stack", [torch.ones(2), torch.ones(3)], r"'stack' can merge.*\(2,\), \(3,\)"),
        ("sum", [torch.ones(2), torch.ones(2, 1)], "'sum' can merge"),
        ("mean", [torch.ones(2).long()] * 2, "floating to be merged by 'mean', but is torch.int64"),
        ("mean", ["a", "b"], "tensor to be merged by 'mean', but is str"),
        (None, [torch.ones(5, 2), torch.ones(2, 2)], r"slice's 3 rows along dim 0.*\(5, 2\)"),
        (None, [torch.ones(3), (torch.ones(1),)], r"same structure.*\* from replica 0 and \(\*,\)"),
        (
            {"los": "mean"},
            [{"loss": torch.ones(())}] * 2,
            "names 'los'.*returned 'loss'. Write 'los\\?'",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(rule: Any, parts: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Merging(rule).merge(parts, [3, 1])


@pytest.mark.parametrize("rule", ["catt", "cat(x)", "mean(1)", "", 3, None])
def test_unknown_rules_are_refused(rule: Any) -> None:
    with pytest.raises(ConfigError, match=r"`output` must hold rules out of 'cat'.*but holds"):
        Merging({"a": rule})


def test_the_way_out_names_the_leaf_or_the_whole() -> None:
    with pytest.raises(ConfigError, match=r"output=\{'a': 'per_replica'\}"):
        Merging({"a": "sum"}).merge([{"a": torch.ones(1)}, {"a": torch.ones(2)}], [1, 2])
    with pytest.raises(ConfigError, match=r"output='per_replica'"):
        Merging("sum").merge([torch.ones(1), torch.ones(2)], [1, 2])
    with pytest.raises(ConfigError, match=r"columns returned .*Write a `merge\(\)`"):
        Merging("sum", noun="column").merge([torch.ones(1), torch.ones(2)], [1, 2])


def test_a_rule_reads_as_it_is_written() -> None:
    assert [repr(Merge.of(text)) for text in ("cat", " cat( -1 ) ", "mean")] == [
        "Merge('cat(0)')",
        "Merge('cat(-1)')",
        "Merge('mean')",
    ]
    made = [Merge.cat(), Merge.stack(), Merge.mean(), Merge.sum(), Merge.first()]
    assert made == [Merge.of(rule) for rule in ("cat", "stack", "mean", "sum", "first")]
    assert Merge.per_replica() == Merge.of("per_replica")
