"""Snapshots that somebody has changed, with a digest made anew: our error, and nothing changed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx import tables
from phalanx.errors import CheckpointError, PhalanxError

ROUNDS = 150
HOSTILE: list[Any] = [
    None, True, -1, 2**63, 10**40, float("nan"), "", "x", "..", "../t.json", "/dev/zero", "a\0b",
    "\ud800", [], {}, [[]], [1, 2, 3], {"name": 5}, {"name": "adam"},
]  # fmt: skip
TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "longer": lambda t: torch.cat([t, t[:1]]),
    "shorter": lambda t: t[:-1],
    "wider": lambda t: torch.cat([t, t], -1),
    "of another dim": lambda t: t.unsqueeze(0),
    "single": lambda t: t.new_ones(()),
    "empty": lambda t: t.new_empty(0),
    "float64": lambda t: t.double(),
    "int32": lambda t: t.int(),
    "complex": lambda t: t.to(torch.complex64),
    "float8": lambda t: t.float().to(torch.float8_e4m3fn),
    "alike": torch.ones_like,
}


def matrix(world: tables.TableGroup) -> Any:
    return world.matrix(5, 3, name="t", updater="adam", init=1.0)


def by_key(world: tables.TableGroup) -> Any:
    return world.keys(3, name="t", updater="adam")


def seal(folder: Any, content: dict[str, Any]) -> None:
    data = folder / str(content.get("file", "x")).rpartition("/")[2]
    if "\0" not in str(data) and "\ud800" not in str(data) and data.is_file():
        content["sha256"] = hashlib.sha256(data.read_bytes()).hexdigest()
    (folder / "t.json").write_text(json.dumps(content))


def change(folder: Any, draw: random.Random) -> str:
    content = json.loads((folder / "t.json").read_text())
    what = draw.choice(["text", "text", "tensor", "tensor", "bytes"])
    data = folder / content["file"]
    if what == "text":
        where = draw.choice([content, content, content["table"], content["table"]["updater"]])
        key = draw.choice(sorted(where))
        where[key] = draw.choice(HOSTILE)
        told = f"{key} = {where[key]!r}"
    elif what == "tensor":
        tensors = load_file(data)
        name = draw.choice(sorted(tensors))
        how = draw.choice([*TENSORS, "gone"])
        tensor = tensors.pop(name)
        if how != "gone":
            tensors[name] = TENSORS[how](tensor).contiguous()
        save_file(tensors, data)
        told = f"{name} {how}"
    else:
        whole = bytearray(data.read_bytes())
        at = draw.randrange(len(whole))
        whole[at:] = draw.choice([b"", bytes([draw.randrange(256)]) + whole[at + 1 :]])
        data.write_bytes(whole)
        told = f"byte {at}"
    seal(folder, content)
    return told


def all_of(table: Any) -> list[Tensor]:
    return [part.clone() for part in table._storage.copy_all(1.0)]


@pytest.mark.parametrize("make", [matrix, by_key])
def test_a_changed_snapshot_is_refused_with_our_error_and_changes_nothing(make, tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    refused = 0
    with tables.join() as world:
        table = make(world)
        table.add(torch.ones(3, 3), rows=torch.tensor([1, 4, 2]))
        table.snapshot(tmp_path / "good")
        table.add(torch.ones(2, 3), rows=torch.tensor([0, 3]))
        table.snapshot(tmp_path / "later")
        before = all_of(table)
        for turn in range(ROUNDS):
            shutil.copytree(tmp_path / "good", tmp_path / "bad")
            told = change(tmp_path / "bad", draw)
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
            shutil.rmtree(tmp_path / "bad")
    assert refused > ROUNDS / 3


@pytest.mark.timeout(60)
def test_pipes_and_devices_in_a_snapshot_are_not_waited_for(tmp_path):
    with tables.join() as world:
        table = matrix(world)
        table.snapshot(tmp_path)
        (data,) = tmp_path.glob("*.safetensors")
        for path in (data, tmp_path / "t.json"):
            path.unlink()
            path.symlink_to("/dev/zero")
            with pytest.raises(CheckpointError, match="it is a device and not a regular file"):
                table.restore(tmp_path)
            path.unlink()
            os.mkfifo(path)
            with pytest.raises(CheckpointError, match="it is a pipe and not a regular file"):
                table.restore(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "{parent}/outside.safetensors"])
def test_a_name_that_leads_out_of_the_folder_is_not_followed(name, tmp_path):
    folder = tmp_path / "snapshot"
    with tables.join() as world:
        table = matrix(world)
        table.snapshot(folder)
        (data,) = folder.glob("*.safetensors")
        data.rename(tmp_path / "outside.safetensors")  # whole, and with the digest that is stated
        content = json.loads((folder / "t.json").read_text())
        content["file"] = name.format(parent=tmp_path)
        (folder / "t.json").write_text(json.dumps(content))
        table.add(torch.ones(2, 3), rows=torch.tensor([0, 3]))
        before = all_of(table)
        with pytest.raises(CheckpointError, match=r"snapshot/outside.safetensors' must hold"):
            table.restore(folder)
        assert all(map(torch.equal, before, all_of(table)))


def test_a_snapshot_with_a_key_twice_is_refused(tmp_path):
    with tables.join() as world:
        table = by_key(world)
        table.add(torch.ones(2, 3), rows=torch.tensor([7, 9]))
        table.snapshot(tmp_path)
        (data,) = tmp_path.glob("*.safetensors")
        save_file({**load_file(data), "keys": torch.tensor([7, 7])}, data)
        seal(tmp_path, json.loads((tmp_path / "t.json").read_text()))
        with pytest.raises(CheckpointError, match="must hold each key once, but holds 1 more"):
            table.restore(tmp_path)
        assert table.keys().tolist() == [7, 9]
