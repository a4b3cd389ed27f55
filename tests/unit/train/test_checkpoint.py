"""A checkpoint is the old one or the new one, never half of each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from phalanx.errors import CheckpointError
from phalanx.train import checkpoint
from phalanx.train.checkpoint import Stored, load_stored, pack_state, save_stored, unpack_like


def stored(number: int) -> Stored:
    return Stored(tensors={"model": {"w": torch.full((3,), float(number))}}, values={"n": number})


class Crash(BaseException):
    """Stands for the power going off."""


def crash_points(monkeypatch: pytest.MonkeyPatch, folder: Path, point: int) -> bool:
    """Save, and crash before the ``point``-th change to the disk; tell if it came to that."""
    left = point

    def count(*_: object, **__: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Crash

    def before(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def step(*args: object, **kwargs: object) -> object:
            count()
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, step)

    with monkeypatch.context() as patch:
        monkeypatch = patch
        before(Path, "rename")
        before(Path, "mkdir")
        before(Path, "write_text")
        before(checkpoint.shutil, "rmtree")
        before(checkpoint, "_sync")
        before(checkpoint.safetensors.torch, "save_file")
        try:
            save_stored(stored(2), folder)
        except Crash:
            return True
    return False


def test_a_crash_at_any_point_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Counter[int]()
    for point in range(100):
        folder = tmp_path / str(point) / "checkpoint"
        save_stored(stored(1), folder)
        crashed = crash_points(monkeypatch, folder, point)
        found = load_stored(folder)
        assert found.tensors["model"]["w"].tolist() == [float(found.values["n"])] * 3
        seen[found.values["n"]] += 1
        save_stored(stored(3), folder)  # and the next save finds its way
        assert load_stored(folder).values["n"] == 3
        assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]
        if not crashed:
            break
    assert not crashed
    assert seen[1] >= 5
    assert seen[2] >= 2


def test_tensors_come_back_whatever_their_memory(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    tensors = {"t": base.t(), "tied": base, "row": base[1], "empty": torch.zeros(0, 3)}
    save_stored(Stored(tensors={"model": tensors}), tmp_path / "c")
    found = load_stored(tmp_path / "c").tensors["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_another_format_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_FORMAT", 99)
        save_stored(stored(1), tmp_path / "c")
    with pytest.raises(CheckpointError, match="must be of format 1, but is of format 99"):
        load_stored(tmp_path / "c")


def test_plain_state_keeps_its_types() -> None:
    state = {"betas": (0.9, 0.99), "milestones": Counter({5: 1}), 3: [None, True, "x", 0.1]}
    assert unpack_like(pack_state(state), state) == state
    assert isinstance(unpack_like(pack_state(state), state)["milestones"], Counter)


def test_code_is_not_stored() -> None:
    with pytest.raises(CheckpointError, match="must hold plain values"):
        pack_state({"hook": print})
