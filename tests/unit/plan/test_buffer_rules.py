"""Which rule counts for which buffer, as tables."""

from __future__ import annotations

import pytest

from phalanx.plan import BufferRules

RULES = ["first", "mean", "sum"]


def test_by_default_buffers_are_averaged() -> None:
    assert BufferRules().of("anything.at.all") == "mean"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["seen", "a.b.running_mean", "[odd]*name?", ""])
def test_one_rule_for_all(rule: str, name: str) -> None:
    assert BufferRules(rule).of(name) == rule


TABLE = [
    ({}, "seen", "mean"),
    ({"seen": "sum"}, "seen", "sum"),
    ({"seen": "sum"}, "other", "mean"),
    ({"seen": "sum"}, "deep.seen", "mean"),  # a pattern is for the whole name
    ({"seen": "sum"}, "seen.deep", "mean"),
    ({"*.seen": "sum"}, "deep.seen", "sum"),
    ({"*.seen": "sum"}, "very.deep.seen", "sum"),
    ({"*.seen": "sum"}, "seen", "mean"),
    ({"*seen": "sum"}, "seen", "sum"),
    ({"?.seen": "sum"}, "1.seen", "sum"),
    ({"?.seen": "sum"}, "12.seen", "mean"),
    ({"[01].seen": "sum"}, "1.seen", "sum"),
    ({"[01].seen": "sum"}, "2.seen", "mean"),
    ({"Seen": "sum"}, "seen", "mean"),  # case counts on every system
    ({"*": "first", "seen": "sum"}, "seen", "first"),  # the first that matches counts
    ({"seen": "sum", "*": "first"}, "seen", "sum"),
    ({"seen": "sum", "*": "first"}, "other", "first"),
    ({"*.running_*": "sum", "norm.*": "first"}, "norm.running_mean", "sum"),
    ({"*.running_*": "sum", "norm.*": "first"}, "norm.num_batches_tracked", "first"),
]


@pytest.mark.parametrize(("policy", "name", "expected"), TABLE)
def test_the_first_pattern_that_matches_counts(
    policy: dict[str, str], name: str, expected: str
) -> None:
    assert BufferRules(policy).of(name) == expected


def test_what_is_changed_in_the_users_mapping_later_does_not_count() -> None:
    policy = {"seen": "sum"}
    rules = BufferRules(policy)
    policy["seen"] = "nonsense"
    assert rules.of("seen") == "sum"
