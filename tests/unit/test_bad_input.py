"""Bad input gets a clear error and changes nothing: the trainer is as it was, and usable."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.errors import CheckpointError, ConfigError, PhalanxError, StateError
from tests.zoo import (
    CNN_NORM,
    GPT,
    MLP,
    Loader,
    Named,
    adamw,
    assert_same_bits,
    batches_of,
    cnn_norm,
    mlp,
    sgd,
    shuffled_loader,
    state_of,
    token_batch,
    twin_of,
    vector_batch,
)

pytestmark = pytest.mark.promise("refused-calls-change-nothing")


def parallel(module: nn.Module, replicas: int = 2, **options: Any) -> phalanx.DataParallel:
    return phalanx.DataParallel(module, devices=["cpu"] * replicas, **options)


def whole_state(trainer: phalanx.Trainer) -> dict[str, Any]:
    optimizer = torch.utils._pytree.tree_map(
        lambda value: value.clone() if isinstance(value, Tensor) else value,
        trainer.optimizer.state_dict(),
    )
    return {
        "module": state_of(trainer.module),
        "optimizer": optimizer,
        "steps": trainer.steps,
        "epochs": trainer.epochs,
        "training": [each.training for each in trainer.module.modules()],
    }


@contextlib.contextmanager
def refused(trainer: phalanx.Trainer, kind: type[BaseException], match: str) -> Iterator[None]:
    """Hold that the block is refused with ``match`` and that nothing of the trainer has changed."""
    before = whole_state(trainer)
    with pytest.raises(kind, match=match):
        yield
    assert_same_bits(whole_state(trainer), before)


# A sentence of ours names what is wrong in backticks and says what it must be and is.
SENTENCE = r"`[^`]+`.* must .*, but "


# --- construction ---------------------------------------------------------------------------------


def make_parallel(**options: Any) -> object:
    return phalanx.DataParallel(mlp(), **options)


def make_trainer(devices: Any = 2, **options: Any) -> object:
    return phalanx.Trainer(mlp(), MLP.loss, sgd, replicas=devices, **options)


BOTH = pytest.mark.parametrize(
    "make", [make_parallel, make_trainer], ids=["DataParallel", "Trainer"]
)
TWO = ["cpu", "cpu"]


@BOTH
@pytest.mark.parametrize(
    ("devices", "match"),
    [
        ([], r"must .*, but is empty"),
        (0, r"must be at least 1, but is 0"),
        (-1, r"must be at least 1, but is -1"),
        (["cpu", "gpu-of-my-dreams"], r"gpu-of-my-dreams"),
        (["cpu", 3.5], r"3\.5"),
        ("cpux", r"cpux"),
        pytest.param(
            ["cuda:0"],
            r"cuda",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
        (["cuda:999"], r"cuda:999"),
    ],
)
def test_devices_that_are_empty_or_unknown(
    make: Callable[..., object], devices: Any, match: str
) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        make(devices=devices)
    assert re.search(r"`(devices|replicas)` must ", str(caught.value))


@BOTH
@pytest.mark.parametrize(
    ("workloads", "match"),
    [
        ([1, 2, 3], r"`workloads` must hold one share per device \(2\), but holds 3"),
        ([1], r"`workloads` must hold one share per device \(2\), but holds 1"),
        ([], r"`workloads` must hold one share per device \(2\), but holds 0"),
        ([1, -1], r"`workloads` must .*, but .*-1"),
        ([0, 0], r"`workloads` must .*, but "),
        ([1, float("nan")], r"`workloads` must .*, but .*nan"),
        ([1, float("inf")], r"`workloads` must .*, but .*inf"),
    ],
)
def test_workloads_that_cannot_work(
    make: Callable[..., object], workloads: list[float], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        make(devices=TWO, workloads=workloads)


@BOTH
def test_intra_op_below_one(make: Callable[..., object]) -> None:
    with pytest.raises(ConfigError, match=r"`intra_op` must be at least 1.*, but is 0"):
        make(devices=TWO, intra_op=0)


@pytest.mark.parametrize("microbatches", [0, -3])
def test_fewer_than_one_microbatch(microbatches: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"`microbatches` must be at least 1.*, but is {microbatches}"
    ):
        make_trainer(microbatches=microbatches)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"clip_norm": 0.0}, r"`clip_norm` must .*, but is 0\.0"),
        ({"clip_norm": -1.0}, r"`clip_norm` must .*, but is -1\.0"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_trainer(**options)


def test_a_executor_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"`executor` must be one of .*, but is 'gremlins'"):
        make_trainer(executor="gremlins")


def test_neither_loss_nor_forward() -> None:
    with pytest.raises(ConfigError, match=r"`loss`"):
        phalanx.Trainer(mlp(), None, sgd, replicas=2)


def test_a_refused_construction_leaves_the_module_as_it_was() -> None:
    net = mlp()
    before = state_of(net)
    places = [parameter.data_ptr() for parameter in net.parameters()]
    with pytest.raises(ConfigError):
        phalanx.Trainer(net, MLP.loss, sgd, replicas=2, workloads=[1])
    assert_same_bits(state_of(net), before)
    assert [parameter.data_ptr() for parameter in net.parameters()] == places


# --- batches --------------------------------------------------------------------------------------


@pytest.fixture
def trainer() -> Iterator[phalanx.Trainer]:
    with phalanx.Trainer(mlp(), MLP.loss, adamw, replicas=2, microbatches=4) as made:
        made.step(vector_batch(8))
        yield made
        done = made.step(vector_batch(9))  # whatever was refused, the trainer goes on
        assert done.samples == 9
        assert done.step == made.steps


def test_targets_of_another_batch_size_are_named(trainer: phalanx.Trainer) -> None:
    x, _ = vector_batch(8)
    with refused(trainer, ConfigError, r"`[^`]+` must have 8 rows along dim 0 like .*, but has 7"):
        trainer.step((x, torch.zeros(7, dtype=torch.long)))


class Output(SimpleNamespace):
    """An output with its loss inside, as models of Hugging Face return it."""


@pytest.mark.parametrize(
    ("forward", "told"),
    [
        (
            lambda net, pair: Output(loss=MLP.loss(net(pair[0]), pair[1])),
            "'Output'. Return its `loss`",
        ),
        (lambda net, pair: (None, net(pair[0])), "'NoneType'. Take its mean"),
        (lambda net, pair: net(pair[0]), "(4, 4). Take its mean"),
    ],
)
def test_what_forward_must_return_instead_is_said(forward: Any, told: str) -> None:
    match = re.escape(f"`forward` must return a loss of one element, but returned {told}.")
    trainer = phalanx.Trainer(mlp(), None, sgd, forward=forward, replicas=2)
    with trainer, refused(trainer, ConfigError, match):
        trainer.step(vector_batch(8))


def test_a_mean_over_no_targets_is_a_cause_of_nan_with_a_way_out() -> None:
    x, y = vector_batch(8)
    y[4:] = -100  # the second microbatch has none; cross-entropy ignores them
    options: dict[str, Any] = {"replicas": 2, "microbatches": 2}
    match = r"is nan in microbatch 1; .*no targets.*`weight=`"
    trainer = phalanx.Trainer(mlp(), MLP.loss, sgd, **options)
    with trainer, refused(trainer, ConfigError, match):
        trainer.step((x, y))
    expected = MLP.loss(mlp()(x), y).item()
    with phalanx.Trainer(
        mlp(), MLP.loss, sgd, weight=lambda pair: (pair[1] != -100).sum(), **options
    ) as trainer:
        assert trainer.step((x, y)).loss == pytest.approx(expected)


def test_batches_without_labels_are_predicted_and_not_evaluated() -> None:
    def forward(net: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor | None, Tensor]:
        scores = net(batch["x"])
        return (MLP.loss(scores, batch["labels"]) if "labels" in batch else None), scores

    batch = {"x": vector_batch(8)[0]}
    with phalanx.Trainer(
        mlp(), None, sgd, forward=forward, weight=lambda batch: len(batch["labels"]), replicas=2
    ) as trainer:
        with pytest.raises(KeyError, match="labels") as caught:
            trainer.evaluate([batch])
        assert "`predict()` asks for no weights" in caught.value.__notes__[0]
        assert torch.allclose(trainer.predict([batch]), mlp().eval()(batch["x"]))


def test_outputs_of_different_lengths_are_not_joined() -> None:
    batches = [torch.ones(4, length) for length in (3, 5)]
    trainer = phalanx.Trainer(nn.PReLU(), MLP.loss, sgd, replicas=1)
    match = r"but microbatches returned \(4, 3\), \(4, 5\)"
    with trainer, pytest.raises(ConfigError, match=match):
        trainer.predict(batches)


def test_an_input_of_another_batch_size_is_named() -> None:
    tokens, _ = token_batch(12)
    good = ({"tokens": tokens, "mask": torch.ones(12, 5)}, tokens[:, 0] % 4)
    bad = ({"tokens": tokens, "mask": torch.ones(10, 5)}, tokens[:, 0] % 4)
    with phalanx.Trainer(Named(), MLP.loss, sgd, replicas=2) as trainer:
        trainer.step(good)
        match = r"mask` must have 12 rows along dim 0 like .*tokens`, but has 10"
        with refused(trainer, ConfigError, match):
            trainer.step(bad)
        with refused(trainer, ConfigError, match):
            trainer.fit(Loader([bad]), epochs=1)
        with refused(trainer, ConfigError, match):
            trainer.evaluate(Loader([bad]))
        trainer.step(good)


def test_data_parallel_names_the_leaf_of_another_batch_size() -> None:
    net = Named()
    tokens, _ = token_batch(12)
    before = state_of(net)
    with parallel(net) as model:
        with pytest.raises(
            ConfigError, match=r"mask` must have 12 rows along dim 0 like .*tokens`, but has 10"
        ):
            model(tokens=tokens, mask=torch.ones(10, 5))
        assert_same_bits(state_of(net), before)
        assert model(tokens=tokens, mask=torch.ones(12, 5)).shape == (12, 4)


def test_data_parallel_without_a_tensor_to_split() -> None:
    with parallel(mlp()) as model:
        with pytest.raises(ConfigError, match="at least one tensor"):
            model(3)
        with pytest.raises(ConfigError, match="at least one tensor"):
            model()


def test_more_microbatches_than_rows(trainer: phalanx.Trainer) -> None:
    with refused(trainer, ConfigError, r"`microbatches` must .*3.*, but is 4"):
        trainer.step(vector_batch(3))


def test_an_empty_batch(trainer: phalanx.Trainer) -> None:
    with refused(trainer, ConfigError, r"must .*, but "):
        trainer.step(vector_batch(0))


def test_an_empty_batch_without_microbatches() -> None:
    with phalanx.Trainer(mlp(), MLP.loss, sgd, replicas=2) as trainer:
        with refused(trainer, ConfigError, r"must .*, but "):
            trainer.step(vector_batch(0))
        trainer.step(vector_batch(3))


@pytest.mark.parametrize("batch", [torch.ones(8, 7), (torch.ones(8, 7),), "rows", None], ids=repr)
def test_a_batch_that_is_no_pair(trainer: phalanx.Trainer, batch: Any) -> None:
    with refused(trainer, ConfigError, r"[Bb]atch`? must .*, but "):
        trainer.step(batch)


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("microbatch", [0, 2, 3])
def test_a_loss_that_is_not_finite_is_refused_with_its_microbatch(
    microbatch: int, value: float
) -> None:
    """Batch norm's statistics are written and gradients summed by then; both must be undone."""
    good = batches_of(CNN_NORM, 8, torch.float32, 4)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        mean = CNN_NORM.loss(outputs, targets.clamp(min=0))
        return mean * value if bool((targets < 0).any()) else mean

    x, targets = CNN_NORM.batch(8)
    bad = (x, targets.clone())
    bad[1][2 * microbatch] = -1

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def run(*, with_bad: bool) -> dict[str, Any]:
        with phalanx.Trainer(
            cnn_norm(), loss, adamw, replicas=2, microbatches=4, scheduler=scheduler
        ) as trainer:
            trainer.step(good[0])
            if with_bad:
                with refused(trainer, PhalanxError, rf"(?i)loss.*microbatch {microbatch}\b"):
                    trainer.step(bad)
            for batch in good[1:]:
                trainer.step(batch)
            return whole_state(trainer)

    assert_same_bits(run(with_bad=True), run(with_bad=False))


def test_the_refusal_of_a_loss_says_its_value() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.mean() * float("nan")

    with (
        phalanx.Trainer(mlp(), loss, sgd, replicas=2) as trainer,
        refused(trainer, PhalanxError, "nan"),
    ):
        trainer.step(vector_batch(8))


def test_a_loss_that_is_no_scalar(trainer: phalanx.Trainer) -> None:
    with (
        phalanx.Trainer(mlp(), lambda outputs, targets: outputs.sum(1), sgd, replicas=2) as other,
        refused(other, ConfigError, r"`loss` must .*, but .*\(4,\)"),
    ):
        other.step(vector_batch(8))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_cannot_be(weight: float) -> None:
    with (
        phalanx.Trainer(mlp(), MLP.loss, sgd, replicas=2, weight=lambda part: weight) as trainer,
        refused(trainer, ConfigError, r"`weight` must .*, but "),
    ):
        trainer.step(vector_batch(8))


# --- loaders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", [[], Loader([]), iter(())], ids=["list", "loader", "iterator"])
def test_a_loader_that_yields_nothing(trainer: phalanx.Trainer, loader: Any) -> None:
    with refused(trainer, ConfigError, r"`loader` must .*, but "):
        trainer.fit(loader, epochs=1)
    with refused(trainer, ConfigError, r"`loader` must .*, but "):
        trainer.evaluate(loader)


def test_a_loader_that_yields_nothing_the_second_time(trainer: phalanx.Trainer) -> None:
    """An iterator is spent after one epoch; fitting two must not end as if it had."""
    with pytest.raises(ConfigError, match=r"`loader` must .*, but "):
        trainer.fit(iter([vector_batch(8)]), epochs=2)
    assert trainer.steps == 2


@pytest.mark.parametrize("validate", [[], Loader([])], ids=["list", "loader"])
def test_a_validation_loader_that_yields_nothing(trainer: phalanx.Trainer, validate: Any) -> None:
    with pytest.raises(ConfigError, match=r"must .*, but "):
        trainer.fit([vector_batch(8)], epochs=1, validate=validate)


@pytest.mark.parametrize("lengths", [{"epochs": 0}, {"steps": 0}, {"epochs": -1}], ids=str)
def test_a_fit_of_no_length(trainer: phalanx.Trainer, lengths: dict[str, int]) -> None:
    with refused(trainer, ConfigError, r"`(epochs|steps)`.* must .*, but "):
        trainer.fit([vector_batch(8)], **lengths)


# --- modules --------------------------------------------------------------------------------------


class RowsLost(nn.Module):
    """Its output has no batch dim."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = mlp()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        scores = self.net(x)
        if self.kind == "dict":
            return {"scores": scores, "total": scores.sum(0)}
        return scores.sum(0) if self.kind == "sum" else scores.repeat(2, 1)


@pytest.mark.parametrize(
    ("kind", "named"), [("sum", r"[Oo]utput"), ("dict", r"`total`"), ("repeat", r"[Oo]utput")]
)
def test_a_module_whose_output_has_no_batch_dim(kind: str, named: str) -> None:
    net = RowsLost(kind)
    before = state_of(net)
    x, _ = vector_batch(10)  # two slices of 5 rows; the output has 4 columns
    with parallel(net) as model:
        with pytest.raises(ConfigError, match=rf"{named}.* must have .*5 rows.*, but has shape \("):
            model(x)
        assert_same_bits(state_of(net), before)
        net.kind = "plain"
        net.forward = net.net.forward  # type: ignore[method-assign]
    with parallel(net.net) as model:
        assert model(x).shape == (10, 4)


def test_a_module_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"`module` must be .*Module.*, but is"):
        phalanx.DataParallel(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"`module` must be .*Module.*, but is"):
        phalanx.Trainer(lambda x: x, MLP.loss, sgd, replicas=2)  # type: ignore[arg-type]


def test_a_module_without_anything_to_train_says_so_instead_of_standing_still() -> None:
    with (
        pytest.raises((ConfigError, RuntimeError), match=r"parameter|does not require grad"),
        phalanx.Trainer(mlp().requires_grad_(False), MLP.loss, sgd, replicas=2) as trainer,
    ):
        trainer.step(vector_batch(8))


# --- containers -----------------------------------------------------------------------------------


class Sides(nn.Module):
    """Takes two inputs and options; returns what it is told to, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(7, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None = None, *, kind: str = "plain") -> Any:
        self.seen = self.seen + 1
        y = self.left(x if mask is None else x * mask)
        return {
            "plain": y,
            "table": {"y": y, "loss": y.mean()},
            "odd": {"y": y} if len(x) > 2 else [y],  # another structure from the last replica
            "lost": {"y": y.sum(0)},
            "wide": {"y": y.new_zeros(2, len(x), 4)},
            "words": {"y": "word"},
        }[kind]


X8 = torch.ones(8, 7)
LAYOUT = phalanx.Layout
MSE = nn.functional.mse_loss

WRONG_CALLS: list[tuple[dict[str, Any], Callable[[Any], object], str]] = [
    ({}, lambda m: m(X8, torch.ones(7, 7)), r"`1` must have 8 rows along dim 0 like `0`"),
    ({}, lambda m: m(x=X8, mask=torch.ones(9, 7)), r"`mask` must have 8 rows .* like `x`"),
    ({}, lambda m: m(torch.ones(7)[0]), r"must hold at least one tensor that is split"),
    ({"layout": LAYOUT(3)}, lambda m: m(X8), r"`0` must have a dim 3 .* but has shape \(8, 7\)"),
    (
        {"layout": LAYOUT(dims={"maks": None})},
        lambda m: m(X8),
        r"`layout` must name leaves .* names 'maks'\. The input has '0'",
    ),
    (
        {"layout": LAYOUT(dims={"mask.0": None})},
        lambda m: m(X8, X8),
        r"`layout` must name leaves .* '1\.0'\. The input has '0', '1'",
    ),
    ({}, lambda m: m.forward_sized([4, 4], X8), r"`sizes` must hold 3 sizes .* \[4, 4\]"),
    ({}, lambda m: m.forward_sized([4, 4, 1], X8), r"Give \[3, 3, 2\] for equal slices"),
    ({}, lambda m: m.forward_sized([4, 5, -1], X8), r"`sizes` must hold 3 sizes of at least 0"),
    ({}, lambda m: m.forward_parts([X8, X8]), r"`parts` must hold one input per replica \(3\)"),
    ({}, lambda m: m.forward_parts([None] * 3), r"`parts` must hold .*, not all None, but"),
    ({}, lambda m: m(X8, kind="odd"), r"same structure .* \{'y': \*\} .* \[\*\] from replica 2"),
    ({}, lambda m: m(X8, kind="lost"), r"Output `y` .* 3 rows .* but has shape \(4,\).*'first'"),
    ({}, lambda m: m(X8, kind="wide"), r"Output `y` .* 3 rows .* but has shape \(2, 3, 4\)"),
    (
        {"output": "stack"},
        lambda m: m(X8),
        r"'stack' can merge, but replicas returned \(3, 4\), \(3, 4\), \(2, 4\).*'per_replica'",
    ),
    ({"output": {"y": "sum"}}, lambda m: m(X8, kind="table"), r"`y` .* 'sum' can merge"),
    ({"output": {"z": "sum"}}, lambda m: m(X8, kind="table"), r"names 'z'\..*'y', 'loss'"),
    ({"output": "mean"}, lambda m: m(X8, kind="words"), r"`y` .* by 'mean', but is str"),
    ({}, lambda m: m.forward_loss(MSE, X8, torch.ones(7, 4)), r"`targets` must have 8 rows"),
    ({}, lambda m: m.forward_loss(X8, MSE, X8), r"`loss_fn` must be callable"),
    ({}, lambda m: m.forward_loss(lambda out, _: out, X8, X8), r"`loss_fn` must return a scalar"),
    (
        {},
        lambda m: m.forward_loss(MSE, X8, torch.ones(8, 4), weight_fn=lambda own: 0),
        r"`weight_fn` must give finite weights of at least 0, not all 0",
    ),
]


@pytest.mark.parametrize(("options", "call", "match"), WRONG_CALLS)
def test_a_refused_call_of_a_container_changes_nothing(
    options: dict[str, Any], call: Callable[[Any], object], match: str
) -> None:
    net = Sides()
    before = state_of(net)
    with parallel(net, 3, **options) as model:
        with pytest.raises(ConfigError, match=match):
            call(model)
        assert_same_bits(state_of(net), before)
        assert all(parameter.grad is None for parameter in net.parameters())
        if "layout" not in options:  # whatever else was refused, it goes on
            found = model.forward_parts([X8, None, None])
            torch.testing.assert_close(found[0], net.left(X8))
            assert net.seen.item() == 1


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"output": "median"}, r"`output` must hold rules .*, but holds 'median'"),
    ({"output": {"y": "cat(x)"}}, r"`output` must hold rules .*, but holds 'cat\(x\)'"),
    ({"buffers": "average"}, r"`buffers` must hold rules .*, but holds 'average' for '\*'"),
    ({"buffers": {"seen": "max"}}, r"`buffers` must hold rules .*, but holds 'max' for 'seen'"),
    ({"layout": {"mask": None}}, r"`layout` must be a `Layout`, but is \{'mask': None\}"),
    ({"workloads": "none"}, r"`workloads` must .*, but "),
]


@pytest.mark.parametrize(("options", "match"), WRONG_OPTIONS)
def test_options_of_a_container_that_cannot_work(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parallel(Sides(), 3, **options)


class Copies(phalanx.AbstractParallel):
    """Gives as many columns as it is told to the whole input."""

    num_parts = 3

    def distribute(self, inputs: Any) -> list[Any]:
        return [inputs] * self.num_parts


def columns(*modules: nn.Module) -> Any:
    model = Copies()
    for module in modules:
        model.add(module, "cpu")
    return model


@pytest.mark.parametrize(
    ("module", "num_parts", "match"),
    [
        (nn.Linear(7, 4), 2, r"`distribute\(\)` must return .* per column \(3\), but returned 2"),
        (nn.Linear(7, 4), 4, r"`distribute\(\)` must return .* per column \(3\), but returned 4"),
        (nn.Linear(7, 5), 3, r"'cat\(0\)' can merge, but columns .* \(8, 4\), \(8, 4\), \(8, 5\)"),
        (Sides(), 3, None),
        (nn.Sequential(nn.Linear(7, 4), nn.Flatten(0)), 3, r"columns returned .* \(32,\)"),
    ],
)
def test_a_refused_call_of_columns_changes_nothing(
    module: nn.Module, num_parts: int, match: str | None
) -> None:
    norm = nn.BatchNorm1d(7)
    with columns(nn.Sequential(norm, nn.Linear(7, 4)), nn.Linear(7, 4), module) as model:
        before = state_of(model)
        model.num_parts = num_parts
        if match is None:
            assert model(X8).shape == (24, 4)
            return
        with pytest.raises(ConfigError, match=match):
            model(X8)
        assert_same_bits(state_of(model), before)
        model.num_parts = 3
        model.merge = list
        assert len(model(X8)) == 3
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 1


# --- the wrong moment -----------------------------------------------------------------------------


def test_a_closed_trainer_says_so() -> None:
    trainer = phalanx.Trainer(mlp(), MLP.loss, sgd, replicas=2)
    trainer.step(vector_batch(8))
    trainer.close()
    trainer.close()
    for call in (
        lambda: trainer.step(vector_batch(8)),
        lambda: trainer.fit([vector_batch(8)], epochs=1),
        lambda: trainer.evaluate([vector_batch(8)]),
    ):
        with pytest.raises(StateError, match="closed"):
            call()


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoint"
    with phalanx.Trainer(cnn_norm(), CNN_NORM.loss, adamw, replicas=2, microbatches=4) as trainer:
        trainer.fit(shuffled_loader(CNN_NORM, 40, 8), steps=7)
        trainer.save(folder)
    return folder


@pytest.fixture
def checkpoint(good_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def fresh() -> Iterator[phalanx.Trainer]:
    with phalanx.Trainer(
        cnn_norm(seed=3), CNN_NORM.loss, adamw, replicas=3, microbatches=4
    ) as trainer:
        trainer.step(CNN_NORM.batch(8))
        yield trainer
        trainer.step(CNN_NORM.batch(8))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_the_checkpoint_is_safetensors_and_json_only(good_checkpoint: Path) -> None:
    assert {path.suffix for path in files_of(good_checkpoint)} == {".safetensors", ".json"}
    for path in files_of(good_checkpoint):
        assert b"\x80\x02" not in path.read_bytes()[:2], "no pickle in our files"


def test_the_unharmed_checkpoint_is_taken(fresh: phalanx.Trainer, checkpoint: Path) -> None:
    fresh.resume(checkpoint)
    assert fresh.steps == 7


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 1.0])
def test_one_flipped_bit_anywhere_is_noticed(
    fresh: phalanx.Trainer, checkpoint: Path, place: float
) -> None:
    for path in files_of(checkpoint):
        whole = path.read_bytes()
        harmed = bytearray(whole)
        harmed[round(place * (len(harmed) - 1))] ^= 0x01
        path.write_bytes(harmed)
        with refused(fresh, CheckpointError, re.escape(path.name)):
            fresh.resume(checkpoint)
        path.write_bytes(whole)


@pytest.mark.parametrize("kept", [0, 1, 100, -1], ids=lambda n: f"{n} bytes")
def test_a_truncated_file_is_noticed(fresh: phalanx.Trainer, checkpoint: Path, kept: int) -> None:
    for path in files_of(checkpoint):
        whole = path.read_bytes()
        path.write_bytes(whole[: min(kept, len(whole) - 1)])
        with refused(fresh, CheckpointError, re.escape(path.name)):
            fresh.resume(checkpoint)
        path.write_bytes(whole)


def test_a_missing_file_is_named(fresh: phalanx.Trainer, checkpoint: Path) -> None:
    for path in files_of(checkpoint):
        whole = path.read_bytes()
        path.unlink()
        with refused(fresh, CheckpointError, re.escape(path.name)):
            fresh.resume(checkpoint)
        path.write_bytes(whole)


@pytest.mark.parametrize("kind", ["nothing", "file", "empty"])
def test_a_folder_that_is_no_checkpoint(fresh: phalanx.Trainer, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "elsewhere"
    if kind == "file":
        folder.write_text("not a folder")
    if kind == "empty":
        folder.mkdir()
    with refused(fresh, CheckpointError, "elsewhere"):
        fresh.resume(folder)


def wider() -> nn.Module:
    net = cnn_norm()
    net[-1] = nn.Linear(27, 5)
    return net


def deeper() -> nn.Module:
    net = cnn_norm()
    net.append(nn.Linear(4, 4))
    return net


def shallower() -> nn.Module:
    net = cnn_norm()
    net[-1] = nn.Identity()
    return net


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (wider, r"8\.(weight|bias)"),
        (deeper, r"9\.(weight|bias)"),
        (shallower, r"8\.(weight|bias)"),
        (mlp, r"\d\.(weight|bias)"),
    ],
)
def test_a_checkpoint_of_another_model_names_the_difference(
    checkpoint: Path, build: Callable[[], nn.Module], named: str
) -> None:
    with (
        phalanx.Trainer(build(), CNN_NORM.loss, adamw, replicas=2, microbatches=4) as trainer,
        refused(trainer, CheckpointError, named),
    ):
        trainer.resume(checkpoint)


def test_a_checkpoint_of_the_same_keys_and_another_dtype(checkpoint: Path) -> None:
    with (
        phalanx.Trainer(
            cnn_norm(torch.float64), CNN_NORM.loss, adamw, replicas=2, microbatches=4
        ) as trainer,
        refused(trainer, CheckpointError, "float64"),
    ):
        trainer.resume(checkpoint)


def test_a_checkpoint_of_another_optimizer(checkpoint: Path) -> None:
    with (
        phalanx.Trainer(cnn_norm(), CNN_NORM.loss, sgd, replicas=2, microbatches=4) as trainer,
        refused(trainer, CheckpointError, "(?i)optimizer"),
    ):
        trainer.resume(checkpoint)


def test_a_checkpoint_of_an_optimizer_with_its_parameters_in_another_order(
    checkpoint: Path,
) -> None:
    def reverse(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return adamw(parameters[::-1])

    with (
        phalanx.Trainer(cnn_norm(), CNN_NORM.loss, reverse, replicas=2, microbatches=4) as trainer,
        refused(trainer, CheckpointError, "in the order that was saved"),
    ):
        trainer.resume(checkpoint)


def test_saving_again_replaces_the_checkpoint_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    with phalanx.Trainer(mlp(), MLP.loss, adamw, replicas=2) as trainer:
        trainer.step(vector_batch(8))
        trainer.save(folder)
        trainer.step(vector_batch(8))
        trainer.save(folder)
        expected = whole_state(trainer)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    with phalanx.Trainer(mlp(seed=8), MLP.loss, adamw, replicas=3) as trainer:
        trainer.resume(folder)
        assert_same_bits(whole_state(trainer), expected)


def test_a_twin_of_the_test_models_is_independent() -> None:
    """The judge must not share memory with the judged."""
    net = GPT.build()
    twin = twin_of(net)
    assert not {p.data_ptr() for p in net.parameters()} & {p.data_ptr() for p in twin.parameters()}


@pytest.mark.parametrize("swapped", [nn.functional.cross_entropy, nn.CrossEntropyLoss()])
def test_a_loss_in_the_place_of_the_optimizer_is_refused(swapped: Any) -> None:
    with pytest.raises(ConfigError, match=r"`optimizer` must be a function of the parameters"):
        phalanx.Trainer(mlp(), sgd, swapped)
