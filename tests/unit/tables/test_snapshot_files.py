"""The file that a snapshot is: whole or not there, and refused where it was changed."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx import tables
from phalanx.errors import CheckpointError, PhalanxError

ROUNDS = 100
HOSTILE: list[Any] = [None, True, -1, 10**40, "", [], {}, [1, 2], {"name": 5}, {"name": "adam"}]
TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "longer": lambda t: torch.cat([t, t[:1]]),
    "shorter": lambda t: t[:-1],
    "of another dim": lambda t: t.unsqueeze(0),
    "single": lambda t: t.new_ones(()),
    "empty": lambda t: t.new_empty(0),
    "complex": lambda t: t.to(torch.complex64),
}


def matrix(world: tables.TableGroup) -> Any:
    return world.matrix(5, 3, name="t", updater="adam", init=1.0)


def by_key(world: tables.TableGroup) -> Any:
    return world.keys(3, name="t", updater="adam")


def change(path: Any, draw: random.Random) -> str:
    """Change a snapshot."""
    what = draw.choice(["table", "tensor", "bytes"])
    if what == "bytes":
        whole = bytearray(path.read_bytes())
        at = draw.randrange(len(whole))
        whole[at:] = draw.choice([b"", bytes([draw.randrange(256)]) + whole[at + 1 :]])
        path.write_bytes(whole)
        return f"byte {at}"
    content = torch.load(path, weights_only=True)
    if what == "table":
        where = draw.choice([content, content["table"], content["table"]["updater"]])
        key = draw.choice(sorted(where))
        where[key] = draw.choice(HOSTILE)
        told = f"{key} = {where[key]!r}"
    else:
        at, how = draw.randrange(len(content["parts"])), draw.choice(sorted(TENSORS))
        content["parts"][at] = TENSORS[how](content["parts"][at])
        told = f"part {at} {how}"
    torch.save(content, path)
    return told


def all_of(table: Any) -> list[Tensor]:
    return [part.clone() for part in table._storage.copy_all(0, 1.0)]


@pytest.mark.parametrize("make", [matrix, by_key])
def test_a_changed_snapshot_is_refused_with_our_error_and_changes_nothing(make, tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    refused = 0
    with tables.join() as world:
        table = make(world)
        table.add(torch.ones(3, 3), rows=torch.tensor([1, 4, 2]))
        good = table.snapshot(tmp_path / "good").read_bytes()
        table.add(torch.ones(2, 3), rows=torch.tensor([0, 3]))
        table.snapshot(tmp_path / "later")
        bad = table.snapshot(tmp_path / "bad")
        before = all_of(table)
        for turn in range(ROUNDS):
            bad.write_bytes(good)
            told = change(bad, draw)
            error = None
            try:
                table.restore(tmp_path / "bad")
            except Exception as exc:
                error = exc
            if error is None:
                table.add(torch.ones(5, 3), rows=torch.arange(5))
                table.restore(tmp_path / "later")
            else:
                refused += 1
            assert error is None or isinstance(error, PhalanxError), (turn, told, error)
            assert all(map(torch.equal, before, all_of(table))), (turn, told, error)
    assert refused > ROUNDS / 3


@pytest.mark.timeout(60)
def test_pipes_and_devices_in_a_snapshot_are_not_waited_for(tmp_path):
    with tables.join() as world:
        table = matrix(world)
        path = table.snapshot(tmp_path)
        path.unlink()
        path.symlink_to("/dev/zero")
        with pytest.raises(CheckpointError, match="it is a device and not a regular file"):
            table.restore(tmp_path)
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(CheckpointError, match="it is a pipe and not a regular file"):
            table.restore(tmp_path)


def test_a_snapshot_with_a_key_twice_is_refused(tmp_path):
    with tables.join() as world:
        table = by_key(world)
        table.add(torch.ones(2, 3), rows=torch.tensor([7, 9]))
        path = table.snapshot(tmp_path)
        content = torch.load(path, weights_only=True)
        content["parts"][0][1] = 7
        torch.save(content, path)
        with pytest.raises(CheckpointError, match="number of different keys must be 2, but is 1"):
            table.restore(tmp_path)
        assert table.keys().tolist() == [7, 9]


def test_workers_that_write_to_one_folder_at_once_leave_a_snapshot_that_counts(tmp_path):
    failures: list[BaseException] = []

    def write_many(world: tables.TableGroup) -> None:
        table = world.matrix(16, 4, name="x")
        try:
            for row in range(30):
                table.add(torch.full((1, 4), world.worker_id + 1.0), rows=[row % 16])
                table.snapshot(tmp_path)
        except BaseException as exc:
            failures.append(exc)

    with tables.join() as world:
        table = world.matrix(16, 4, name="x")
        workers = [world.thread_worker() for _ in range(3)]
        threads = [threading.Thread(target=write_many, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        table.restore(tmp_path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["x.snapshot"]
        for worker in workers:
            worker.close()
