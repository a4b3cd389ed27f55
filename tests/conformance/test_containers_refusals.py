"""What containers refuse: the sentence names the culprit, and nothing has changed.

Parameters, buffers, gradients and children are as before, and the next good call works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx import Layout
from phalanx.errors import ConfigError, PhalanxError, StateError, UnsupportedError
from tests.conformance.containers import (
    Colours,
    Columns,
    MixedTypes,
    Slices,
    Weighed,
    assert_equal_pass,
    draw,
    parallel,
)
from tests.zoo import (
    assert_close,
    assert_same_bits,
    gradients_of,
    mlp,
    state_of,
    twin_of,
    vector_batch,
)

F64 = torch.float64
X = draw(5, 7)


def refuse(
    model: nn.Module,
    call: Callable[[], object],
    match: str,
    kind: type[PhalanxError] = ConfigError,
) -> str:
    """Check that ``call`` is refused with all of ``match``, and that nothing has changed."""
    before, gradients = state_of(model), gradients_of(model)
    keys = list(dict(model.named_modules()))
    with pytest.raises(kind, match=match) as caught:
        call()
    assert type(caught.value) is kind
    assert_same_bits(state_of(model), before)
    assert_same_bits(gradients_of(model), gradients)
    assert list(dict(model.named_modules())) == keys
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "args", "kwargs", "match"),
    [
        ({"masks": None}, (X, X), {}, r"`layout` must .*'masks'.*'0', '1'"),
        ({"weights.3": None}, (X, X), {}, r"`layout` must .*'1\.3'.*'0', '1'"),
        ({2: 0}, (X,), {"weights": X}, r"`layout` must .*'2'.*'0', 'weights'"),
        ({}, (X, X[:4]), {}, r"Input `1` must have 5 rows along dim 0 like `0`, but has 4"),
        ({}, (X,), {"weights": X[:4]}, r"Input `weights` must have 5 rows .* `0`, but has 4"),
        ({"weights": 1}, (X, X[0]), {}, r"Input `1` must have a dim 1 .* shape \(7,\)"),
        ({0: None, 1: None}, (X, X), {}, r"`batch` must hold at least one tensor that is split"),
    ],
)
def test_inputs_that_do_not_fit_the_layout(
    layout: dict[Any, Any], args: Any, kwargs: Any, match: str
) -> None:
    net = Weighed().double()
    with parallel(net, layout=Layout(dims=layout)) as model:
        refuse(model, lambda: model(*args, **kwargs), match)


def test_leaves_of_a_table_are_named_by_their_path() -> None:
    with parallel(Colours().double()) as model:
        table = [draw(5, 1, 4, 4), draw(5, 1, 4, 4), draw(4, 1, 4, 4)]
        refuse(model, lambda: model(table), r"Input `0\.2` must have 5 rows .* `0\.0`, but has 4")
        assert_equal_pass(model, twin_of(model.module), [*table[:2], table[0]])


@pytest.mark.parametrize("sizes", [[5], [1, 1, 1], [2, 2, 2], [6, -1, 0], [1, 1, 1, 2], []])
def test_sizes_that_do_not_make_the_batch(sizes: list[int]) -> None:
    net = mlp(F64)
    with parallel(net) as model:
        told = refuse(model, lambda: model.forward_sized(sizes, X), "`sizes` must hold 3 sizes")
        assert str(sizes) in told
        assert_equal_pass(model, twin_of(net), X)


class Squares(nn.Module):
    """Returns a matrix that has the rows of its slice both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7).double()

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"square": y @ y.T, "rows": y, "word": f"{len(x)}", "count": torch.tensor(len(x))}


@pytest.mark.parametrize(
    ("output", "match"),
    [
        (None, r"`square`.* \(2, 2\), \(2, 2\), \(1, 1\)"),
        ({"square": "stack"}, r"`square`.*'stack'.* \(2, 2\), \(2, 2\), \(1, 1\)"),
        ({"square": "sum"}, r"`square`.*'sum'.* \(2, 2\), \(2, 2\), \(1, 1\)"),
        ({"square": "cat(2)"}, r"`square`.*'cat\(2\)'.* \(2, 2\)"),
        ({"square": "first", "word": "cat"}, r"`word`.* must be a tensor .*str"),
        ({"square": "first", "count": "mean"}, r"`count`.*'mean'.*torch.int64"),
        ({"square": "first", "loss": "mean"}, r"`output` must .*'loss'.*'square', 'rows'"),
    ],
)
def test_outputs_that_cannot_be_merged(output: Any, match: str) -> None:
    net = Squares()
    with parallel(net, output=output) as model:
        refuse(model, lambda: model(X), match)
    with parallel(net, output={"square": "per_replica"}) as model:
        assert len(model(X)["square"]) == 3


def test_a_merge_that_is_refused_leaves_buffers_as_they_were() -> None:
    net = nn.Sequential(nn.BatchNorm1d(7).double(), Squares())
    with parallel(net) as model:
        refuse(model, lambda: model(X[[0, 1, 2, 3, 4, 0, 1]]), r"`square`.* \(3, 3\), \(2, 2\)")


def test_a_replica_that_returns_another_structure() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return (x, {"small": x}) if len(x) == 1 else (x, x)

    with parallel(Odd()) as model:
        told = refuse(model, lambda: model(X), r"same structure from every replica.* replica 2")
        assert "small" in told
        assert torch.equal(model(X[:3])[0], X[:3])


@pytest.mark.parametrize("name", ["cuda:99", "meta:3x", "nowhere", "cuda:-2"])
def test_devices_that_do_not_exist(name: str) -> None:
    with pytest.raises(ConfigError, match="`devices` must") as caught:
        phalanx.DataParallel(mlp(), ["cpu", name])
    assert name in str(caught.value)
    container = Slices().add(nn.Linear(2, 2), "cpu")
    refuse(container, lambda: container.add(nn.Linear(2, 2), name), r"must")
    assert len(container) == 1


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"output": "average"}, "output"),
        ({"output": {"x": "cat(one)"}}, "output"),
        ({"output": {"x": 3}}, "output"),
        ({"buffers": "average"}, "buffers"),
        ({"buffers": {"*": None}}, "buffers"),
        ({"workloads": [1, 1]}, "workloads"),
        ({"workloads": [0, 0, 0]}, "workloads"),
        ({"intra_op": 0}, "intra_op"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` must "):
        parallel(mlp(), **options)


def test_losses_that_are_none() -> None:
    net = mlp(F64)
    x, y = vector_batch(6, F64)  # two rows in every replica, whichever fails first
    loss = F.cross_entropy
    with parallel(net) as model:
        refuse(model, lambda: model.forward_loss(loss, x, y[:4]), "`targets` must have 6 rows.* 4")
        refuse(
            model,
            lambda: model.forward_loss(lambda o, t: F.cross_entropy(o, t, reduction="none"), x, y),
            r"`loss_fn` must return a scalar.*\(2,\)",
        )
        for weight in (-1.0, float("nan"), 0.0, float("inf")):
            refuse(
                model,
                lambda weight=weight: model.forward_loss(loss, x, y, weight_fn=lambda _: weight),
                "`weight_fn` must give finite weights",
            )
        refuse(model, lambda: model.forward_loss(nn.Linear(2, 2), x, y), "`loss_fn` must have no")
        refuse(model, lambda: model.forward_loss(loss, x, y, sizes=[5]), "`sizes` must")
        assert_close(model.forward_loss(loss, x, y), loss(net(x), y), F64)


def test_containers_that_are_not_finished() -> None:
    empty = phalanx.ModelParallel(dim=1)
    refuse(empty, lambda: empty(X), "Call `add\\(\\)`", StateError)
    refuse(empty, lambda: empty.get(0), "`index` must")
    refuse(empty, lambda: empty.add("linear"), "`module` must be an `nn.Module`")
    for columns in (2, 4):
        container = Columns(7, 3)
        container.distribute = lambda x, n=columns: [x] * n
        for _ in range(3):
            container.add(nn.Linear(7, 2))
        with container:
            told = refuse(container, lambda c=container: c(X.float()), r"`distribute\(\)` must")
            assert f"{columns}" in told
            assert "3" in told
    with Slices().add(nn.Linear(7, 2)) as two:
        for index in (1, -2):
            refuse(two, lambda index=index: two.get(index), "`index` must be a column")
        refuse(two, lambda: two.send(torch.zeros(2), torch.zeros(3)), r"shape.*\(3,\).*\(2,\)")


def test_parameters_that_cannot_be_flat_or_shared() -> None:
    mixed = parallel(MixedTypes())
    refuse(mixed, mixed.flat_parameters, "float32.*float64", UnsupportedError)
    bare = parallel(nn.Tanh())
    refuse(bare, bare.flat_parameters, "none", UnsupportedError)
    model = parallel(mlp())
    other = nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 8))
    refuse(model, lambda: model.share(other), r"`2\.weight`.*\(8, 11\).*\(9, 11\)")
    assert model.module[0].weight is not other[0].weight
    refuse(model, lambda: model.share(nn.ModuleList([nn.BatchNorm1d(3)]), "bias"), r"`0\.bias`")
