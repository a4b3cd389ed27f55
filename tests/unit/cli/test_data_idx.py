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
