"""The file of tensors that a snapshot writes block by block."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import threading

import pytest
import torch
from safetensors.torch import load_file

from phalanx import tables
from phalanx.errors import CheckpointError
from phalanx.tables import snapshots

BLOCK = 8192


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(snapshots, "_BLOCK_BYTES", BLOCK)


def values(rows: int, cols: int) -> torch.Tensor:
    return torch.arange(rows * cols, dtype=torch.float32).view(rows, cols)


def check(folder, wanted: torch.Tensor) -> None:
    """Compare with who reads such files otherwise, and the digest with that of the file."""
    (data,) = folder.glob("*.safetensors")
    assert torch.equal(load_file(data)["values"], wanted)
    (text,) = folder.glob("*.json")
    assert json.loads(text.read_text())["sha256"] == hashlib.sha256(data.read_bytes()).hexdigest()


@pytest.mark.parametrize("rows", [1, 7, 293, 1021, 4096])
@pytest.mark.parametrize("updater", ["sum", "adam"])
def test_a_file_of_many_blocks_is_one_that_safetensors_reads(tmp_path, rows, updater):
    with tables.join() as world:
        table = world.matrix(rows, 3, name="t", updater=updater, init=values(rows, 3))
        table.snapshot(tmp_path)
        check(tmp_path, values(rows, 3))
        before = table._storage.copy_all(1.0)
        table.add(torch.ones(rows, 3))
        table.restore(tmp_path)
        for part, was in zip(table._storage.copy_all(1.0), before, strict=True):
            assert torch.equal(part, was)


@pytest.mark.parametrize("successes", [0, 1, 4])
def test_a_full_disk_is_an_error_and_leaves_the_older_snapshot(tmp_path, monkeypatch, successes):
    pieces = snapshots._pieces

    def fill_up(parts):
        for count, piece in enumerate(pieces(parts)):
            for start in range(0, len(piece), BLOCK):
                if count * BLOCK + start >= successes * BLOCK:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                yield piece[start : start + BLOCK]

    with tables.join() as world:
        table = world.matrix(4000, 3, name="t", init=values(4000, 3))
        table.snapshot(tmp_path)
        table.add(torch.ones(4000, 3))
        with monkeypatch.context() as patch:
            patch.setattr(snapshots, "_pieces", fill_up)
            with pytest.raises(CheckpointError, match="No space left on device"):
                table.snapshot(tmp_path)
        check(tmp_path, values(4000, 3))
        assert len(list(tmp_path.iterdir())) == 2  # and nothing of the new one
        table.snapshot(tmp_path)
        check(tmp_path, values(4000, 3) + 1)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_pipe_with_the_name_of_a_draft_is_never_written_to(tmp_path, kind):
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("precious")
    folder.mkdir()
    for name in (f".t.{os.getpid()}.{threading.get_ident()}.tmp", "t.json.new"):
        if kind == "link":
            (folder / name).symlink_to(victim)
        else:
            os.mkfifo(folder / name)
    with tables.join() as world:
        world.matrix(7, 3, name="t", init=values(7, 3)).snapshot(folder)
    check(folder, values(7, 3))
    assert victim.read_text() == "precious"
    assert len(list(folder.iterdir())) == 2


@pytest.mark.timeout(20)
def test_a_digest_that_equals_nothing_is_an_error(tmp_path):
    with tables.join() as world:
        table = world.matrix(7, 3, name="t")
        text = table.snapshot(tmp_path)
        text.write_text(json.dumps({**json.loads(text.read_text()), "sha256": float("nan")}))
        with pytest.raises(CheckpointError, match="is damaged"):
            table.restore(tmp_path)


def test_a_snapshot_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    read_parts = snapshots._read_parts

    def replaced_once(spec, data, digest):
        monkeypatch.setattr(snapshots, "_read_parts", read_parts)
        table.add(torch.ones(7, 3))
        table.snapshot(tmp_path)
        return read_parts(spec, data, digest)

    with tables.join() as world:
        table = world.matrix(7, 3, name="t")
        table.snapshot(tmp_path)
        monkeypatch.setattr(snapshots, "_read_parts", replaced_once)
        table.restore(tmp_path)
        assert table.get().unique().tolist() == [1.0]


@pytest.mark.parametrize(
    "text", ["precious", "[1, 2]", json.dumps({"version": 1, "file": "x"}), "", "{" * 9999]
)
def test_a_file_of_the_users_with_the_name_of_a_snapshot_is_left_alone(tmp_path, text):
    theirs = tmp_path / "t.json"
    theirs.write_text(text)
    with tables.join() as world:
        table = world.matrix(7, 3, name="t")
        with pytest.raises(CheckpointError) as caught:
            table.snapshot(tmp_path)
    assert str(caught.value) == (
        f"{str(theirs)!r} must be a snapshot of table 't' where one is written, but is another "
        "file, and is left as it is. Name another `directory`, or move the file away."
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json"]
    assert theirs.read_text() == text


def test_a_file_that_comes_while_a_snapshot_is_written_is_left_alone(tmp_path, monkeypatch):
    write = snapshots._write

    def write_slowly(file, parts):
        (tmp_path / "t.json").write_text("precious")
        return write(file, parts)

    monkeypatch.setattr(snapshots, "_write", write_slowly)
    with tables.join() as world, pytest.raises(CheckpointError, match="but is another file"):
        world.matrix(7, 3, name="t").snapshot(tmp_path)
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["precious"]


def test_what_a_dead_writer_has_left_goes_and_a_living_ones_stays(tmp_path):
    names = [".t.12.34.tmp", ".t.56.78.tmp", ".t.notes.tmp", ".other.1.2.tmp"]
    for name in names:
        (tmp_path / name).write_text("half")
    with (tmp_path / names[1]).open("r+") as living, tables.join() as world:
        fcntl.flock(living, fcntl.LOCK_EX)
        world.matrix(7, 3, name="t").snapshot(tmp_path)
    left = {entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")}
    assert left == set(names[1:])
