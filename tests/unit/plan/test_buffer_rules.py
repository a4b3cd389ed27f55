"""Which rule a buffer goes by."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigError
from phalanx.plan import BufferRules


@pytest.mark.parametrize(
    ("policy", "name", "expected"),
    [
        ("first", "a.b", "first"),
        ("sync", "norm.running_mean", "sync"),
        ({"norm.*": "sum"}, "norm.seen", "sum"),
        ({"norm.*": "sum"}, "other", "mean"),
        ({"*": "first", "norm.*": "sum"}, "norm.seen", "first"),  # the first that matches
        ({"*.running_*": "sync"}, "running_mean", "mean"),
        ({}, "x", "mean"),
    ],
)
def test_rules(policy: object, name: str, expected: str) -> None:
    assert BufferRules(policy).of(name) == expected


@pytest.mark.parametrize("policy", ["average", {"*": "max"}, {"a": "mean", "b": 3}])
def test_unknown_rules_are_refused(policy: object) -> None:
    with pytest.raises(ConfigError, match=r"`buffers` must hold rules out of 'first', 'mean'"):
        BufferRules(policy)
