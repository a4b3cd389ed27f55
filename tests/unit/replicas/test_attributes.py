"""What the user changes on the source after replicas exist: taken over, or noticed.

`matches_source()` true: `refresh()` makes the replica follow. False: the executor makes new
replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.replicas import Replica

CPU = torch.device("cpu")
X = torch.ones(5, 3)


class Settings(nn.Module):
    """Multiplies by what stands in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("later", None)
        self.factor: Any = 2.0
        self.factors: Any = [1.0, 2.0]
        self.table: Any = torch.tensor([1.0, 2.0, 3.0])
        self.array: Any = np.arange(3)
        self.word: Any = "word"

    def forward(self, x: Tensor) -> Tensor:
        if self.later is not None:
            x = x + self.later
        return self.linear(x) * self.factor


def replica_of(source: nn.Module) -> Any:
    return Replica(source, CPU, 0)


# --- what is taken over ---------------------------------------------------------------------------

PLAIN = [
    3.0,
    -1,
    True,
    None,
    2 + 1j,
    "text",
    b"bytes",
    torch.float64,
    torch.device("cpu"),
    (1, "two", (3.0, None)),
    frozenset({1, 2}),
    (),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_are_taken_over(value: object) -> None:
    source = Settings()
    replica = replica_of(source)
    source.word = value
    assert replica.matches_source()
    assert replica.module.word == "word"
    replica.refresh()
    assert replica.module.word == value


def test_a_dropouts_rate_and_modes_are_taken_over() -> None:
    source = Settings()
    replica = replica_of(source)
    source.drop.p = 0.25
    source.drop.eval()
    assert replica.matches_source()
    replica.refresh()
    assert (replica.module.drop.p, replica.module.drop.training) == (0.25, False)
    assert replica.module.training


def test_a_new_attribute_is_taken_over() -> None:
    source = Settings()
    replica = replica_of(source)
    source.brand_new = 5
    assert replica.matches_source()
    replica.refresh()
    assert replica.module.brand_new == 5


@pytest.mark.parametrize("table", [torch.ones(3), torch.ones(2, 2), torch.tensor(4.0)], ids=str)
def test_another_tensor_is_taken_over(table: Tensor) -> None:
    source = Settings()
    replica = replica_of(source)
    source.table = table
    assert replica.matches_source()
    replica.refresh()
    assert torch.equal(replica.module.table, table)
    source.table = 7  # and from a tensor to a number
    replica.refresh()
    assert replica.module.table == 7


def test_what_the_replica_changes_itself_stays_until_the_source_changes() -> None:
    source = Settings()
    replica = replica_of(source)
    replica.module.factor = 9.0
    replica.refresh()
    assert replica.module.factor == 9.0
    assert source.factor == 2.0
    source.factor = 3.0
    source.word = "other"
    replica.refresh()
    assert replica.module.factor == 3.0


# --- what needs new replicas ----------------------------------------------------------------------


def without(name: str) -> Callable[[Settings], None]:
    return lambda source: delattr(source, name)


def to(name: str, value: Any) -> Callable[[Settings], None]:
    return lambda source: setattr(source, name, value)


STRANGE: dict[str, Callable[[Settings], Any]] = {
    "list": to("factors", [3.0]),
    "to a list": to("factor", [3.0]),
    "dict": to("word", {"a": 1}),
    "set": to("word", {1}),
    "function": to("word", len),
    "object": to("word", object()),
    "tuple with a list": to("word", (1, [2])),
    "array": to("array", np.ones(3)),
    "array of one": to("array", np.ones(1)),
    "forward": to("forward", lambda x: x),
    "removed": without("factor"),
    "child replaced": to("linear", nn.Linear(3, 3, bias=False)),
    "child added": to("more", nn.Identity()),
    "child removed": without("drop"),
    "child is none": to("drop", None),
    "grandchild": lambda source: source.linear.add_module("inner", nn.Identity()),
    "parameter added": to("weight", nn.Parameter(torch.ones(3))),
    "parameter where there was none": lambda source: setattr(
        source.linear, "bias", nn.Parameter(torch.ones(3))
    ),
    "buffer added": lambda source: source.register_buffer("more", torch.ones(1)),
    "buffer removed": without("seen"),
}


@pytest.mark.parametrize("change", STRANGE.values(), ids=STRANGE.keys())
def test_whatever_else_changes_is_noticed(change: Callable[[Settings], Any]) -> None:
    source = Settings()
    replica = replica_of(source)
    assert replica.matches_source()
    change(source)
    assert not replica.matches_source()
    assert replica_of(source).matches_source()  # a new one is made of what there is now


def test_nothing_has_changed_when_nothing_was_changed() -> None:
    source = Settings()
    replica = replica_of(source)
    with torch.no_grad():
        source.linear.weight.add_(1)
        source.seen.add_(1)
    replica.refresh()
    source.train(True)
    assert replica.matches_source()


# --- through a container --------------------------------------------------------------------------


def renamed(source: Settings) -> None:
    del source.seen
    source.register_buffer("other", torch.zeros(2))


def twice(self: Settings, x: Tensor) -> Tensor:
    return self.linear(x) * 2 * self.factor


FOLLOWED: dict[str, Callable[[Settings], Any]] = {
    **{name: change for name, change in STRANGE.items() if name not in ("removed", "to a list")},
    "number": to("factor", 3.0),
    "kind of number": to("factor", 3),
    "tensor": to("factor", torch.tensor([1.0, 2.0, 3.0])),
    "tensor of one": to("factor", torch.tensor(4.0)),
    "method": lambda source: setattr(source, "forward", MethodType(twice, source)),
    "buffer where there was none": to("later", torch.ones(3)),
    "buffer gone": to("seen", None),
    "buffer under another name": renamed,
    "weight": lambda source: nn.init.ones_(source.linear.weight),
    "weight replaced": lambda source: setattr(
        source.linear, "weight", nn.Parameter(torch.ones(3, 3))
    ),
}


@pytest.mark.parametrize("change", FOLLOWED.values(), ids=FOLLOWED.keys())
def test_a_container_computes_what_the_module_computes_now(
    change: Callable[[Settings], Any],
) -> None:
    net = Settings()
    with phalanx.DataParallel(net, 3) as model:
        model(X)
        change(net)
        for _ in range(2):
            torch.testing.assert_close(model(X), net(X))
