"""The file that a snapshot is: whole or not there, and refused where it was changed."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx import tables
from phalanx.errors import CheckpointError


def matrix(world: tables.TableGroup) -> Any:
    return world.matrix(5, 3, name="t", updater="adam", init=1.0)


def by_key(world: tables.TableGroup) -> Any:
    return world.keys(3, name="t", updater="adam")


def cut_short(content: bytes) -> bytes:
    return content[: len(content) // 2]


def with_one_other_bit(content: bytes) -> bytes:
    at = content.rindex(torch.ones(3).numpy().tobytes()) + 3  # in the exponent of a value
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


def of_another_shape(content: bytes) -> bytes:
    return changed(content, lambda parts: [*parts[:-1], parts[-1][:-1]])


def without_a_state(content: bytes) -> bytes:
    return changed(content, lambda parts: parts[:-1])


def changed(content: bytes, change: Callable[[list[Tensor]], list[Tensor]]) -> bytes:
    found = torch.load(io.BytesIO(content), weights_only=True)
    found["parts"] = change(found["parts"])
    written = io.BytesIO()
    torch.save(found, written)
    return written.getvalue()


@pytest.mark.parametrize(
    "spoil", [cut_short, with_one_other_bit, of_another_shape, without_a_state]
)
@pytest.mark.parametrize("make", [matrix, by_key])
def test_a_changed_snapshot_is_refused_and_changes_nothing(make, spoil, tmp_path):
    with tables.join() as world:
        table = make(world)
        table.add(torch.ones(3, 3), rows=torch.tensor([1, 4, 2]))
        path = table.snapshot(tmp_path)
        path.write_bytes(spoil(path.read_bytes()))
        before = table.get([1, 4, 2, 0])
        with pytest.raises(CheckpointError, match="must be a snapshot of table 't', but is not"):
            table.restore(tmp_path)
        assert torch.equal(table.get([1, 4, 2, 0]), before)


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
