"""A run folder is made once, holds whole files, and goes back to where its checkpoint is."""

from __future__ import annotations

import json
import resource

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from phalanx.callbacks import record_of
from phalanx.cli.run_folder import RunFolder, name_run
from phalanx.errors import CheckpointError, ConfigError
from tests.unit.callbacks.events import events_of_run

pytestmark = pytest.mark.promise("command-line")


def records_of(num_steps, per_epoch=2):
    return [record_of(event) for event in events_of_run(num_steps, per_epoch=per_epoch)]


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run")


def test_a_new_folder_is_made_with_those_above_it(tmp_path):
    assert RunFolder.create(tmp_path / "a" / "b").path.is_dir()


def test_an_empty_folder_may_be_there(tmp_path):
    assert RunFolder.create(tmp_path).path == tmp_path


def test_a_folder_that_holds_a_run_is_refused_with_the_way_to_go_on(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(ConfigError, match=rf"Continue with `--resume {tmp_path}`, or name another"):
        RunFolder.create(tmp_path)


def test_the_first_free_number_is_taken(tmp_path):
    (tmp_path / "a-002").mkdir()
    names = [RunFolder.create_next(tmp_path, "a").path.name for _ in range(3)]
    assert names == ["a-001", "a-003", "a-004"]


@pytest.mark.parametrize(
    ("data", "model", "name"),
    [
        ("digits", "cnn", "digits-cnn"),
        ("text:book.txt", "gpt", "text-book.txt-gpt"),
        ("text:/usr/share/doc/", "gpt", "text-doc-gpt"),
        ("text:../..", "gpt", "text-gpt"),
        ("text:C:\\data\\old books", "mlp", "text-old-books-mlp"),
        ("my.data:Train.set", "my:net", "my.data-Train.set-my-net"),
    ],
)
def test_a_run_is_named_after_its_data_and_model(data, model, name):
    assert name_run(data, model) == name


def test_what_is_no_run_cannot_go_on(tmp_path):
    with pytest.raises(ConfigError, match=r"must name the folder of a run, but .* no config\.json"):
        RunFolder.open(tmp_path)
    RunFolder(tmp_path).write_config({})
    with pytest.raises(ConfigError, match=r"must name a run with a checkpoint, but .* has none"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint.previous"])
def test_a_run_with_a_checkpoint_can_go_on(folder, name):
    folder.write_config({"seed": 1})
    (folder.path / name).mkdir()
    assert RunFolder.open(folder.path).read_config() == {"seed": 1}


def test_a_run_whose_checkpoint_is_anothers_cannot_go_on(folder, tmp_path):
    folder.write_config({})
    (tmp_path / "another").mkdir()
    folder.checkpoint_path.symlink_to(tmp_path / "another")
    with pytest.raises(ConfigError, match="checkpoint is a link, and what it leads to would be"):
        RunFolder.open(folder.path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_a_damaged_config_is_named(folder, text):
    folder.config_path.write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json must"):
        folder.read_config()


def test_metrics_are_lines_of_json_and_are_added_to(folder):
    records = records_of(4)
    folder.append_metrics(records[:3])
    folder.append_metrics(records[3:])
    lines = folder.metrics_path.read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["step", "step", "epoch"] * 2
    assert json.loads(lines[0])["shares"] == [4, 4]


def test_no_metrics_leave_no_file(folder):
    folder.append_metrics([])
    assert not folder.metrics_path.exists()


def test_a_loss_that_is_not_finite_is_null(folder):
    folder.append_metrics([{"kind": "epoch", "train": {"loss": float("nan")}}])
    assert json.loads(folder.metrics_path.read_text())["train"]["loss"] is None


def test_metrics_go_back_to_the_checkpoint(folder):
    folder.append_metrics(records_of(6))
    with folder.metrics_path.open("a") as file:
        file.write('{"kind": "st')  # killed in the middle of a line
    kept = folder.rewind_metrics(steps=4, epochs=1)
    assert [record.get("step", "epoch") for record in kept] == [1, 2, "epoch", 3, 4]
    folder.append_metrics(records_of(6)[5:])
    lines = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    assert [line.get("step", "epoch") for line in lines] == [
        1,
        2,
        "epoch",
        3,
        4,
        "epoch",
        5,
        6,
        "epoch",
    ]


def test_a_line_of_metrics_ends_with_a_newline_and_nothing_else(folder):
    lines = ['{"kind": "step", "step": 1, "loss": 1, "note": "a\u2028b\u0085c"}\r\n', "{torn"]
    folder.metrics_path.write_text("".join(lines), encoding="utf-8")
    (record,) = folder.rewind_metrics(steps=1, epochs=0)
    assert record["note"] == "a\u2028b\u0085c"


def test_weights_come_back_under_the_plain_models_keys(folder):
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    module.to(memory_format=torch.channels_last)
    folder.write_model(module)
    stored = load_file(folder.model_path)
    assert stored.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        assert torch.equal(stored[name], value)


def test_weights_that_share_memory_are_stored_whole(folder):
    module = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    module["b"].weight = module["a"].weight
    folder.write_model(module)
    stored = load_file(folder.model_path)
    assert torch.equal(stored["a.weight"], stored["b.weight"])


def test_writing_again_replaces_and_leaves_nothing_beside(folder):
    for seed in range(2):
        folder.write_config({"seed": seed})
        folder.write_model(nn.Linear(1, 1))
    assert folder.read_config() == {"seed": 1}
    assert {path.name for path in folder.path.iterdir()} == {"config.json", "model.safetensors"}


def test_a_folder_of_which_nothing_came_can_be_taken_back(folder):
    folder.write_config({})
    folder.remove_config()
    assert not folder.path.exists()


def test_a_folder_with_something_in_it_is_not_taken_away(folder):
    folder.write_config({})
    folder.append_metrics(records_of(1))
    folder.remove_config()
    assert [path.name for path in folder.path.iterdir()] == ["metrics.jsonl"]


def test_a_folder_is_trained_in_by_one_process_at_a_time(folder):
    refused = pytest.raises(ConfigError, match="another process still trains in")
    with folder.held(), refused, RunFolder(folder.path).held():
        pass
    with folder.held():
        pass


def write_each(folder):
    return [
        lambda: folder.append_metrics(records_of(40)),
        lambda: folder.write_config({"format": 1, "options": "x" * 5000}),
        lambda: folder.write_model(nn.Linear(40, 40)),
    ]


@pytest.mark.parametrize("which", range(3))
def test_a_full_disk_is_told_with_the_way_to_go_on(folder, which):
    folder.write_config({"format": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"Make room .* `--resume {folder.path}`"):
            write_each(folder)[which]()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert folder.read_config() == {"format": 1}
    assert not folder.model_path.exists()
