"""Bad input gets a clear error and changes nothing: the trainer is as it was, and usable."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.errors import CheckpointError, ConfigError, PhalanxError
from tests.zoo import (
    CNN_NORM,
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
    vector_batch,
)

pytestmark = pytest.mark.promise("refused-calls-change-nothing")


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


# --- construction ---------------------------------------------------------------------------------


def test_a_refused_construction_leaves_the_module_as_it_was() -> None:
    net = mlp()
    before = state_of(net)
    places = [parameter.data_ptr() for parameter in net.parameters()]
    with pytest.raises(ConfigError):
        phalanx.Trainer(net, MLP.loss, sgd, microbatches=None, replicas=2, workloads=[1])
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


def test_a_mean_over_no_targets_is_a_cause_of_nan_with_a_way_out() -> None:
    x, y = vector_batch(8)
    y[4:] = -100  # the second microbatch has none; cross-entropy ignores them
    options: dict[str, Any] = {"replicas": 2, "microbatches": 2}
    match = r"is nan in microbatch 1; .*no targets.*`weight=`"
    trainer = phalanx.Trainer(mlp(), MLP.loss, sgd, **{"microbatches": None, **options})
    with trainer, refused(trainer, ConfigError, match):
        trainer.step((x, y))
    expected = MLP.loss(mlp()(x), y).item()
    with phalanx.Trainer(
        mlp(),
        MLP.loss,
        sgd,
        weight=lambda pair: (pair[1] != -100).sum(),
        **{"microbatches": None, **options},
    ) as trainer:
        assert trainer.step((x, y)).loss == pytest.approx(expected)


def test_batches_without_labels_are_predicted_and_not_evaluated() -> None:
    def forward(net: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor | None, Tensor]:
        scores = net(batch["x"])
        return (MLP.loss(scores, batch["labels"]) if "labels" in batch else None), scores

    batch = {"x": vector_batch(8)[0]}
    with phalanx.Trainer(
        mlp(),
        None,
        sgd,
        forward=forward,
        weight=lambda batch: len(batch["labels"]),
        microbatches=None,
        replicas=2,
    ) as trainer:
        with pytest.raises(KeyError, match="labels") as caught:
            trainer.evaluate([batch])
        assert "`predict()` asks for no weights" in caught.value.__notes__[0]
        assert torch.allclose(trainer.predict([batch]), mlp().eval()(batch["x"]))


def test_outputs_of_different_lengths_are_not_joined() -> None:
    batches = [torch.ones(4, length) for length in (3, 5)]
    trainer = phalanx.Trainer(nn.PReLU(), MLP.loss, sgd, microbatches=None, replicas=1)
    match = r"but microbatches returned \(4, 3\), \(4, 5\)"
    with trainer, pytest.raises(ConfigError, match=match):
        trainer.predict(batches)


def test_an_input_of_another_batch_size_is_named() -> None:
    tokens, _ = token_batch(12)
    good = ({"tokens": tokens, "mask": torch.ones(12, 5)}, tokens[:, 0] % 4)
    bad = ({"tokens": tokens, "mask": torch.ones(10, 5)}, tokens[:, 0] % 4)
    with phalanx.Trainer(Named(), MLP.loss, sgd, microbatches=None, replicas=2) as trainer:
        trainer.step(good)
        match = r"mask` must have 12 rows along dim 0 like .*tokens`, but has 10"
        with refused(trainer, ConfigError, match):
            trainer.step(bad)
        with refused(trainer, ConfigError, match):
            trainer.fit(Loader([bad]))
        with refused(trainer, ConfigError, match):
            trainer.evaluate(Loader([bad]))
        trainer.step(good)


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("microbatch", "value"), [(0, float("inf")), (3, float("nan"))])
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
            cnn_norm(),
            loss,
            adamw,
            replicas=2,
            microbatches=4,
            scheduler=scheduler,
            scheduler_interval="step",
        ) as trainer:
            trainer.step(good[0])
            if with_bad:
                with refused(trainer, PhalanxError, rf"(?i)loss.*microbatch {microbatch}\b"):
                    trainer.step(bad)
            for batch in good[1:]:
                trainer.step(batch)
            return whole_state(trainer)

    assert_same_bits(run(with_bad=True), run(with_bad=False))


# --- loaders --------------------------------------------------------------------------------------


def test_a_loader_that_yields_nothing_the_second_time(trainer: phalanx.Trainer) -> None:
    """An iterator is spent after one epoch; fitting two must not end as if it had."""
    with pytest.raises(ConfigError, match=r"`loader` must .*, but "):
        trainer.fit(iter([vector_batch(8)]), epochs=2)
    assert trainer.steps == 2


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


def test_the_checkpoint_holds_no_code(good_checkpoint: Path) -> None:
    names = [path.name for path in files_of(good_checkpoint)]
    assert names == ["checkpoint.json", "model.safetensors", "state.pt"]
    assert torch.load(good_checkpoint / "state.pt", weights_only=True)


def flip(content: bytes, place: float) -> bytes:
    harmed = bytearray(content)
    harmed[round(place * (len(harmed) - 1))] ^= 0x01
    return bytes(harmed)


HARMS: dict[str, Callable[[Path, bytes], object]] = {
    "missing": lambda path, _: path.unlink(),
    "empty": lambda path, _: path.write_bytes(b""),
    "without its last byte": lambda path, content: path.write_bytes(content[:-1]),
    "a bit in the middle": lambda path, content: path.write_bytes(flip(content, 0.6)),
    "the last bit": lambda path, content: path.write_bytes(flip(content, 1.0)),
}


@pytest.mark.promise("checkpoints-are-whole")
@pytest.mark.parametrize("harm", HARMS)
def test_a_harmed_file_is_named(fresh: phalanx.Trainer, checkpoint: Path, harm: str) -> None:
    for path in files_of(checkpoint):
        content = path.read_bytes()
        HARMS[harm](path, content)
        with refused(fresh, CheckpointError, re.escape(path.name)):
            fresh.resume(checkpoint)
        path.write_bytes(content)
    fresh.resume(checkpoint)
    assert fresh.steps == 7


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


def shallower() -> nn.Module:
    net = cnn_norm()
    net[-1] = nn.Identity()
    return net


def reversed_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return adamw(parameters[::-1])


@pytest.mark.promise("checkpoints-are-whole")
@pytest.mark.parametrize(
    ("build", "make", "named"),
    [
        (wider, adamw, r"8\.(weight|bias)"),
        (shallower, adamw, r"8\.(weight|bias)"),
        (mlp, adamw, r"\d\.(weight|bias)"),
        (partial(cnn_norm, torch.float64), adamw, "float64"),
        (cnn_norm, sgd, "(?i)optimizer"),
        (cnn_norm, reversed_adamw, "parameter groups.*Make what was saved"),
    ],
)
def test_a_checkpoint_of_something_else_names_the_difference(
    checkpoint: Path, build: Callable[[], nn.Module], make: Callable[..., Any], named: str
) -> None:
    with (
        phalanx.Trainer(build(), CNN_NORM.loss, make, replicas=2, microbatches=4) as trainer,
        refused(trainer, CheckpointError, named),
    ):
        trainer.resume(checkpoint)


def test_saving_again_replaces_the_checkpoint_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    with phalanx.Trainer(mlp(), MLP.loss, adamw, microbatches=None, replicas=2) as trainer:
        trainer.step(vector_batch(8))
        trainer.save(folder)
        trainer.step(vector_batch(8))
        trainer.save(folder)
        expected = whole_state(trainer)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    with phalanx.Trainer(mlp(seed=8), MLP.loss, adamw, microbatches=None, replicas=3) as trainer:
        trainer.resume(folder)
        assert_same_bits(whole_state(trainer), expected)
