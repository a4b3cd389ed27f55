"""MNIST-format files: what is read, and every way in which a file may be wrong."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from phalanx.cli.data import TensorLoader, open_data
from phalanx.cli.data.idx import read_idx
from phalanx.errors import ConfigError


def pack(elements: torch.Tensor) -> bytes:
    header = bytes((0, 0, 8, elements.ndim)) + struct.pack(f">{elements.ndim}I", *elements.shape)
    return header + bytes(elements.flatten().tolist())


IMAGES = (torch.arange(7 * 4 * 5) % 256).to(torch.uint8).view(7, 4, 5)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0], dtype=torch.uint8)


def write_folder(
    folder: Path, *, separator: str = "-", zipped: bool = False, test: bool = True
) -> Path:
    contents = {"train-images": IMAGES, "train-labels": LABELS}
    if test:
        contents |= {"t10k-images": IMAGES[:3], "t10k-labels": LABELS[:3]}
    for name, elements in contents.items():
        path = folder / f"{name}{separator}idx{elements.ndim}-ubyte{'.gz' if zipped else ''}"
        packed = pack(elements)
        path.write_bytes(gzip.compress(packed) if zipped else packed)
    return folder


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("separator", ["-", "."])
def test_images_and_labels_are_read_in_every_spelling(
    tmp_path: Path, separator: str, zipped: bool
) -> None:
    write_folder(tmp_path, separator=separator, zipped=zipped)
    data = open_data(f"idx:{tmp_path}", batch_size=2, seed=0)
    assert (data.kind, data.input_shape, data.num_classes) == ("images", (1, 4, 5), 3)
    assert isinstance(data.train, TensorLoader)
    assert torch.equal(data.train.inputs, IMAGES.unsqueeze(1))
    assert data.train.inputs.dtype == torch.uint8
    assert isinstance(data.test, TensorLoader)
    inputs, targets = next(iter(data.test))
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    mean = IMAGES.double().mean() / 255
    torch.testing.assert_close(inputs.double(), IMAGES[:2].unsqueeze(1).double() / 255 - mean)
    assert targets.tolist() == [0, 1]


def test_the_home_folder_may_be_written_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "images").mkdir()
    write_folder(tmp_path / "images")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_data("idx:~/images", batch_size=2, seed=0).num_classes == 3


def test_a_folder_without_a_test_set_has_none(tmp_path: Path) -> None:
    write_folder(tmp_path, test=False)
    assert open_data(f"idx:{tmp_path}", batch_size=2, seed=0).test is None


def test_half_a_test_set_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ConfigError, match="must hold `t10k-labels-idx1-ubyte` or"):
        open_data(f"idx:{tmp_path}", batch_size=2, seed=0)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must exist, but `.*nowhere` does not"):
        open_data(f"idx:{tmp_path / 'nowhere'}", batch_size=2, seed=0)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must hold `train-images-idx3-ubyte` or the same"):
        open_data(f"idx:{tmp_path}", batch_size=2, seed=0)


GOOD = pack(LABELS)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "must begin with the magic number 0x00000801 .*, but begins with 0x"),
        (b"\0\0", "must begin with the magic number 0x00000801 .*, but begins with 0x0000"),
        (pack(IMAGES), "must begin with the magic number 0x00000801 .*begins with 0x00000803"),
        (b"\0\0\x0d\x01" + GOOD[4:], "must begin with .*, but begins with 0x00000d01"),
        (GOOD[:6], "must hold a header of 8 bytes, but ends after 6"),
        (GOOD[:-1], r"must hold 7 bytes after its header, .*\(7,\) says, but holds only 6"),
        (GOOD + b"x", "must hold 7 bytes after its header, .* but holds more"),
        (b"\0\0\x08\x01\xff\xff\xff\xff" + b"1", "must hold 4294967295 bytes .* only 1"),
        (b"\0\0\x08\x01\0\0\0\0", r"must hold at least one element, but is of shape \(0,\)"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_that_is_not_what_it_says_is_refused_by_name(
    tmp_path: Path, content: bytes, sentence: str, zipped: bool
) -> None:
    path = tmp_path / ("labels.gz" if zipped else "labels")
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(ConfigError, match=f"`{path}` {sentence}"):
        read_idx(path, num_dims=1)


def damage(packed: bytes, place: int) -> bytes:
    return packed[:place] + bytes((packed[place] ^ 0xFF,)) + packed[place + 1 :]


ZIPPED = gzip.compress(GOOD)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(GOOD, id="not zipped at all"),
        pytest.param(ZIPPED[:-9], id="truncated"),
        pytest.param(ZIPPED[:-4], id="without its length"),
        pytest.param(damage(ZIPPED, len(ZIPPED) - 6), id="checksum"),
        pytest.param(damage(ZIPPED, 10), id="compressed bytes"),
    ],
)
def test_a_damaged_gzip_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"`{path}` must be a whole gzip file, but is not"):
        read_idx(path, num_dims=1)


def test_a_file_that_cannot_be_opened_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"`{tmp_path}` must be a readable file, but is not"):
        read_idx(tmp_path, num_dims=1)


def test_labels_that_do_not_match_the_images_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(pack(LABELS[:6]))
    with pytest.raises(ConfigError, match=r"train-labels.*one label per image.*\(7\).*holds 6"):
        open_data(f"idx:{tmp_path}", batch_size=2, seed=0)


def test_test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(pack(IMAGES[:3, :, :4].contiguous()))
    with pytest.raises(ConfigError, match=r"must be of \(4, 5\) pixels .* but are of \(4, 4\)"):
        open_data(f"idx:{tmp_path}", batch_size=2, seed=0)


def test_a_test_label_that_training_never_saw_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(pack(LABELS[:3] + 1))
    with pytest.raises(ConfigError, match=r"must be below 3, .* but one is 3"):
        open_data(f"idx:{tmp_path}", batch_size=2, seed=0)


def test_a_share_for_the_test_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`test_fraction` must be left out for `idx:"):
        open_data(f"idx:{tmp_path}", batch_size=2, seed=0, test_fraction=0.1)


@pytest.mark.parametrize("name", ["bomb", "bomb.gz"])
def test_a_header_may_not_announce_more_than_there_is_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.cli.data.idx.available_memory_bytes", lambda: 1 << 20)
    packed = bytes((0, 0, 8, 3)) + struct.pack(">3I", 1024, 32, 33) + bytes(1024 * 32 * 33)
    path = tmp_path / name
    path.write_bytes(gzip.compress(packed) if name.endswith(".gz") else packed)
    with pytest.raises(
        ConfigError, match=r"of which 1048576 bytes are free, but .* announces 1081344 bytes"
    ):
        read_idx(path, num_dims=3)
    assert read_idx(write_small(tmp_path), num_dims=3).shape == (7, 4, 5)


def write_small(folder: Path) -> Path:
    path = folder / "small"
    path.write_bytes(pack(IMAGES))
    return path
