"""Arguments of the wrong kind: containers and trainers say which, before anything has changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx
from phalanx import DataParallel, Layout, ModelParallel, Trainer
from phalanx.errors import ConfigError, StateError, UnsupportedError
from tests.conformance.containers import draw, parallel
from tests.zoo import (
    assert_close,
    assert_same_bits,
    mlp,
    sgd,
    state_of,
    vector_batch,
)

F64 = torch.float64
X = draw(7, 4)
NAN = float("nan")
WITH_NORM = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3, dtype=F64)


DATA_PARALLEL: list[tuple[dict[str, Any], str]] = [
    ({"intra_op": "2"}, "`intra_op` must be a whole number, but is '2'"),
    ({"intra_op": 1.5}, "`intra_op` must be a whole number, but is 1.5"),
    ({"intra_op": True}, "`intra_op` must be a whole number, but is True"),
    ({"intra_op": NAN}, "`intra_op` must be a whole number, but is nan"),
    ({"intra_op": 10**20}, "`intra_op` must be at most 4096 threads"),
    ({"channels_last": "yes"}, "`channels_last` must be True, False or None, but is 'yes'"),
    ({"buffers": {1: "mean"}}, "`buffers` must map patterns of names to rules, but holds 1"),
    ({"buffers": {"typo": "sync"}}, r"`buffers` must name buffers .* 'typo'. It has '1.running_"),
    ({"buffers": {"*": "sync", "0.*": "sum"}}, r"`buffers` must name buffers .* names '0\.\*'"),
    ({"buffers": {"*": ["sync"]}}, r"`buffers` must hold rules out of"),
    ({"devices": {"cpu"}}, "`devices` must be a number of replicas or a sequence"),
    ({"devices": {"cpu": 1}}, "`devices` must be a number of replicas or a sequence"),
]


@pytest.mark.parametrize(("options", "match"), DATA_PARALLEL)
def test_options_of_data_parallel(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        DataParallel(WITH_NORM, **{"devices": 2, **options})


def test_options_that_numpy_and_patterns_for_all_give_are_taken() -> None:
    assert len(DataParallel(WITH_NORM, np.int64(2)).devices) == 2  # type: ignore[arg-type]
    DataParallel(nn.Linear(2, 2), 2, buffers={"*": "sync"})


@pytest.mark.parametrize("dim", [True, 1.5, "1"])
def test_a_layout_takes_whole_numbers(dim: Any) -> None:
    for call in (lambda: Layout(dim), lambda: Layout(dims={"a": dim})):
        with pytest.raises(ConfigError, match=r"must (be|say) a whole number"):
            call()


SIZES = [6, "222", None, [True, True, 5], [2.0, 3.0, 2.0], {1: 2, 2: 3, 3: 2}, ["2", 3, 2]]


@pytest.mark.parametrize("sizes", [each for each in SIZES if each is not None], ids=repr)
def test_sizes_that_are_none(sizes: Any) -> None:
    with parallel(linear()) as model:
        for call in (
            lambda: model.forward_sized(sizes, X),
            lambda: model.forward_parts([X, X, X], sizes),
            lambda: model.forward_loss(F.mse_loss, X, draw(7, 3), sizes=sizes),
        ):
            with pytest.raises(ConfigError, match="`sizes` must hold 3 sizes of at least 0"):
                call()


@pytest.mark.parametrize(
    "sizes", [np.array([3, 2, 2]), torch.tensor([3, 2, 2]), iter([3, 2, 2]), (np.int64(3), 2, 2)]
)
def test_sizes_of_other_libraries(sizes: Any) -> None:
    net = linear()
    with parallel(net) as model:
        assert_close(model.forward_sized(sizes, X), net(X), F64)


@pytest.mark.parametrize("parts", [None, X[:3], iter([X, X, X]), {"a": X, "b": X, "c": X}, "abc"])
def test_parts_that_are_no_list(parts: Any) -> None:
    with parallel(linear()) as model:
        with pytest.raises(ConfigError, match=r"`parts` must hold one input per replica \(3\)"):
            model.forward_parts(parts)
        with pytest.raises(ConfigError, match="`check` must be a function, but is 3"):
            model.forward_parts([X, X, X], check=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weight_fn", "match"),
    [
        (3, "`weight_fn` must be a function, but is 3"),
        (lambda targets: None, "`weight_fn` must return a finite number .* but returned None"),
        (lambda targets: targets[0], "`weight_fn` must return a finite number .* tensor"),
        (lambda targets: "many", "`weight_fn` must return a finite number .* 'many'"),
    ],
)
def test_weights_of_slices_that_are_none(weight_fn: Any, match: str) -> None:
    with parallel(linear()) as model, pytest.raises(ConfigError, match=match):
        model.forward_loss(F.mse_loss, X, draw(7, 3), weight_fn=weight_fn)


@pytest.mark.parametrize("call", ["threads", "share"])
def test_methods_of_containers_refuse_what_is_no_function_and_no_module(call: str) -> None:
    with parallel(linear()) as model:
        model(X)
        executor = model._running.executor
        with pytest.raises(ConfigError, match=r"must be (a function|an `nn.Module`)"):
            getattr(model, call)(3)
        assert model._running.executor is executor


@pytest.mark.parametrize("index", ["0", 1.0, None, True])
def test_columns_are_counted_by_whole_numbers(index: Any) -> None:
    columns = ModelParallel(dim=1).add(linear())
    with pytest.raises(ConfigError, match="`index` must be a whole number"):
        columns.get(index)
    if not isinstance(index, int) or isinstance(index, bool):
        with pytest.raises(ConfigError, match="`dim` must be a whole number"):
            ModelParallel(dim=index)


def test_columns_that_cannot_be() -> None:
    columns = ModelParallel(dim=1).add(linear())
    with pytest.raises(ConfigError, match="`destination` must be a tensor, but is None"):
        columns.send(None, X)  # type: ignore[arg-type]
    for inside in (columns, nn.Sequential(columns)):
        with pytest.raises(ConfigError, match="`module` must lie outside of this container"):
            columns.add(inside)
    assert len(columns) == 1
    columns.add(linear())
    del columns._modules["0"]
    assert "2 columns" in repr(columns)
    with pytest.raises(StateError, match="Column 0 must stay in its container, but was removed"):
        columns(X)


@pytest.mark.parametrize("parts", [True, [True, True, True], "3", [1.5, 1.5]])
def test_parts_of_a_layer_that_cannot_be(parts: Any) -> None:
    with pytest.raises(ConfigError, match="`parts` must be a number of columns or their sizes"):
        phalanx.split_linear(linear(), parts)


@pytest.mark.parametrize("columns", [None, 3])
def test_what_is_put_together_must_be_columns(columns: Any) -> None:
    with pytest.raises(ConfigError, match="`columns` must be a container of columns"):
        phalanx.unsplit(columns)


TRAINER: list[tuple[dict[str, Any], str]] = [
    ({"loss": 3}, "`loss` must be a function, but is 3"),
    ({"loss": None, "forward": 3}, "`forward` must be a function, but is 3"),
    ({"microbatches": "2"}, "`microbatches` must be a whole number, but is '2'"),
    ({"microbatches": True}, "`microbatches` must be a whole number, but is True"),
    ({"intra_op": 1.5}, "`intra_op` must be a whole number, but is 1.5"),
    ({"clip_norm": "1"}, "`clip_norm` must be a number, but is '1'"),
    ({"seed": "a"}, "`seed` must be a whole number, but is 'a'"),
    ({"replicas": 0}, "`replicas` must be at least 1, but is 0"),
    (
        {"replicas": ["gpu"]},
        "`replicas` must hold names such as 'cpu' or 'cuda:0', but holds 'gpu'",
    ),
    ({"replicas": "cpu,cpu"}, r"Give \['cpu', 'cpu'\] for a replica on each"),
    ({"replicas": 2.5}, "`replicas` must be a number, a sequence of devices or 'auto'"),
    ({"replicas": None}, "`replicas` must be a number, a sequence of devices or 'auto'"),
    ({"timeout_s": 1.0}, r"`timeout_s` must be an option .* Give executor=Processes\(timeout_s="),
    ({"shard_loading": "yes"}, "`shard_loading` must be True or False, but is 'yes'"),
    ({"weight": 3}, "`weight` must be a function, but is 3"),
    ({"layout": 3}, "`layout` must be a `Layout`, but is 3"),
    ({"metrics": 3}, "`metrics` must map names to metrics, but is 3"),
    ({"callbacks": 3}, "`callbacks` must hold functions, but is 3"),
    ({"callbacks": [len, 3]}, r"`callbacks\[1\]` must be a function, but is 3"),
    ({"channels_last": 1}, "`channels_last` must be True, False or None, but is 1"),
    ({"module": nn.Tanh()}, "`module` must have at least one parameter to be trained"),
]


@pytest.mark.parametrize(("options", "match"), TRAINER)
def test_options_of_a_trainer(options: dict[str, Any], match: str) -> None:
    known = {"module": mlp(), "loss": F.cross_entropy, "optimizer": sgd, "replicas": 2}
    with pytest.raises(ConfigError, match=match):
        Trainer(**{**known, **options})


def test_what_a_trainer_is_asked_for_must_be_of_its_kind() -> None:
    net = mlp()
    batches: Sequence[Any] = [vector_batch(7)]
    before = state_of(net)
    with Trainer(net, F.cross_entropy, sgd, replicas=2) as trainer:
        net.eval()
        calls: list[tuple[Callable[[], Any], str]] = [
            (lambda: trainer.fit(None), "`loader` must yield batches, but is None"),  # type: ignore[arg-type]
            (lambda: trainer.fit(batches, validate=3), "`validate` must yield batches"),  # type: ignore[arg-type]
            (lambda: trainer.fit(batches, epochs=1.5), "`epochs` must be a whole number"),  # type: ignore[arg-type]
            (lambda: trainer.fit(batches, steps="a"), "`steps` must be a whole number"),  # type: ignore[arg-type]
            (lambda: trainer.evaluate(3), "`loader` must yield batches, but is 3"),  # type: ignore[arg-type]
            (lambda: trainer.save(3), "`folder` must be a path, but is 3"),  # type: ignore[arg-type]
            (lambda: trainer.resume(3), "`folder` must be a path, but is 3"),  # type: ignore[arg-type]
        ]
        for call, match in calls:
            with pytest.raises(ConfigError, match=match):
                call()
        assert_same_bits(state_of(net), before)
        assert not net.training
        trainer.fit(batches)


@pytest.mark.parametrize("answer", [None, "many", math.inf, torch.ones(2)])
def test_a_weight_that_is_no_number_is_refused(answer: Any) -> None:
    match = "`weight` must return a finite number of at least 0"
    with (
        Trainer(mlp(), F.cross_entropy, sgd, replicas=2, weight=lambda batch: answer) as trainer,
        pytest.raises(ConfigError, match=match),
    ):
        trainer.step(vector_batch(7))


def test_a_trainer_says_whose_hooks_flat_parameters_are() -> None:
    net = mlp()
    DataParallel(net, 2).flat_parameters()
    with pytest.raises(UnsupportedError, match=r"no gradient hooks .*`flat_parameters\(\)`"):
        Trainer(net, F.cross_entropy, sgd, replicas=2)
    Trainer(copy.deepcopy(net), F.cross_entropy, sgd, replicas=2).close()
