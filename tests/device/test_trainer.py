"""All that a `Trainer` does, on accelerators and beside the CPU: to the bit what the CPU does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import phalanx
from phalanx.callbacks import EMA, JSONL, Checkpoint, EarlyStopping, History, Trace
from phalanx.errors import UnsupportedError
from tests.zoo import assert_same_bits

F64 = torch.float64
CLASSES, ROWS, BATCH = 4, 34, 7
DEVICES = [
    ["dev:0", "dev:1"],
    ["dev:1", "cpu"],
    ["cpu", "dev:0"],
    ["dev:0", "dev:0", "dev:1"],
]
ADAMW = partial(torch.optim.AdamW, lr=0.01, fused=True)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, CLASSES)
    return nn.Sequential(*layers).double()


def data(*, pinned: bool = False, workers: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 5, generator=generator, dtype=F64)
    y = torch.randint(CLASSES, (ROWS,), generator=generator)
    order = torch.Generator().manual_seed(5)
    return DataLoader(
        TensorDataset(x, y),
        BATCH,
        shuffle=True,
        generator=order,
        pin_memory=pinned,
        num_workers=workers,
    )


def trainer(devices: list[str], **options: Any) -> phalanx.Trainer:
    """Return a trainer whose weights are the same bits in any configuration."""
    torch.manual_seed(1)
    optimizer = options.pop("optimizer", ADAMW)
    loss = options.pop("loss", F.cross_entropy)
    return phalanx.Trainer(
        options.pop("module", net()).to(devices[0]),
        loss,
        optimizer,
        replicas=devices,
        microbatches=3,
        **options,
    )


def on_cpu(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.cpu()
    if isinstance(found, dict):
        return {name: on_cpu(each) for name, each in found.items()}
    return found


def everything(devices: list[str], folder: Path, **loading: Any) -> dict[str, Any]:
    """Train with all that a trainer has beside, and return all that comes of it."""
    ema, history = EMA(decay=0.9), History()
    best, stopping = (
        Checkpoint(folder / "best", monitor="validation.loss"),
        EarlyStopping(patience=1),
    )
    callbacks = [ema, history, best, stopping, JSONL(folder / "log"), Trace(folder / "trace")]
    with trainer(
        devices,
        clip_norm=0.1,
        callbacks=callbacks,
        metrics={"accuracy": MulticlassAccuracy(CLASSES, average="micro")},
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5),
        scheduler_interval="step",
    ) as trained:
        epochs = trained.fit(data(**loading), epochs=2, validate=data(**loading), progress=False)
        found: dict[str, Any] = {"train": {f"{each.epoch}": each.train for each in epochs}}
        found["validation"] = {f"{each.epoch}": each.validation for each in epochs}
        found["evaluated"] = trained.evaluate(data(**loading))
        found["predicted"] = trained.predict([x for x, _ in data(**loading)])
        found["losses"] = dict(enumerate(history.losses))
        found["average"] = dict(ema.module.state_dict())
        found["module"] = dict(trained.module.state_dict())
    average = {str(each.device) for each in found["average"].values()}
    assert average == {devices[0]}
    return on_cpu(found)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return everything(["cpu"], tmp_path_factory.mktemp("expected"))


@pytest.mark.parametrize("devices", DEVICES, ids="+".join)
def test_training_with_all_its_parts_has_the_bits_of_the_cpu(
    devices: list[str], expected: dict[str, Any], tmp_path: Path
) -> None:
    assert_same_bits(everything(devices, tmp_path), expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_batches_too(workers: int, expected: dict[str, Any], tmp_path: Path) -> None:
    found = everything(["dev:0", "dev:1"], tmp_path, pinned=True, workers=workers)
    assert_same_bits(found, expected)


def reusing(loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches that are still on their way, all from one pinned buffer."""
    pinned = torch.empty(BATCH, 5, dtype=F64).pin_memory()
    for x, y in loader:
        own = pinned[: len(x)].copy_(x)
        yield own.to("dev:0", non_blocking=True), y.to("dev:0")
        torch.dev.synchronize(0)


def test_batches_that_the_caller_has_sent_ahead() -> None:
    def trained(devices: list[str], loader: Any) -> dict[str, Any]:
        with trainer(devices) as made:
            for batch in loader:
                made.step(batch)
            return on_cpu(dict(made.module.state_dict()))

    found = trained(["dev:0", "dev:1"], reusing(data()))
    assert_same_bits(found, trained(["cpu"], data()))


def test_a_checkpoint_from_the_middle_of_an_epoch_goes_on_elsewhere(tmp_path: Path) -> None:
    def trained(devices: list[str], *, ends: bool = True, resumes: bool = False) -> dict[str, Any]:
        average = EMA(decay=0.9)
        with trainer(devices, clip_norm=0.1, callbacks=[average]) as made:
            if resumes:
                made.resume(tmp_path / "checkpoint")
                made.fit(data(), epochs=2, progress=False)
            else:
                made.fit(data(), epochs=2, steps=None if ends else 7, progress=False)
                made.save(tmp_path / "checkpoint")
            return on_cpu({**made.module.state_dict(), "average": average.module.state_dict()})

    whole = trained(["dev:0", "dev:1"])
    trained(["dev:0", "dev:1"], ends=False)
    for devices in (["dev:1"], ["dev:0", "cpu", "dev:1"], ["dev:1", "dev:0"], ["cpu"]):
        assert_same_bits(trained(devices, resumes=True), whole, "+".join(devices))


def test_mixed_precision_of_the_callers_is_the_same_on_one_device_and_two() -> None:
    def trained(devices: list[str]) -> dict[str, Any]:
        module, batches = net().float(), [(x.float(), y) for x, y in data()]
        with (
            torch.autocast("dev", dtype=torch.bfloat16),
            trainer(devices, module=module, clip_norm=1.0) as made,
        ):
            made.fit(batches, progress=False)
            predicted = made.predict([x for x, _ in batches])
            assert predicted.dtype == torch.bfloat16
            assert made.evaluate(batches)["loss"] > 0
            return on_cpu({**made.module.state_dict(), "predicted": predicted})

    assert_same_bits(trained(["dev:0", "dev:1"]), trained(["dev:0"]))


def test_worker_processes_are_refused_with_the_way_out() -> None:
    for devices in (["dev:0", "dev:1"], ["cpu", "dev:0"]):
        with pytest.raises(UnsupportedError, match=r"but are on dev:0.*'threads'"):
            trainer(devices, executor="processes")


# -- losses with tensors of their own --------------------------------


def test_weights_of_classes_go_where_the_replicas_are() -> None:
    def trained(devices: list[str]) -> dict[str, Any]:
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1, 2, 3, 4], dtype=F64)).to(devices[0])
        with trainer(devices, loss=loss) as made:
            made.fit(data(), progress=False)
            loss.weight[0] = 5
            made.fit(data(), progress=False)
            assert loss.weight.device == made.module[0].weight.device
            return on_cpu({**made.module.state_dict(), **made.evaluate(data())})

    for devices in DEVICES:
        assert_same_bits(trained(devices), trained(["cpu"]))


@pytest.mark.promise("nondeterministic-kernels-are-named")
@pytest.mark.parametrize(
    ("devices", "is_switched", "count"),
    [(["dev:0", "cpu"], False, 1), (["dev:0", "cpu"], True, 0), (["cpu"], False, 0)],
)
def test_the_first_step_on_an_accelerator_names_torchs_switch_once(
    devices: list[str], is_switched: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The switch itself imports for a second.
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_switched)
    with warnings.catch_warnings(record=True) as told, trainer(devices) as trained:
        warnings.simplefilter("always")
        for batch in [*data()][:2]:
            trained.step(batch)
    texts = [text for each in told if "use_deterministic" in (text := str(each.message))]
    assert len(texts) == count
