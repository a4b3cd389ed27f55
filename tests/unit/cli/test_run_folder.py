"""A run folder is made once, and holds whole files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from phalanx.cli.run_folder import RunFolder, name_run
from phalanx.errors import ConfigError

pytestmark = pytest.mark.promise("command-line")


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run")


def test_a_folder_that_holds_a_run_is_refused_with_the_way_to_continue(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=f"Continue its run with `phalanx resume {tmp_path}`"):
        RunFolder.create(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="must be a place for a new folder"):
        RunFolder.create(tmp_path / "file")


def test_the_first_free_number_is_taken(tmp_path):
    (tmp_path / "a-002").mkdir()
    names = [RunFolder.create_next(tmp_path, "a").path.name for _ in range(3)]
    assert names == ["a-001", "a-003", "a-004"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="`--out` must be given: no folder can be made in"):
        RunFolder.create_next(tmp_path / "file", "a")


@pytest.mark.parametrize(
    ("data", "model", "name"),
    [
        ("digits", "cnn", "digits-cnn"),
        ("/usr/share/old books.txt", "gpt", "old-books-gpt"),
        ("../..", "gpt", "..-gpt"),
        ("my.data:Train.set", "my:net", "my.data-Train.set-my-net"),
    ],
)
def test_a_run_is_named_after_its_data_and_model(data, model, name):
    assert name_run(data, model) == name


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"must be a run folder, but .* has no config\.json"):
        RunFolder(tmp_path).read_config()


def test_weights_come_back_under_the_plain_models_keys_and_shared_ones_whole(folder):
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(2, 3, 3))
    module[2].weight = module[0].weight
    module.to(memory_format=torch.channels_last)
    folder.write_model(module)
    stored = load_file(folder.model_path)
    assert stored.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        assert torch.equal(stored[name], value)


def test_writing_again_replaces_and_leaves_nothing_beside(folder):
    for seed in range(2):
        folder.write_config({"seed": seed})
        folder.write_model(nn.Linear(1, 1))
    assert folder.read_config() == {"format": 2, "seed": 1}
    assert {path.name for path in folder.path.iterdir()} == {"config.json", "model.safetensors"}


def test_a_folder_without_a_step_is_discarded_and_any_other_is_not(folder):
    folder.write_config({})
    folder.metrics_path.touch()
    folder.discard_if_unused()
    assert folder.config_path.exists()
    folder.metrics_path.unlink()
    (folder.path / "thesis.txt").touch()
    folder.discard_if_unused()
    assert [path.name for path in folder.path.iterdir()] == ["thesis.txt"]
    (folder.path / "thesis.txt").unlink()
    folder.discard_if_unused()
    assert not folder.path.exists()


def test_a_folder_is_trained_in_by_one_process_at_a_time(folder):
    refused = pytest.raises(ConfigError, match="another process trains in")
    with folder.held(), refused, RunFolder(folder.path).held():
        pass
    with folder.held():
        pass


@pytest.mark.parametrize(("mode", "may"), [(0o755, True), (0o775, False), (0o757, False)])
def test_a_folder_may_name_code_where_nobody_else_can_write(folder, mode, may):
    folder.write_config({})
    folder.config_path.chmod(0o644)
    folder.path.chmod(mode)
    assert folder.may_name_code() is may
    folder.path.chmod(0o755)
    folder.config_path.chmod(0o664)
    assert not folder.may_name_code()
