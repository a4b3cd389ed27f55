"""`Checkpoint` saves every so many epochs or steps, and keeps the last ones."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.callbacks import Checkpoint, History
from phalanx.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.promise("periodic-checkpoints")


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(5, 3, generator=draw), torch.randn(5, 2, generator=draw)) for _ in range(4)
    ]


def make(*callbacks: Any) -> phalanx.Trainer:
    torch.manual_seed(0)
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.1)  # noqa: E731
    return phalanx.Trainer(
        nn.Linear(3, 2),
        F.mse_loss,
        adam,
        executor="inline",
        replicas=1,
        microbatches=2,
        callbacks=callbacks,
    )


def steps_in(folder: Path) -> list[int]:
    return sorted(int(each.name.removeprefix("step-")) for each in folder.iterdir())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [20]),
        ({"every_epochs": 1, "keep": 3}, [12, 16, 20]),
        ({"every_epochs": 2}, [16]),
        ({"every_steps": 3, "keep": 2}, [15, 18]),
        ({"every_steps": 6, "every_epochs": 2, "keep": 9}, [6, 8, 12, 16, 18]),
        ({"every_steps": 4, "every_epochs": 1, "keep": 2}, [16, 20]),
        ({"every_steps": 100}, []),
    ],
    ids=str,
)
def test_the_last_ones_are_kept(options: Any, kept: list[int], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    checkpoint = Checkpoint(tmp_path / "run", **options)
    with make(checkpoint) as trainer:
        trainer.fit(data(), epochs=5)
    assert steps_in(tmp_path / "run") == kept
    assert checkpoint.last == (tmp_path / "run" / f"step-{kept[-1]:08d}" if kept else None)


@pytest.mark.parametrize("by", ["stop", "Ctrl-C"])
def test_a_run_that_is_stopped_is_saved_where_it_stops(by: str, tmp_path: Path) -> None:
    def end(event: object) -> None:
        if isinstance(event, phalanx.StepDone) and event.step == 6:
            if by == "Ctrl-C":
                raise KeyboardInterrupt
            trainer.stop()

    checkpoint = Checkpoint(tmp_path / "run")
    with make(checkpoint, end) as trainer:
        with contextlib.suppress(KeyboardInterrupt):
            trainer.fit(data(), epochs=5)
        stopped = {name: each.clone() for name, each in trainer.module.state_dict().items()}
    assert steps_in(tmp_path / "run") == [6]
    with make(Checkpoint(tmp_path / "run")) as trainer:
        trainer.resume(tmp_path / "run" / "step-00000006")
        assert trainer.steps == 6
        assert all(
            torch.equal(trainer.module.state_dict()[name], stopped[name]) for name in stopped
        )


@pytest.mark.parametrize("options", [{"every_epochs": 1}, {"every_steps": 3}], ids=str)
def test_a_script_that_is_run_again_continues_bit_for_bit(options: Any, tmp_path: Path) -> None:
    history = History()

    def run(epochs: int, dies_at: int = 0) -> nn.Module:
        def die(event: object) -> None:
            if isinstance(event, phalanx.StepDone) and event.step == dies_at:
                raise KeyboardInterrupt

        checkpoint = Checkpoint(tmp_path / "run", keep=2, **options)
        with make(history, checkpoint, die) as trainer:
            if checkpoint.last:
                trainer.resume(checkpoint.last)
            trainer.fit(data(), epochs=epochs)
        return trainer.module

    with make() as whole:
        whole.fit(data(), epochs=5)
    for dies_at in (10, 11, 15):
        with pytest.raises(KeyboardInterrupt):
            run(5, dies_at)
    module = run(5)
    assert torch.equal(module.weight, whole.module.weight)  # type: ignore[arg-type]
    assert len(history.losses) == 20
    assert len(steps_in(tmp_path / "run")) == 2  # those of the runs before are removed, too


def test_a_save_that_fails_leaves_those_before(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "run", every_steps=2)
    with make(checkpoint) as trainer:
        trainer.fit(data(), steps=3)
        (tmp_path / "run" / "step-00000004.writing").write_text("no room for a draft")
        with pytest.raises(CheckpointError):
            trainer.fit(data())
        assert checkpoint.last == tmp_path / "run" / "step-00000002"
        trainer.resume(checkpoint.last)
        assert trainer.steps == 2
        (tmp_path / "run" / "step-00000004.writing").unlink()
        trainer.fit(data(), epochs=1)
    assert steps_in(tmp_path / "run") == [4]


def test_a_checkpoint_that_a_kill_left_beside_its_place_is_the_last(tmp_path: Path) -> None:
    with make(Checkpoint(tmp_path, every_steps=2)) as trainer:
        trainer.fit(data(), steps=2)
    place = tmp_path / "step-00000002"
    place.rename(tmp_path / "step-00000002.previous")
    checkpoint = Checkpoint(tmp_path, every_steps=2)
    assert checkpoint.last == place
    with make(checkpoint) as trainer:
        trainer.resume(place)
        assert trainer.steps == 2


def test_the_next_save_removes_what_a_kill_has_left(tmp_path: Path) -> None:
    with make(Checkpoint(tmp_path, every_steps=2)) as trainer:
        trainer.fit(data(), steps=2)
        shutil.copytree(tmp_path / "step-00000002", tmp_path / "before")
        trainer.fit(data(), steps=2)
    # Killed after one checkpoint was written, before the one before it was removed: and, another
    # time, while the next one was written.
    (tmp_path / "before").rename(tmp_path / "step-00000002")
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000002.previous")
    (tmp_path / "step-00000006.writing").mkdir()
    (tmp_path / "step-00000006.writing" / ".tmpAbc123").write_text("torn")
    checkpoint = Checkpoint(tmp_path, every_steps=2)
    with make(checkpoint) as trainer:
        trainer.resume(tmp_path / "step-00000004")
        trainer.fit(data(), steps=4)
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000008"]


@pytest.mark.parametrize(
    "options",
    [{"every_epochs": 0}, {"every_steps": -1}, {"keep": 0}, {"every_steps": 1.5}],
    ids=str,
)
def test_numbers_that_cannot_be_are_refused(options: Any, tmp_path: Path) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"`{name}` must"):
        Checkpoint(tmp_path, **options)


@pytest.mark.parametrize("place", ["file", "file/below/it"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(
    place: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with make(Checkpoint(tmp_path / place)) as trainer:
        with pytest.raises(ConfigError, match="`path` must be a folder that can be written"):
            trainer.fit(data())
        assert trainer.steps == 0
