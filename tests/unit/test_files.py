"""Files are written whole or not at all, and have the mode that the user wants."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file

from phalanx.files import save_tensors, written_whole


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
