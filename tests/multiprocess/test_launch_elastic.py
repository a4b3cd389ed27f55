"""`phalanx launch` keeps the survivors of elastic ranks; other launchers are named and refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import phalanx
from phalanx.errors import UnsupportedError
from tests.multiprocess.children import DEADLINE_S
from tests.multiprocess.forked_scripts import run_forked

SCRIPT = """
import os, signal, sys, torch, phalanx
from torch import nn

def lose(event):
    how = sys.argv[1:][int(os.environ["RANK"])]
    if isinstance(event, phalanx.StepDone) and event.step == 3:
        if how == "raises":
            raise ValueError("a rank of its own accord")
        if how != "finishes":
            os.kill(os.getpid(), getattr(signal, how))

torch.manual_seed(0)
net = nn.Linear(5, 3)
data = [(torch.randn(7, 5), torch.randint(3, (7,))) for _ in range(8)]
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
ranks = None if len(sys.argv) == 1 else phalanx.Ranks()
with phalanx.Trainer(
    net, nn.functional.cross_entropy, sgd, executor=ranks or "inline", replicas=1, microbatches=4,
    callbacks=[lose] * (ranks is not None),
) as trainer:
    trainer.fit(data, epochs=1)
print("weights", net.weight.double().sum().item().hex())
"""


def run(folder: Path, *fates: str) -> tuple[int | None, list[str], str]:
    """Run the script with a fate for each rank; return its exit code, weights, and output."""
    (folder / "script.py").write_text(SCRIPT)
    words = ["phalanx", "launch", "-n", str(len(fates))] if fates else ["python"]
    code, said = run_forked(*words, "script.py", *fates, folder=folder, deadline_s=DEADLINE_S)
    return code, re.findall(r"weights (\S+)", said), said


def test_the_launcher_keeps_the_survivors_of_a_killed_rank(tmp_path: Path) -> None:
    _, expected, _ = run(tmp_path)
    code, weights, said = run(tmp_path, "finishes", "SIGKILL", "finishes")
    assert (code, weights) == (0, 2 * expected), said
    assert "was killed by SIGKILL. The ranks that are left continue without it." in said


@pytest.mark.night
@pytest.mark.parametrize(
    ("fates", "code", "cause"),
    [
        (("finishes", "raises"), 1, "ValueError: a rank of its own accord"),
        (("SIGKILL", "SIGKILL"), 137, "was killed by SIGKILL"),
    ],
)
def test_an_error_and_the_loss_of_all_ranks_fail_the_job(
    fates: tuple[str, ...], code: int, cause: str, tmp_path: Path
) -> None:
    ended_with, _, said = run(tmp_path, *fates)
    assert ended_with == code, said
    assert cause in said.partition("\nRank ")[2]


def test_elastic_ranks_name_the_launcher_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    for name, value in agent.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedError, match=r"Start `phalanx launch -n 3 script\.py`"):
        phalanx.Trainer(
            nn.Linear(2, 1),
            nn.functional.mse_loss,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            executor=phalanx.Ranks(),
        )
