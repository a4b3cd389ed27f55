"""The benchmarks start, measure and write their report; no test depends on how fast anything is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import step as step_module
from benchmarks.__main__ import BENCHMARKS, app
from benchmarks.contestants import CONTESTANTS, StepJob, build, by_default, loss_of, select

# A contestant's protocol without torch: asked for n steps, its times are 0, 1, …, n-1 seconds.
STUB = """
import json, sys
print([], flush=True)
for line in sys.stdin:
    print(json.dumps(list(range(int(line)))), flush=True)
"""


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_describes_its_options(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "--out" in result.output


def test_a_benchmark_measures_all_contestants_and_writes_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = [(sys.executable, "-S", "-c", STUB)]
    monkeypatch.setattr(step_module, "commands_of", lambda *_, **__: stub)
    result = CliRunner().invoke(app, ["step", "--models=cnn", "--steps=1", f"--out={tmp_path}"])
    assert result.exit_code == 0, result.output
    measured = json.loads((tmp_path / "step.json").read_text())["measured"]
    assert list(measured["models"]["cnn"]["seconds_by_round"]) == select(by_default(), "cnn")
    assert (tmp_path / "step.png").exists()


@pytest.mark.parametrize("name", ["trainer", "dataparallel"])
def test_a_contestant_takes_the_step_that_plain_torch_takes(name: str) -> None:
    plain, (inputs, targets) = build("tiny")
    loss_of(plain(inputs), targets).backward()
    torch.optim.SGD(plain.parameters(), lr=0.01).step()
    module, batch = build("tiny")
    with CONTESTANTS[name].open(
        StepJob(contestant=name, model="tiny", workers=2), module, batch
    ) as step:
        step()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
