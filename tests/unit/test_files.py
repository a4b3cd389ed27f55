"""Only regular files are read: nothing is waited for, and nothing is read without end."""

from __future__ import annotations

import os
import socket
import stat

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from phalanx import Trainer
from phalanx.cli.run_folder import RunFolder
from phalanx.files import open_new, open_regular, read_text, save_tensors, written_whole


def test_a_file_and_a_link_to_it_are_read(tmp_path):
    (tmp_path / "a").write_bytes(b"\xc3\xa4bc")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for name in "ab":
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"\xc3\xa4bc"
        assert read_text(tmp_path / name, max_bytes=4) == "äbc"


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    wanted = {
        tmp_path / "pipe": "a pipe",
        tmp_path / "link": "a pipe",
        tmp_path / "socket": "a socket",
        tmp_path: "a folder",
        "/dev/zero": "a device",
    }
    for path, kind in wanted.items():
        with pytest.raises(OSError, match=f"it is {kind} and not a regular file"):
            open_regular(path)


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder):
    return {oct(path.stat().st_mode & 0o777) for path in folder.rglob("*") if path.is_file()}


def test_a_file_of_tensors_has_the_mode_of_any_other(tmp_path, umask):
    (tmp_path / "text").write_text("mine")
    save_tensors({"a": torch.arange(3)}, tmp_path / "tensors", metadata={"format": "pt"})
    assert modes(tmp_path) == {oct(0o666 & ~umask)}
    assert load_file(tmp_path / "tensors")["a"].tolist() == [0, 1, 2]


def test_all_files_of_a_run_have_the_users_mode(tmp_path, umask):
    folder = RunFolder.create(tmp_path / "run")
    folder.write_config({"seed": 1})
    with Trainer(
        nn.Linear(3, 2), nn.functional.mse_loss, lambda p: torch.optim.Adam(p), executor="inline"
    ) as trainer:
        trainer.step((torch.ones(4, 3), torch.ones(4, 2)))
        trainer.save(folder.checkpoints_path)
        folder.write_model(trainer.module)
    assert modes(folder.path) == {oct(0o666 & ~umask)}


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "config.json"
    with written_whole(path) as draft:
        draft.write_text("first")
        assert not path.exists()
    with pytest.raises(UnicodeEncodeError), written_whole(path) as draft:
        draft.write_text("half of the sec\ud800", encoding="utf-8")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_crash_left_at_the_draft_is_replaced(tmp_path):
    (tmp_path / "config.json.new").write_text("half of an older one")
    with written_whole(tmp_path / "config.json") as draft:
        draft.write_text("mine")
    assert (tmp_path / "config.json").read_text() == "mine"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("target", ["victim", "absent", "pipe"])
def test_a_link_or_pipe_in_the_place_of_a_new_file_is_replaced_and_never_written_to(
    tmp_path, target
):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o640)

    def obstruct(name):
        path = tmp_path / name
        if target == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(tmp_path / target)
        return path

    obstruct("text.new")
    with written_whole(tmp_path / "text") as draft:
        draft.write_text("mine")
    save_tensors({"a": torch.arange(3)}, obstruct("tensors"))
    with open_new(obstruct("bytes")) as file:
        file.write(b"mine")
    written = {"text", "tensors", "bytes"}
    assert {path.name for path in tmp_path.iterdir()} == written | {"victim"}
    assert victim.read_text() == "precious"
    (tmp_path / "other").touch()
    for name in written:
        found = (tmp_path / name).lstat()
        assert stat.S_ISREG(found.st_mode)
        assert found.st_mode == (tmp_path / "other").stat().st_mode
