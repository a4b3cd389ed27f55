"""The file of tensors that a snapshot writes block by block, past the cache where that works."""

from __future__ import annotations

import errno
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


@pytest.mark.parametrize("full", [BLOCK - 8, BLOCK, BLOCK + 8, 5 * BLOCK])
def test_a_file_that_ends_with_a_block_or_beside_it_is_whole(full):
    pieces = [torch.arange(n).to(torch.uint8).numpy() for n in (8, 101, full - 109)]
    blocks = [block.tobytes() for block in snapshots._blocks(pieces, snapshots._aligned_buffer)]
    assert b"".join(blocks) == b"".join(piece.tobytes() for piece in pieces)
    assert all(len(block) == BLOCK for block in blocks[:-1])


def test_who_cannot_bypass_the_cache_writes_through_it(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(snapshots, "_ALIGN_BYTES", 8)  # which disks refuse
    with tables.join() as world:
        world.matrix(500, 3, name="t", init=values(500, 3)).snapshot(tmp_path)
    check(tmp_path, values(500, 3))


@pytest.mark.parametrize("successes", [0, 1, 4])
def test_a_full_disk_is_an_error_and_leaves_the_older_snapshot(tmp_path, monkeypatch, successes):
    written: list[int] = []
    write_all = snapshots._write_all

    def fill_up(file, block):
        if len(written) == successes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(len(block))
        write_all(file, block)

    with tables.join() as world:
        table = world.matrix(4000, 3, name="t", init=values(4000, 3))
        table.snapshot(tmp_path)
        table.add(torch.ones(4000, 3))
        num_threads = threading.active_count()
        with monkeypatch.context() as patch:
            patch.setattr(snapshots, "_write_all", fill_up)
            with pytest.raises(CheckpointError, match="No space left on device"):
                table.snapshot(tmp_path)
        assert threading.active_count() == num_threads
        check(tmp_path, values(4000, 3))
        table.snapshot(tmp_path)
        check(tmp_path, values(4000, 3) + 1)
