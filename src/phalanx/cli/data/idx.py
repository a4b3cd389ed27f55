"""MNIST-format (idx) files, read strictly: what the header says must be what the file holds.

Layout: a 32-bit big-endian magic number (0, 0, element type, number of dims), one 32-bit big-endian
size per dim, then the elements. Only uint8 (type 8) occurs in MNIST and its kin.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from phalanx.cli.data.data import Data
from phalanx.cli.data.loader import ScalePixels, TensorLoader
from phalanx.errors import ConfigError
from phalanx.files import open_regular
from phalanx.ipc import available_memory_bytes

HIGHEST_PIXEL = 255
_PIECE_BYTES = 1 << 20


def open_idx(folder: Path, *, batch_size: int, seed: int) -> Data:
    """Open ``train-*`` and, where present, ``t10k-*`` images and labels of one folder.

    Pixels stay uint8 in memory until a batch is made.

    Raises:
        ConfigError: A file is missing, unreadable, truncated, longer than its header says, or of
            another format; images and labels differ in number or pictures in size; ``batch_size``
            is less than 1.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"The folder of `idx:` must exist, but `{folder}` does not. "
            "Give the folder with train-images-idx3-ubyte(.gz) and its kin."
        )
    images, labels = _read_pair(folder, "train")
    scale = ScalePixels.fitted_to(images, highest=HIGHEST_PIXEL)
    num_classes = int(labels.max()) + 1
    train = TensorLoader(
        images,
        labels,
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
        prepare=scale,
    )
    test = None
    if any(_find(folder, "t10k", part) for part in ("images", "labels")):
        test_images, test_labels = _read_pair(folder, "t10k")
        _check_alike(folder, images, test_images, test_labels, num_classes)
        test = TensorLoader(
            test_images,
            test_labels,
            batch_size=batch_size,
            shuffle=False,
            generator=None,
            prepare=scale,
        )
    _, channels, height, width = images.shape
    return Data(
        name=f"idx:{folder}",
        kind="images",
        train=train,
        test=test,
        input_shape=(channels, height, width),
        num_classes=num_classes,
        description=(
            f"{folder.resolve().name}: {train.num_rows} training and "
            f"{test.num_rows if test else 'no'} test images of {height}x{width} pixels, "
            f"{num_classes} classes"
        ),
    )


def read_idx(path: Path, *, num_dims: int) -> Tensor:
    """Read one idx file of uint8 elements, gzipped if its name ends in ``.gz``.

    Never takes the header's word for memory: more than is free is refused, and a gzipped file is
    unpacked piece by piece, no further than one byte past the length that the header announces.

    Shapes:
        -> uint8, of the ``num_dims`` sizes that the header gives.

    Raises:
        ConfigError: The file cannot be read, it does not fit into memory, or its magic number, its
            sizes and its length do not agree with each other and with ``num_dims``.
    """
    try:
        # One `with` for both: closing a GzipFile does not close the file that it was given.
        with open_regular(path) as file:
            if path.suffix != ".gz":
                return _read_elements(file, path, num_dims)
            with gzip.GzipFile(fileobj=file) as unpacked:
                return _read_elements(unpacked, path, num_dims)
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        raise ConfigError(f"`{path}` must be a whole gzip file, but is not: {exc}.") from exc
    except OSError as exc:
        raise ConfigError(f"`{path}` must be a readable file, but is not: {exc}.") from exc


# GzipFile and BufferedReader share `read` and no useful base; typeshed accepts both as BinaryIO.
def _read_elements(file: BinaryIO | gzip.GzipFile, path: Path, num_dims: int) -> Tensor:
    header_bytes = 4 + 4 * num_dims
    header = file.read(header_bytes)
    magic = bytes((0, 0, 8, num_dims))
    if header[:4] != magic:
        raise ConfigError(
            f"`{path}` must begin with the magic number 0x{magic.hex()} (uint8, {num_dims} dims), "
            f"but begins with 0x{header[:4].hex()}."
        )
    if len(header) < header_bytes:
        raise ConfigError(
            f"`{path}` must hold a header of {header_bytes} bytes, but ends after {len(header)}."
        )
    sizes = struct.unpack(f">{num_dims}I", header[4:])
    if 0 in sizes:
        raise ConfigError(f"`{path}` must hold at least one element, but is of shape {sizes}.")
    num_elements = math.prod(sizes)
    available = available_memory_bytes()
    if available is not None and num_elements > available:
        raise ConfigError(
            f"`{path}` must fit into memory, of which {available} bytes are free, but its shape "
            f"{sizes} announces {num_elements} bytes."
        )
    elements = bytearray()
    # One byte more than announced: it shows a file that is too long, and makes gzip reach its end,
    # where it compares the checksum.
    while piece := file.read(min(_PIECE_BYTES, num_elements + 1 - len(elements))):
        elements += piece
    if len(elements) != num_elements:
        holds = "more" if len(elements) > num_elements else f"only {len(elements)}"
        raise ConfigError(
            f"`{path}` must hold {num_elements} bytes after its header, as its shape {sizes} says, "
            f"but holds {holds}."
        )
    return torch.frombuffer(elements, dtype=torch.uint8).view(sizes)


def _read_pair(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    images_path = _find_or_raise(folder, part, "images")
    labels_path = _find_or_raise(folder, part, "labels")
    images = read_idx(images_path, num_dims=3)
    labels = read_idx(labels_path, num_dims=1)
    if len(labels) != len(images):
        raise ConfigError(
            f"`{labels_path}` must hold one label per image of `{images_path.name}` "
            f"({len(images)}), but holds {len(labels)}."
        )
    return images.unsqueeze(1), labels.long()


def _find(folder: Path, part: str, what: str) -> Path | None:
    num_dims = 3 if what == "images" else 1
    # Both spellings are about: the dot is the original one of yann.lecun.com after unpacking.
    for separator in "-.":
        for ending in ("", ".gz"):
            path = folder / f"{part}-{what}{separator}idx{num_dims}-ubyte{ending}"
            if path.exists():
                return path
    return None


def _find_or_raise(folder: Path, part: str, what: str) -> Path:
    path = _find(folder, part, what)
    if path is None:
        num_dims = 3 if what == "images" else 1
        raise ConfigError(
            f"The folder `{folder}` must hold `{part}-{what}-idx{num_dims}-ubyte` or the same "
            "with `.gz`, but holds neither."
        )
    return path


def _check_alike(
    folder: Path, images: Tensor, test_images: Tensor, test_labels: Tensor, num_classes: int
) -> None:
    if test_images.shape[1:] != images.shape[1:]:
        raise ConfigError(
            f"Test images in `{folder}` must be of {tuple(images.shape[2:])} pixels like the "
            f"training images, but are of {tuple(test_images.shape[2:])}."
        )
    if int(test_labels.max()) >= num_classes:
        raise ConfigError(
            f"Test labels in `{folder}` must be below {num_classes}, one more than the highest "
            f"training label, but one is {int(test_labels.max())}."
        )
