"""A checkpoint is the old one or the new one, never half of each; a refused one changes nothing.

Faults are put into the system's calls, so nothing here knows how a checkpoint is written. That all
of a state comes back is in test_trainer_resumes.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR, SequentialLR, StepLR
from torchmetrics.classification import MulticlassF1Score
from torchmetrics.regression import MeanSquaredError

import phalanx
from phalanx.errors import CheckpointError, ConfigError, UnsupportedError
from tests.zoo import CNN_NORM, adamw, cnn_norm, mlp, sgd, vector_batch

pytestmark = pytest.mark.promise("checkpoints-are-whole", "checkpoints-are-complete")

FILES = ["checkpoint.json", "model.safetensors", "state.pt"]


class Mean:
    """A callback of the user's own: the mean of the losses, and a tensor beside it."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.count = 0
        self.total = torch.zeros(3)
        self.breaks = breaks
        self.trainer: phalanx.Trainer | None = None

    def attach(self, trainer: phalanx.Trainer) -> None:
        self.trainer = trainer

    def __call__(self, event: object) -> None:
        if isinstance(event, phalanx.StepDone):
            self.count += 1
            self.total += event.loss

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "total": self.total, "odd": [None, (1, 2.5), {"a": "b"}]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.breaks and state["count"] != self.count:  # not, where it is put back
            raise OSError("not mine")
        assert state["odd"] == [None, (1, 2.5), {"a": "b"}]  # also where it is put back
        self.count, self.total = state["count"], state["total"].clone()


class Other(Mean):
    """Has a name of its own."""


def make(module: nn.Module | None = None, optimizer: Any = adamw, **options: Any) -> Any:
    known = {"executor": "inline", "scheduler": partial(MultiStepLR, milestones=[2, 2, 5])}
    net = mlp() if module is None else module
    return phalanx.Trainer(net, nn.functional.cross_entropy, optimizer, **{**known, **options})


def save(number: int, folder: Path) -> None:
    """Save a trainer whose weights are all ``number``."""
    with make() as trainer:
        for parameter in trainer.module.parameters():
            nn.init.constant_(parameter, number)
        trainer.save(folder)


def saved_in(folder: Path) -> int:
    """Return the number that `save` was given."""
    with make() as trainer:
        trainer.resume(folder)
        (number,) = torch.cat([p.flatten() for p in trainer.module.parameters()]).unique()
    return int(number)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextlib.contextmanager
def refused(trainer: phalanx.Trainer, place: Path, match: str) -> Iterator[None]:
    """Hold that the block is refused, and that ``trainer`` saves the same bytes as before."""
    folders = [place.with_name(f"{place.name} {when}") for when in ("before", "after")]
    modes = [each.training for each in trainer.module.modules()]
    trainer.save(folders[0])
    with pytest.raises(CheckpointError, match=match):
        yield
    trainer.save(folders[1])
    assert bytes_of(folders[0]) == bytes_of(folders[1])
    assert [each.training for each in trainer.module.modules()] == modes


# --- the old one or the new one -------------------------------------------------------------------


class Crash(BaseException):
    """Stands for the power going off."""


CHANGES = ("mkdir", "rename", "replace", "rmdir", "unlink", "fsync")


def crashes(folder: Path, point: int) -> bool:
    """Save, and crash before the ``point``-th change to the disk; tell if it came to that."""
    left = point

    def before(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return real(*args, **options)

        return change

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, before(getattr(os, name)))
        try:
            save(2, folder)
        except Crash:
            return True
    return False


def test_a_crash_at_any_point_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    seen = Counter[int]()
    crashed, point = True, 0
    while crashed:
        folder = tmp_path / str(point) / "checkpoint"
        save(1, folder)
        crashed = crashes(folder, point)
        seen[saved_in(folder)] += 1
        save(3, folder)  # and the next save finds its way
        assert saved_in(folder) == 3
        assert names_in(folder.parent) == ["checkpoint"]
        point += 1
    assert seen[1] >= 5
    assert seen[2] >= 2


@contextlib.contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """Let the system refuse what a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 700, 1500])
def test_a_disk_that_is_full_from_any_byte_on_is_told_and_keeps_the_old_one(
    num_bytes: int, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    save(1, folder)
    with no_file_above(num_bytes), pytest.raises(CheckpointError, match="Make room"):
        save(2, folder)
    assert saved_in(folder) == 1
    assert names_in(tmp_path) == ["checkpoint"]
    save(3, folder)
    assert saved_in(folder) == 3


def test_two_that_write_the_same_folder_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint"
    rename = os.rename

    def meanwhile(*places: Any, **options: Any) -> None:
        with pytest.raises(CheckpointError, match="another is writing"):
            save(2, folder)
        rename(*places, **options)

    monkeypatch.setattr(os, "rename", meanwhile)
    save(1, folder)
    monkeypatch.undo()
    assert saved_in(folder) == 1
    assert names_in(tmp_path) == ["checkpoint"]


# --- what is not ours -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["file", "file/c", "loop", "nul\0", "n" * 300])
def test_a_place_that_cannot_be_is_told_and_nothing_there_is_touched(
    place: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="`folder` must be a place"):
        save(1, tmp_path / place)
    assert names_in(tmp_path) == ["file", "loop"]
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(CheckpointError, match="must be readable and whole"):
        saved_in(tmp_path / place)


@pytest.mark.parametrize(
    ("place", "match"),
    [
        ("mine/notes.txt", r"such as 'notes.txt'"),
        ("mine.writing/thesis.txt", r"mine.writing` holds .* Move that away, or give another"),
        ("mine.writing/state.pt/thesis.txt", r"mine.writing` holds .* Move that away"),
        ("mine.previous/thesis.txt", r"mine.previous` holds .* Move that away, or give another"),
    ],
)
def test_files_of_others_are_never_removed(place: str, match: str, tmp_path: Path) -> None:
    folder, file = tmp_path / "mine", tmp_path / place
    save(1, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("precious")
    before = names_in(tmp_path)
    with pytest.raises(ConfigError, match=match):
        save(2, folder)
    assert file.read_text() == "precious"
    assert saved_in(folder) == 1
    assert names_in(tmp_path) == before


def test_files_with_names_of_ours_that_are_no_checkpoint_are_never_removed(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds 'model.*' and no checkpoint\.json"):
        save(1, folder)
    assert (folder / "model.safetensors").read_text() == "mine"
    assert names_in(tmp_path) == ["weights"]


def test_the_current_directory_is_not_pulled_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="current directory"):
        save(1, Path())
    assert Path.cwd() == tmp_path


# --- tensors of every kind ------------------------------------------------------------------------


def test_tensors_come_back_whatever_their_memory(tmp_path: Path) -> None:
    base, waves = torch.arange(12.0).view(3, 4), torch.tensor([[1 + 2j, -0.1j], [3.0, torch.inf]])
    wide = waves.to(torch.complex128)
    values = [base.t(), base, base[1], base.view(2, 6)[:, 1], torch.zeros(0, 3)]
    values += [waves, wide, wide.conj(), wide.real, wide.sum()]

    def holding(values: list[Tensor]) -> nn.Module:
        module = nn.Linear(1, 1)
        for index, value in enumerate(values):
            module.register_buffer(f"buffer_{index}", value)
        return module

    with make(holding(values)) as trainer:
        trainer.save(tmp_path / "c")
    with make(holding([torch.zeros_like(value) for value in values])) as trainer:
        trainer.resume(tmp_path / "c")
        for found, value in zip(trainer.module.buffers(), values, strict=True):
            assert found.dtype == value.dtype
            assert torch.equal(found, value)


def test_the_checkpoint_holds_no_code(tmp_path: Path) -> None:
    with make(callbacks=[Mean()]) as trainer:
        trainer.fit([vector_batch(8)])
        trainer.save(tmp_path / "c")
    assert names_in(tmp_path / "c") == FILES
    assert torch.load(tmp_path / "c" / "state.pt", weights_only=True)


class Odd(Mean):
    """Has a state that cannot be stored."""

    def state_dict(self) -> Any:
        return {"x": object()}


def test_a_state_that_cannot_be_stored_is_refused_before_the_training() -> None:
    with pytest.raises(
        UnsupportedError, match=r"`state_dict\(\)` of the callback 'Odd' must hold only"
    ):
        make(callbacks=[Odd()])


# --- what is refused changes nothing --------------------------------------------------------------


@pytest.fixture(scope="module")
def good_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoint"
    with make(
        cnn_norm(), callbacks=[Mean(), Mean()], metrics={"m": MulticlassF1Score(4)}
    ) as trainer:
        trainer.fit([CNN_NORM.batch(8, seed=seed) for seed in range(5)], epochs=2, steps=7)
        trainer.save(folder)
    return folder


@pytest.fixture
def checkpoint(good_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good_checkpoint, tmp_path / "checkpoint"))


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


@pytest.mark.parametrize("harm", HARMS)
def test_a_harmed_file_is_named(checkpoint: Path, harm: str) -> None:
    with make(cnn_norm(seed=3), metrics={"m": MulticlassF1Score(4)}) as trainer:
        trainer.step(CNN_NORM.batch(8))
        for name in FILES:
            content = (checkpoint / name).read_bytes()
            HARMS[harm](checkpoint / name, content)
            with refused(trainer, checkpoint, re.escape(name)):
                trainer.resume(checkpoint)
            (checkpoint / name).write_bytes(content)
        trainer.resume(checkpoint)
        assert trainer.steps == 7


@pytest.mark.parametrize(
    ("document", "match"),
    [
        (json.dumps({"format": 5}), "of format 4, but is of format 5.* load `model.safetensors`"),
        (json.dumps({"digest": "", "content": {"format": 1}}), "but is of format 1"),
        ("[" * 100_000, "must be readable and whole"),
        (None, "checkpoint"),  # an empty folder
    ],
    ids=["newer", "older", "nested", "empty"],
)
def test_a_folder_that_is_no_checkpoint_of_ours(
    document: str | None, match: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    if document is not None:
        (folder / "checkpoint.json").write_text(document)
    with make() as trainer, refused(trainer, folder, match):
        trainer.resume(folder)


def with_head(head: nn.Module) -> nn.Module:
    net = cnn_norm()
    net[-1] = head
    return net


def reversed_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return adamw(parameters[::-1])


def sequential(optimizer: torch.optim.Optimizer) -> SequentialLR:
    return SequentialLR(optimizer, [StepLR(optimizer, 3), ExponentialLR(optimizer, 0.5)], [4])


@pytest.mark.parametrize(
    ("build", "options", "named"),
    [
        (lambda: with_head(nn.Linear(27, 5)), {}, r"8\.(weight|bias)"),
        (lambda: with_head(nn.Identity()), {}, r"8\.(weight|bias)"),
        (mlp, {}, r"\d\.(weight|bias)"),
        (lambda: cnn_norm(torch.float64), {}, "float64"),
        (cnn_norm, {"optimizer": sgd}, "(?i)optimizer"),
        (cnn_norm, {"optimizer": reversed_adamw}, "parameter groups.*Make what was saved"),
        (cnn_norm, {"scheduler": sequential}, "(?i)scheduler"),
        (cnn_norm, {"metrics": {"m": MeanSquaredError()}}, "Give `metrics=` as they were"),
        (
            cnn_norm,
            {"callbacks": [Mean(breaks=True), Mean()]},
            "callback 'Mean' takes, but that raised OSError.*has changed",
        ),
        (cnn_norm, {"callbacks": [Mean(), Mean(breaks=True)]}, "callback 'Mean 2' takes"),
    ],
)
def test_a_checkpoint_of_something_else_names_the_difference(
    checkpoint: Path, build: Callable[[], nn.Module], options: dict[str, Any], named: str
) -> None:
    with make(build(), **{"metrics": {"m": MulticlassF1Score(4)}, **options}) as trainer:
        if "callbacks" in options:
            trainer.step(CNN_NORM.batch(8))
        with refused(trainer, checkpoint, named):
            trainer.resume(checkpoint)


@pytest.mark.parametrize("half_way", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, torch.optim.AdamW, MultiStepLR, Mean])
def test_whoever_refuses_a_state_leaves_all_as_they_were(
    kind: Any, half_way: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(7, 4)

    with make(net(), callbacks=[Mean()]) as trainer:
        trainer.fit([vector_batch(8, seed=seed) for seed in range(3)])
        trainer.save(tmp_path / "c")
    take, calls = kind.load_state_dict, []

    def load(self: Any, state: Any, **options: Any) -> None:
        calls.append(state)
        if len(calls) > 1:  # it is put back
            take(self, state, **options)
            return
        if half_way:
            take(self, state, **options)
        raise RuntimeError("half way")

    with make(net(), callbacks=[Mean()]) as trainer:
        trainer.fit([vector_batch(8, seed=seed) for seed in range(5)], steps=2)
        monkeypatch.setattr(kind, "load_state_dict", load)
        with refused(trainer, tmp_path / "c", "raised RuntimeError"):
            trainer.resume(tmp_path / "c")


# --- callbacks ------------------------------------------------------------------------------------


def test_every_callback_gets_its_own_state(tmp_path: Path) -> None:
    """Who is not in the checkpoint stays as it is, and who is not here is left aside."""
    first, second, other = Mean(), Mean(), Other()
    second.count = 100
    with make(callbacks=[first, print, second, other]) as trainer:
        trainer.fit([vector_batch(8)])
        trainer.save(tmp_path / "all")
    twins = Mean(), Mean(), Other()
    with make(callbacks=twins) as trainer:
        assert all(twin.trainer is trainer for twin in twins)
        trainer.resume(tmp_path / "all")
        trainer.save(tmp_path / "again")
    assert [twin.count for twin in twins] == [1, 101, 1]
    assert torch.equal(twins[0].total, first.total)
    alone = type("Third", (Mean,), {})()
    alone.count = 7
    with make(callbacks=[alone]) as trainer:
        trainer.resume(tmp_path / "all")
        assert trainer.steps == 1
    assert alone.count == 7
