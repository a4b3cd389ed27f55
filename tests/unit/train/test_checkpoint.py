"""A checkpoint is the old one or the new one, never half of each."""

from __future__ import annotations

import contextlib
import json
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.errors import CheckpointError, ConfigError, UnsupportedError
from phalanx.train import checkpoint
from phalanx.train.checkpoint import Content, check_storable, read_checkpoint, write_checkpoint

pytestmark = pytest.mark.promise("checkpoints-are-whole")


def stored(number: int) -> Content:
    return {"model": {"w": torch.full((3,), float(number))}, "n": number}


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
        before(checkpoint, "sync_to_disk")
        before(checkpoint.safetensors.torch, "save_file")
        try:
            write_checkpoint(stored(2), folder)
        except Crash:
            return True
    return False


def test_a_crash_at_any_point_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Counter[int]()
    for point in range(100):
        folder = tmp_path / str(point) / "checkpoint"
        write_checkpoint(stored(1), folder)
        crashed = crash_points(monkeypatch, folder, point)
        found = read_checkpoint(folder)
        assert found["model"]["w"].tolist() == [float(found["n"])] * 3
        seen[found["n"]] += 1
        write_checkpoint(stored(3), folder)  # and the next save finds its way
        assert read_checkpoint(folder)["n"] == 3
        assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]
        if not crashed:
            break
    assert not crashed
    assert seen[1] >= 5
    assert seen[2] >= 2


def test_tensors_come_back_whatever_their_memory(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    tensors = {"t": base.t(), "tied": base, "row": base[1], "empty": torch.zeros(0, 3)}
    write_checkpoint({"model": tensors}, tmp_path / "c")
    found = read_checkpoint(tmp_path / "c")["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("document", [{"format": 3}, {"digest": "", "content": {"format": 1}}])
def test_another_format_is_refused_with_the_way_out(document: object, tmp_path: Path) -> None:
    write_checkpoint(stored(1), tmp_path / "c")
    (tmp_path / "c" / "checkpoint.json").write_text(json.dumps(document))
    match = "must be of format 2, but is of format [13].* load `model.safetensors`"
    with pytest.raises(CheckpointError, match=match):
        read_checkpoint(tmp_path / "c")


def test_plain_state_keeps_its_types(tmp_path: Path) -> None:
    state = {
        "betas": (0.9, 0.99),
        "milestones": Counter({5: 1}),
        3: [None, True, "x", 0.1],
        "part": torch.arange(6.0).view(2, 3)[:, 1],
    }
    check_storable("state", state)
    write_checkpoint({"model": {}, "state": state}, tmp_path / "c")
    found = read_checkpoint(tmp_path / "c")["state"]
    assert found.pop("part").tolist() == state.pop("part").tolist()  # type: ignore[attr-defined]
    assert found == state
    assert [type(each) for each in found.values()] == [tuple, Counter, list]


@pytest.mark.parametrize(
    "state",
    [print, object(), {1: np.float64(0.5)}, lambda: 0],
    ids=["function", "object", "number of NumPy's", "lambda"],
)
def test_code_is_not_stored(state: object) -> None:
    with pytest.raises(UnsupportedError, match="`state` must hold only tensors, numbers"):
        check_storable("state", {"x": [state]})


# -- places that cannot be written to -----------------------------------


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """Let the system refuse what a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [0, 1, 60, 90, 200])  # the second file has 80 and some
def test_a_disk_that_is_full_from_any_byte_on_is_told_and_keeps_the_old_one(
    num_bytes: int, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(stored(1), folder)
    with no_file_above(num_bytes), pytest.raises(CheckpointError, match="Make room"):
        write_checkpoint(stored(2), folder)
    assert read_checkpoint(folder)["n"] == 1
    assert names_in(tmp_path) == ["checkpoint"]
    write_checkpoint(stored(3), folder)
    assert read_checkpoint(folder)["n"] == 3


@pytest.mark.parametrize("place", ["file", "file/c", "loop", "nul\0", "n" * 300])
def test_a_place_that_cannot_be_is_told_and_nothing_there_is_touched(
    place: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="`folder` must be a place"):
        write_checkpoint(stored(1), tmp_path / place)
    assert names_in(tmp_path) == ["file", "loop"]
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(CheckpointError, match="must be readable and whole"):
        read_checkpoint(tmp_path / place)


def test_files_of_others_in_a_checkpoint_are_never_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(stored(1), folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"such as 'notes.txt'"):
        write_checkpoint(stored(2), folder)
    assert (folder / "notes.txt").read_text() == "mine"
    assert read_checkpoint(folder)["n"] == 1


def test_files_with_names_of_ours_that_are_no_checkpoint_are_never_removed(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds 'model.*' and no checkpoint\.json"):
        write_checkpoint(stored(1), folder)
    assert (folder / "model.safetensors").read_text() == "mine"
    assert names_in(tmp_path) == ["weights"]


@pytest.mark.parametrize("suffix", ["writing", "previous"])
@pytest.mark.parametrize("name", ["thesis.txt", "model.safetensors/thesis.txt"])
def test_files_of_others_beside_a_checkpoint_are_never_removed(
    name: str, suffix: str, tmp_path: Path
) -> None:
    folder, beside = tmp_path / "mine", tmp_path / f"mine.{suffix}"
    write_checkpoint(stored(1), folder)
    (beside / name).parent.mkdir(parents=True)
    (beside / name).write_text("precious")
    with pytest.raises(ConfigError, match=rf"`{beside}` holds .* Move that away, or give another"):
        write_checkpoint(stored(2), folder)
    assert (beside / name).read_text() == "precious"
    assert read_checkpoint(folder)["n"] == 1
    assert names_in(tmp_path) == ["mine", f"mine.{suffix}"]


@pytest.mark.parametrize("suffix", ["writing", "previous"])
@pytest.mark.parametrize("target", ["victim", "absent"])
def test_a_link_beside_a_checkpoint_is_not_followed(
    target: str, suffix: str, tmp_path: Path
) -> None:
    folder, beside = tmp_path / "mine", tmp_path / f"mine.{suffix}"
    write_checkpoint(stored(1), folder)
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "model.safetensors").write_text("precious")
    beside.symlink_to(tmp_path / target)
    with pytest.raises((ConfigError, CheckpointError), match=f"`folder` must .*{beside}"):
        write_checkpoint(stored(2), folder)
    assert (tmp_path / "victim" / "model.safetensors").read_text() == "precious"
    assert read_checkpoint(folder)["n"] == 1
    assert not folder.is_symlink()
    assert names_in(tmp_path) == ["mine", f"mine.{suffix}", "victim"]


def test_what_one_that_was_killed_has_left_is_written_over(tmp_path: Path) -> None:
    folder, left = tmp_path / "mine", tmp_path / "mine.writing"
    left.mkdir()
    for name in ("model.safetensors", ".tmpPrrcqP"):  # the latter safetensors has left
        (left / name).write_text("half")
    write_checkpoint(stored(1), folder)
    assert read_checkpoint(folder)["n"] == 1
    assert names_in(folder) == ["checkpoint.json", "model.safetensors", "state.pt"]
    assert names_in(tmp_path) == ["mine"]


def test_the_current_directory_is_not_pulled_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="current directory"):
        write_checkpoint(stored(1), Path())
    assert Path.cwd() == tmp_path


def test_two_that_write_the_same_folder_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint"
    put_in_place = checkpoint._put_in_place

    def meanwhile(fresh: Path, place: Path) -> None:
        with pytest.raises(CheckpointError, match="another is writing"):
            write_checkpoint(stored(2), folder)
        put_in_place(fresh, place)

    monkeypatch.setattr(checkpoint, "_put_in_place", meanwhile)
    write_checkpoint(stored(1), folder)
    assert read_checkpoint(folder)["n"] == 1
    assert names_in(tmp_path) == ["checkpoint"]


def test_a_document_nested_without_end_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(stored(1), folder)
    (folder / "checkpoint.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="must be readable and whole"):
        read_checkpoint(folder)


def test_complex_numbers_of_both_widths_come_back(tmp_path: Path) -> None:
    values = torch.tensor([[1 + 2j, -0.1j], [3.0, torch.inf]], dtype=torch.complex128)
    written = {
        "c": values.conj(),
        "d": values.to(torch.complex64),
        "e": values.sum(),
        "f": values.real,
    }
    write_checkpoint({"model": written}, tmp_path / "c")
    read = read_checkpoint(tmp_path / "c")["model"]
    for name, value in written.items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name], value)
