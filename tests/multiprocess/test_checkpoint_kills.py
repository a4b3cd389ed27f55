"""A kill at any point at which `Checkpoint` renames or removes leaves a folder to train in."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx
from phalanx.callbacks import Checkpoint
from tests.multiprocess.children import DEADLINE_S
from tests.multiprocess.fork_server import context

pytestmark = pytest.mark.promise("periodic-checkpoints")


def train(folder: Path, steps: int, place: Path | None = None) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(4)]
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    checkpoint = Checkpoint(folder, every_steps=1)
    with phalanx.Trainer(
        nn.Linear(3, 2), F.mse_loss, sgd, executor="inline", callbacks=[checkpoint]
    ) as trainer:
        if place is not None:
            trainer.resume(place)
        trainer.fit(data, steps=steps)


def train_until_killed(folder: Path, point: int) -> None:
    """Die before the rename or removal with this number."""
    left = point

    def count(event: str, _: object) -> None:
        nonlocal left
        if event in ("os.rename", "os.remove", "os.rmdir"):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(count)
    train(folder, 1, folder / "step-00000001")


def test_a_run_after_a_kill_at_any_point_trains_and_leaves_its_last(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    train(begun, 1)
    # An earlier kill has left this, so there are two folders to remove.
    shutil.copytree(begun / "step-00000001", begun / "step-00000001.previous")
    point, exit_code = 0, None
    while exit_code != 0:
        run = tmp_path / f"killed-{point}"
        shutil.copytree(begun, run)
        child = context.Process(target=train_until_killed, args=(run, point), daemon=True)
        child.start()
        child.join(DEADLINE_S)
        exit_code = child.exitcode
        assert exit_code in (0, -signal.SIGKILL)
        again = tmp_path / f"again-{point}"
        shutil.copytree(run, again)
        train(again, 2)
        assert os.listdir(again) == ["step-00000002"], point
        last = Checkpoint(run).last
        assert last is not None
        train(run, 3 - int(last.name[5:]), last)
        assert os.listdir(run) == ["step-00000003"], point
        point += 1
    assert point > 10  # two folders, each renamed, emptied of three files and removed
