"""The benchmarks start, measure and write their report; no test depends on how fast anything is."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import step as step_module
from benchmarks.__main__ import BENCHMARKS, app
from benchmarks.models import MODELS, loss_of
from benchmarks.step import CONTESTANTS, ON_CPU, StepJob, plain_step

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
    monkeypatch.setattr(step_module, "commands_of", lambda *_: stub)
    result = CliRunner().invoke(app, ["step", "--models=cnn", "--rounds=1", f"--out={tmp_path}"])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "step.json").read_text())
    assert list(record["measured"]["cnn"]) == ON_CPU.split(",")
    assert all(len(turns["step"][0]) == 3 for turns in record["measured"]["cnn"].values())
    assert record["machine"]["torch"] == torch.__version__


def test_a_contestant_that_fails_is_named_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commands_of(job: StepJob, _: int) -> list[tuple[str, ...]]:
        program = "raise SystemExit('no luck')" if job.contestant == "ddp" else STUB
        return [(sys.executable, "-S", "-c", program)]

    monkeypatch.setattr(step_module, "commands_of", commands_of)
    words = ["step", "--models=mlp", "--contestants=ddp,trainer", f"--out={tmp_path}"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "no luck" in result.output
    record = json.loads((tmp_path / "step.json").read_text())
    assert list(record["measured"]["mlp"]) == ["trainer"]
    assert list(record["failures"]) == ["ddp, mlp"]


@pytest.mark.parametrize(
    ("name", "input_shape", "target_shape", "num_parameters"),
    [
        ("mlp", (128, 784), (128,), 1_863_690),
        ("cnn", (64, 3, 32, 32), (64,), 1_070_986),
        ("gpt", (16, 64), (16, 64), 3_688_936),
    ],
)
def test_the_measured_models_have_the_published_sizes(
    name: str, input_shape: tuple[int, ...], target_shape: tuple[int, ...], num_parameters: int
) -> None:
    module, (inputs, targets) = MODELS[name].make()
    assert inputs.shape == input_shape
    assert targets.shape == target_shape
    assert loss_of(module(inputs), targets).isfinite()
    assert sum(parameter.numel() for parameter in module.parameters()) == num_parameters


@pytest.mark.parametrize("name", ["trainer", "dataparallel"])
def test_a_contestant_takes_the_step_that_plain_torch_takes(name: str) -> None:
    plain, batch = MODELS["mlp"].make()
    job = StepJob(contestant=name, model="mlp", workers=2)
    plain_step(job, plain, batch)()
    module, batch = MODELS["mlp"].make()
    with ExitStack() as stack:
        CONTESTANTS[name].open(job, module, batch, stack)()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
