"""`make bench-step`: its contestants and the command; nothing depends on how fast anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks import step as step_module
from benchmarks.__main__ import app as bench_app
from benchmarks.contestants import (
    CODECS,
    CONTESTANTS,
    StepJob,
    build,
    by_default,
    commands_of,
    loss_of,
    select,
)
from phalanx import DataParallel, ModelParallel, unsplit
from phalanx.errors import ConfigError
from tests.benchmarks.test_turns import DIES_AT_SETUP, STEADY, stub

# --- contestants --------------------------------------------------------------------------------


def test_contestants_come_in_one_order_and_only_where_they_belong():
    assert select(["trainer", "ddp-cl", "ddp"], "cnn") == ["ddp", "ddp-cl", "trainer"]
    assert select(["trainer", "ddp-cl", "ddp"], "mlp") == ["ddp", "trainer"]


def test_a_model_on_which_nobody_competes_is_refused():
    with pytest.raises(ConfigError, match=r"must name at least one that competes on 'mlp'"):
        select(["ddp-cl"], "mlp")


def test_a_contestant_over_processes_has_one_command_per_worker():
    commands = commands_of("ddp", "tiny", workers=3, folder="meet")
    jobs = [StepJob(**json.loads(words[-1])) for words in commands]
    assert [job.rank for job in jobs] == [0, 1, 2]
    assert len({job.meeting_point for job in jobs}) == 1
    assert len(commands_of("trainer", "tiny", workers=3, folder="meet")) == 1


def test_all_run_by_default_but_those_that_do_other_work():
    others = {"dataparallel-fp16", "dataparallel-one-bit", "dataparallel-top-k", "ddp-meet"}
    assert set(CONTESTANTS) - set(by_default()) == others
    assert set(select(sorted(others), "gpt")) == others


BY_DAY = {"threads", "ddp", "dataparallel", "trainer", "processes"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.night] * (name not in BY_DAY))
        for name in [*by_default(), "ddp-meet"]
    ],
)
def test_every_contestant_does_the_same_job(name, tmp_path):
    """All sum the same gradient, in another order: three float32 steps agree within 1e-6."""
    model = "tiny" if "tiny" in (CONTESTANTS[name].models or {"tiny"}) else "cnn"
    module, (inputs, targets) = build(model)
    if model == "cnn":  # without its normalization: its statistics are those of each rank's slice
        module.eval()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(module(inputs), targets).backward()
        optimizer.step()

    if CONTESTANTS[name].process_per_worker:
        trained = trained_in_a_process(name, model, tmp_path, training=module.training)
    else:
        trained = trained_by(
            name, model, str(tmp_path / "meet"), workers=2, training=module.training
        )
    for (key, theirs), ours in zip(module.named_parameters(), trained, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=key)


def trained_by(name, model, meeting_point, *, workers, training, done=lambda trained: trained):
    job = StepJob(contestant=name, model=model, workers=workers, meeting_point=meeting_point)
    module, batch = build(model)
    module.train(training)
    with CONTESTANTS[name].open(job, module, batch) as step:
        for _ in range(3):
            step()
        return done([parameter.detach().clone() for parameter in parameters_of(module)])


def parameters_of(module):
    """Return the parameters as before layers were cut into columns."""
    for name, child in list(module.named_children()):
        if isinstance(child, ModelParallel):
            module.register_module(name, unsplit(child))
    return module.parameters()


@pytest.mark.parametrize("codec", CODECS)
def test_a_contestant_with_a_codec_is_data_parallel_with_that_codec(codec, tmp_path):
    name = "dataparallel-" + codec.replace("_", "-")
    module, (inputs, targets) = build("tiny")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with DataParallel(module, devices=["cpu"] * 3, codec=codec) as parallel:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(parallel(inputs), targets).backward()
            optimizer.step()
    trained = trained_by(name, "tiny", "", workers=3, training=True)
    plain = trained_by("dataparallel", "tiny", "", workers=3, training=True)
    assert all(map(torch.equal, trained, module.parameters()))
    assert not all(map(torch.equal, trained, plain))


def test_columns_are_put_in_the_place_of_all_linear_layers_but_the_last():
    module, batch = build("mlp")
    linear = [name for name, child in module.named_children() if isinstance(child, nn.Linear)]
    job = StepJob(contestant="modelparallel", model="mlp", workers=3)
    with CONTESTANTS["modelparallel"].open(job, module, batch):
        kinds = [type(module.get_submodule(name)) for name in linear]
        columns = module.get_submodule(linear[0])
        assert kinds == [ModelParallel, ModelParallel, nn.Linear]
        assert [columns.get(index).out_features for index in range(3)] == [342, 341, 341]


def trained_in_a_process(name, model, folder, *, training):
    """Train apart: at their end gloo's threads and DDP's reducer may lock each other out."""
    out = folder / "weights.pt"
    code = (
        "import os, torch\n"
        "from tests.benchmarks.test_step import trained_by\n"
        "def done(trained):\n"
        f"    torch.save(trained, {str(out)!r})\n"
        "    os._exit(0)\n"
        f"trained_by({name!r}, {model!r}, {str(folder / 'meet')!r}, workers=1, "
        f"training={training}, done=done)\n"
    )
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), str(root / "src")])
    subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
        check=True,
    )
    return torch.load(out, weights_only=True)


# --- the command --------------------------------------------------------------------------------


def run_step(*words):
    return CliRunner().invoke(bench_app, ["step", *words])


@pytest.mark.night
def test_the_command_measures_real_processes_and_writes_its_files(tmp_path):
    result = run_step(
        "--models=tiny", "--steps=4", "--contestants=single,ddp", f"--out={tmp_path / 'a' / 'b'}"
    )
    assert result.exit_code == 0, result.output
    assert f"torch {torch.__version__}" in result.output
    report = json.loads((tmp_path / "a" / "b" / "step.json").read_text())
    seconds = report["measured"]["models"]["tiny"]["seconds_by_round"]
    assert list(seconds) == ["single", "ddp"]
    assert all(len(turns) == 2 and sum(map(len, turns)) >= 4 for turns in seconds.values())
    assert (tmp_path / "a" / "b" / "step.png").exists()


def test_a_failed_contestant_is_shown_and_the_command_says_so_at_the_end(tmp_path, monkeypatch):
    program = {"single": STEADY, "trainer": DIES_AT_SETUP}
    monkeypatch.setattr(step_module, "commands_of", lambda name, *_, **__: stub(program[name]))
    result = run_step(
        "--models=mlp", "--steps=1", "--contestants=trainer,single", f"--out={tmp_path}"
    )
    assert result.exit_code == 1
    assert "Trainer, 2 replicas on mlp failed." in result.output
    assert "no such layout" in result.output
    report = json.loads((tmp_path / "step.json").read_text())
    assert list(report["measured"]["models"]["mlp"]["seconds_by_round"]) == ["single"]


def test_the_command_runs_all_without_a_codec(tmp_path, monkeypatch):
    monkeypatch.setattr(step_module, "commands_of", lambda *_, **__: stub(STEADY))
    result = run_step("--models=cnn", "--steps=1", f"--out={tmp_path}")
    assert result.exit_code == 0, result.output
    models = json.loads((tmp_path / "step.json").read_text())["measured"]["models"]
    assert list(models["cnn"]["seconds_by_round"]) == select(by_default(), "cnn")


@pytest.mark.parametrize("word", ["--models=bert", "--models=,", "--contestants=horovod"])
def test_what_cannot_be_measured_is_refused_before_anything_runs(word, tmp_path):
    result = run_step(word, f"--out={tmp_path / 'out'}")
    assert isinstance(result.exception, ConfigError)
    assert word.partition("=")[0] in str(result.exception)
    assert not (tmp_path / "out").exists()
