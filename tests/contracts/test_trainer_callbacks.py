"""Callbacks beside a training: the same bits with and without them, wherever and however often.

The judge is plain PyTorch: `AveragedModel` driven by hand, `module(x)`, a plain loop's scheduler.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import phalanx
from phalanx.callbacks import CSV, EMA, JSONL, Checkpoint, EarlyStopping, History, Progress
from phalanx.errors import ConfigError
from tests.worlds import World, in_every_executor, in_executor_worlds

pytestmark = pytest.mark.promise("callbacks")

F = nn.functional
EPOCHS = 4


class Net(nn.Module):
    """Has statistics, and a buffer that stands in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
        return self.inner(x)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def data(*rows: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 5, generator=draw), torch.randint(3, (n,), generator=draw)) for n in rows
    ]


TRAIN, VALIDATION = data(13, 13, 9), data(9, 4, seed=2)


def make(
    executor: str = "inline", replicas: int = 1, callbacks: Sequence[Any] = (), **options: Any
) -> phalanx.Trainer:
    torch.manual_seed(0)
    return phalanx.Trainer(
        Net(), F.cross_entropy, adamw, executor=executor, replicas=replicas, callbacks=callbacks,
        **{"microbatches": 4, **options},
    )  # fmt: skip


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    found = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in found}


def assert_same(ours: nn.Module | dict[str, Tensor], theirs: nn.Module | dict[str, Tensor]) -> None:
    left, right = (tensors_of(x) if isinstance(x, nn.Module) else x for x in (ours, theirs))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.fixture(scope="module")
def alone() -> nn.Module:
    """What is trained without callbacks."""
    with make() as trainer:
        trainer.fit(TRAIN, epochs=EPOCHS, validate=VALIDATION)
    return trainer.module


@pytest.fixture(scope="module")
def averaged() -> nn.Module:
    """The average, made by hand after every step."""
    with make() as trainer:
        by_hand = AveragedModel(trainer.module, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        for batch in TRAIN * EPOCHS:
            trainer.step(batch)
            by_hand.update_parameters(trainer.module)
    return by_hand.module


def all_callbacks(folder: Path) -> list[Any]:
    return [
        Checkpoint(folder / "best", keep=2, monitor="validation.loss"),
        EMA(decay=0.8),
        EarlyStopping(patience=EPOCHS),
        History(),
        JSONL(folder / "log.jsonl"),
        CSV(folder / "log.csv"),
        Progress(),
    ]


def with_callbacks(executor: str, replicas: int, folder: Path) -> tuple[Any, ...]:
    """Return the weights and their average."""
    callbacks = all_callbacks(folder)
    best, ema, stopping, history, *_ = callbacks
    with make(executor, replicas, callbacks) as trainer:
        epochs = trainer.fit(TRAIN, epochs=EPOCHS, validate=VALIDATION)
        losses = [epoch.validation["loss"] for epoch in epochs if epoch.validation]
        assert [*best.kept.values()] == sorted(losses)[:2]
        assert stopping.best == min(losses)
        assert len(history.losses) == trainer.steps == 3 * EPOCHS
        return tensors_of(trainer.module), tensors_of(ema.module)


@in_executor_worlds
def test_callbacks_change_no_bit_and_the_average_is_torchs_own(
    world: World, n: int, alone: nn.Module, averaged: nn.Module, tmp_path: Path
) -> None:
    for weights, average in world.run(with_callbacks, n, folder=tmp_path):
        assert_same(weights, alone)
        assert_same(average, averaged)
    assert len(list((tmp_path / "best").iterdir())) == 2
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 4 * EPOCHS
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 1 + EPOCHS


@pytest.mark.parametrize("stopped", [2, 3, 7])
def test_a_run_that_was_stopped_goes_on_with_the_callbacks_bits(
    stopped: int, alone: nn.Module, averaged: nn.Module, tmp_path: Path
) -> None:
    whole, first, second = (all_callbacks(tmp_path / name) for name in ("whole", "parts", "parts"))
    with make(callbacks=whole) as trainer:
        trainer.fit(TRAIN, epochs=EPOCHS, validate=VALIDATION)
    with make(callbacks=first) as trainer:
        trainer.fit(TRAIN, steps=stopped, validate=VALIDATION)
        trainer.save(tmp_path / "checkpoint")
    with make("threads", 2, second) as trainer:
        trainer.resume(tmp_path / "checkpoint")
        trainer.fit(TRAIN, epochs=EPOCHS, validate=VALIDATION)
    assert_same(trainer.module, alone)
    assert_same(second[1].module, averaged)
    assert [path.name for path in second[0].kept] == [path.name for path in whole[0].kept]
    for ours, theirs in zip(second[:3], whole[:3], strict=True):
        assert repr(ours.state_dict()) == repr(theirs.state_dict())
    assert second[3].losses == whole[3].losses
    for ours, theirs in zip(second[3].epochs, whole[3].epochs, strict=True):
        assert (ours.train, ours.validation) == (theirs.train, theirs.validation)
    names = [path.name for path in sorted((tmp_path / "parts" / "best").iterdir())]
    assert names == [path.name for path in sorted((tmp_path / "whole" / "best").iterdir())]


def test_the_best_checkpoint_holds_what_the_others_have_counted_of_its_epoch(
    tmp_path: Path,
) -> None:
    callbacks = all_callbacks(tmp_path)
    with make(callbacks=callbacks) as trainer:
        trainer.fit(TRAIN, epochs=1, validate=VALIDATION)
    twins = all_callbacks(tmp_path)
    assert callbacks[0].best is not None
    with make(callbacks=twins) as trainer:
        trainer.resume(callbacks[0].best)
        assert trainer.epochs == 1
    assert twins[0].best == callbacks[0].best
    assert_same(twins[1].module, callbacks[1].module)
    assert twins[2].best == callbacks[2].best is not None
    assert len(twins[3].epochs) == 1


def test_early_stopping_ends_a_fit_and_those_of_a_resumed_run(tmp_path: Path) -> None:
    with make(callbacks=[EarlyStopping("train.loss", patience=2, min_delta=100.0)]) as trainer:
        assert len(trainer.fit(TRAIN, epochs=9)) == 3
        assert trainer.stopped
        trainer.save(tmp_path)
    with make(callbacks=[EarlyStopping("train.loss", patience=2, min_delta=100.0)]) as trainer:
        trainer.resume(tmp_path)
        assert trainer.fit(TRAIN, epochs=9) == []
        assert trainer.stopped


def test_a_metric_that_is_not_there_is_told_before_anything_is_done() -> None:
    with (
        make(callbacks=[EarlyStopping()]) as trainer,
        pytest.raises(ConfigError, match=r"`monitor` must be one of 'train.loss', .*validate="),
    ):
        trainer.fit(TRAIN)
    assert trainer.steps == 0


# --- predict ------------------------------------------------------------------------------------


class Several(Net):
    """Returns outputs of several forms, from one input or two."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        scores = super().forward(x if scale is None else x * scale)
        return {"scores": scores, "pair": (scores.argmax(1), x[:, :1]), "mean": x.sum(), "tag": "t"}


def loss_of_scores(outputs: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs["scores"], y)


def several(executor: str, replicas: int, **options: Any) -> phalanx.Trainer:
    torch.manual_seed(0)
    return phalanx.Trainer(
        Several(), loss_of_scores, adamw,
        executor=executor, replicas=replicas, microbatches=4, **options,
    )  # fmt: skip


@in_every_executor
def test_predictions_are_the_modules_own(executor: str, replicas: int) -> None:
    x = torch.cat([x for x, _ in VALIDATION])
    with several(executor, replicas) as trainer:
        trainer.fit(TRAIN)
        found = trainer.predict(VALIDATION)
        assert trainer.module.training
        trainer.fit(TRAIN)  # nothing that was predicted is overwritten
        trainer.module.load_state_dict(trainer.module.state_dict())
    with several("inline", 1) as trainer:
        trainer.fit(TRAIN)
        with torch.no_grad():
            expected = copy.deepcopy(trainer.module).eval()(x)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found["scores"], expected["scores"], rtol=1e-5, atol=1e-6)
    assert torch.equal(found["pair"][0], expected["pair"][0])
    assert torch.equal(found["pair"][1], x[:, :1])
    assert found["mean"].shape == (8,)  # 4 microbatches of each of 2 batches
    assert found["mean"].sum() == pytest.approx(x.sum().item(), rel=1e-5)
    assert found["tag"] == "t"
    assert not found["scores"].requires_grad


def test_a_function_of_the_users_own_predicts_too() -> None:
    def forward(module: nn.Module, batch: Any) -> Any:
        outputs = module(batch["x"])
        return outputs.sum(), outputs

    x = VALIDATION[0][0]
    torch.manual_seed(0)
    with phalanx.Trainer(Net(), None, adamw, forward=forward, executor="inline") as trainer:
        found = trainer.predict([{"x": x}])
        with torch.no_grad():
            torch.testing.assert_close(found, copy.deepcopy(trainer.module).eval()(x))
    with (
        phalanx.Trainer(
            Net(), None, adamw, forward=lambda m, b: m(b).sum(), executor="inline"
        ) as trainer,
        pytest.raises(ConfigError, match=r"`forward` must return \(loss, outputs\) to predict"),
    ):
        trainer.predict([x])


# --- schedulers that want a metric ---------------------------------------------------------------


@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize("stopped", [None, 3, 4])
def test_reduce_on_plateau_is_stepped_by_each_epochs_loss(
    validates: bool, stopped: int | None, tmp_path: Path
) -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)

    def fit(trainer: phalanx.Trainer, **options: Any) -> None:
        trainer.fit(TRAIN, validate=VALIDATION if validates else None, **options)

    history = History()
    with make("threads", 2, [history], scheduler=plateau) as trainer:
        if stopped is None:
            fit(trainer, epochs=EPOCHS)
        else:
            fit(trainer, steps=stopped)
            trainer.save(tmp_path / "c")
    if stopped is not None:
        with make(callbacks=[history], scheduler=plateau) as trainer:
            trainer.resume(tmp_path / "c")
            fit(trainer, epochs=EPOCHS)
    rate = trainer.optimizer.param_groups[0]["lr"]
    by_hand = adamw([nn.Parameter(torch.zeros(1))])
    plain = plateau(by_hand)
    for epoch in history.epochs:
        plain.step(((epoch.validation if validates else epoch.train) or {})["loss"])
    assert len(history.epochs) == EPOCHS
    assert rate == by_hand.param_groups[0]["lr"] < 0.02
    with make(scheduler=plateau) as whole:
        fit(whole, epochs=EPOCHS)
    assert_same(trainer.module, whole.module)
