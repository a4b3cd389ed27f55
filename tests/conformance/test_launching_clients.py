"""Accelerate and Lightning Fabric train over `phalanx`, as one process does, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.promise("backend-carries-other-libraries")

DEADLINE_S = 120.0
RANKS = 2
STEPS = 3
LAUNCH = ["-c", "from phalanx.cli.app import main; main()", "launch"]

# What a user writes, but for the name of the backend; each rank takes every second row.
SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
import phalanx
from tests.conformance.test_launching_clients import STEPS, make, rows_of
torch.set_num_threads(1)
{start}
losses = []
for step in range(STEPS):
    optimizer.zero_grad()
    loss = model(rows_of(step)[dist.get_rank()::2]).square().mean()
    trainer.backward(loss)
    optimizer.step()
found = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
kind = type(dist.group.WORLD).__name__
with open(sys.argv[1] + str(dist.get_rank()), "w") as file:
    json.dump([kind, found], file)
dist.destroy_process_group()
"""

ACCELERATE = """
from accelerate import Accelerator
dist.init_process_group("phalanx")
trainer = Accelerator(cpu=True)
model, optimizer = trainer.prepare(*make())
"""

FABRIC = """
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
strategy = DDPStrategy(process_group_backend="phalanx")
trainer = Fabric(accelerator="cpu", devices=2, strategy=strategy)
trainer.launch()
model, optimizer = trainer.setup(*make())
"""


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def rows_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + step)
    return torch.randn(14, 6, generator=generator, dtype=torch.float64)


def trained_alone() -> list[list[float]]:
    """Train in this process on both ranks' rows, with their gradients averaged as DDP does."""
    torch.set_num_threads(1)
    model, optimizer = make()
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            loss = model(rows_of(step)[rank::RANKS]).square().mean()
            (loss / RANKS).backward()
        optimizer.step()
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


@pytest.mark.night  # test_backend_clients.py holds them by day, in forks
@pytest.mark.parametrize(
    ("package", "start", "launcher"),
    [
        ("accelerate", ACCELERATE, [*LAUNCH, "-n", "2"]),
        ("lightning_fabric", FABRIC, [*LAUNCH, "-n", "2"]),
        ("lightning_fabric", FABRIC, []),  # it starts the second process itself
    ],
    ids=["accelerate", "fabric", "fabric's own launch"],
)
def test_a_client_trains_over_phalanx_as_one_process_does(package, start, launcher, tmp_path: Path):
    pytest.importorskip(package, reason=f"needs {package}, of the extra `peers`")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(start=start))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(tmp_path / "rank")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")]),
        },
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(RANKS):
        kind, found = json.loads((tmp_path / f"rank{rank}").read_text())
        assert kind == "SharedGroup"
        assert found == trained_alone()
