"""Globals and class attributes that a script sets are the same in every executor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx

pytestmark = pytest.mark.promise("scripts-and-notebooks")

F = nn.functional
GAIN = 1.0
OPTIONS = {"penalty": 0.0}
ACTIVATION = torch.relu
calls = 0


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    global calls
    calls += 1
    return F.mse_loss(outputs, targets) + OPTIONS["penalty"] * outputs.abs().mean()


class Net(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = ACTIVATION(self.layer(x)) * self.scale * GAIN
        return out


def weights_after(executor: str, act: Any, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Train three steps; ``act`` is called before the first and before the last."""
    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        net = Net()
        act(patch, 1)
        with phalanx.Trainer(
            net,
            loss,
            lambda p: torch.optim.SGD(p, lr=0.1),
            executor=executor,
            replicas=2 if executor == "threads" else 1,
            microbatches=4,
        ) as trainer:
            for step in range(3):
                if step == 2:
                    act(patch, 2)
                trainer.step((torch.randn(8, 5), torch.randn(8, 3)))
        return net.layer.weight.detach().clone()


def test_what_was_set_before_and_between_steps_counts_in_worker_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = sys.modules[__name__]

    def act(patch: pytest.MonkeyPatch, time: int) -> None:
        patch.setattr(here, "GAIN", 0.5 * time)
        patch.setitem(OPTIONS, "penalty", 0.25 * time)
        patch.setattr(Net, "scale", 3.0 - time)
        patch.setattr(here, "ACTIVATION", torch.tanh if time == 1 else F.gelu)

    threads, processes = (weights_after(c, act, monkeypatch) for c in ("threads", "processes"))
    plain = weights_after("processes", lambda *_: None, monkeypatch)
    assert torch.equal(threads, processes)
    assert not torch.equal(threads, plain)


SCRIPT = """
import argparse, sys
import torch, phalanx
from torch import nn

ALPHA = 0.0

def loss(out, y):
    return nn.functional.mse_loss(out, y) + ALPHA * out.abs().mean()

class Net(nn.Module):
    scale = 1.0
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
    def forward(self, x):
        return self.layer(x) * self.scale

def weights(executor):
    torch.manual_seed(0)
    net = Net()
    batch = torch.randn(12, 5), torch.randn(12, 3)
    with phalanx.Trainer(net, loss, lambda ps: torch.optim.SGD(ps, lr=0.1), executor=executor,
                         replicas=2 if executor == "threads" else 1, microbatches=4) as trainer:
        trainer.step(batch)
    return net.layer.weight

def main():
    global ALPHA
    ALPHA = float(sys.argv[1])
    Net.scale = float(sys.argv[2])
    assert torch.equal(weights("threads"), weights("processes"))
    print("equal")

if __name__ == "__main__":
    main()
"""


@pytest.mark.night  # test_executors_main.py runs a script by day
def test_what_a_script_sets_under_its_guard_counts_in_worker_processes(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, path, "0.5", "2.0"], capture_output=True, text=True, timeout=200
    )
    assert (done.stdout, done.returncode) == ("equal\n", 0), done.stderr
