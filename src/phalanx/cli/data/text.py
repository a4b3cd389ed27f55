"""Bytes of text files, cut into windows whose targets are the inputs shifted by one.

    stream    b0 b1 b2 b3 b4 b5 b6 b7 b8 …        context = 4
    inputs    [b0 b1 b2 b3] [b4 b5 b6 b7] …
    targets   [b1 b2 b3 b4] [b5 b6 b7 b8] …       both are views of the stream: no copy

Legend: W windows, T bytes of context.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from phalanx.cli.data.data import Data
from phalanx.cli.data.loader import TensorLoader, widen_tokens
from phalanx.errors import ConfigError
from phalanx.files import open_regular

TEST_FRACTION = 0.1
NUM_TEST_WINDOWS = 512
MAX_BYTES = 1 << 30


def open_text(
    where: str,
    *,
    batch_size: int,
    seed: int,
    context: int = 64,
    test_fraction: float | None = None,
) -> Data:
    """Open the bytes of a file, or of all files under a folder.

    Of a folder: every regular file in the order of its path, except hidden ones, ``__pycache__``,
    and files with a NUL byte, which are not text. Links inside it are not followed.

    The last ``test_fraction`` of the bytes is the test set, of which at most 512 windows, evenly
    spaced, are used. An epoch takes each window of the rest once, in an order drawn from ``seed``.

    Args:
        where: A path.
        batch_size: Windows per batch.
        seed: Of the order of the training windows.
        context: Bytes per window (T).
        test_fraction: Share of the stream that is kept for the test set; default 0.1.

    Shapes:
        Batches are int64 inputs_BT and targets_BT.

    Raises:
        ConfigError: There is no such file, nothing to read, more than 1 GiB, or too little for one
            window of each set; ``context`` or ``batch_size`` is less than 1.
    """
    if context < 1:
        raise ConfigError(f"`context` must be 1 byte or more, but is {context!r}.")
    name = f"text:{where}"
    stream = _read_path(Path(where).expanduser(), name)
    num_test = round(len(stream) * (TEST_FRACTION if test_fraction is None else test_fraction))
    num_train = len(stream) - num_test
    if min(num_train, num_test) < context + 1:
        raise ConfigError(
            f"`{name}` must hold at least {context + 1} bytes (`context` and one more) in both its "
            f"training and its test part, but they hold {num_train} and {num_test}. "
            "Give more text."
        )
    inputs, targets = cut_windows(stream[:num_train], context)
    train = TensorLoader(
        inputs,
        targets,
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
        prepare=widen_tokens,
    )
    inputs, targets = cut_windows(stream[num_train:], context)
    chosen = spread_evenly(len(inputs), NUM_TEST_WINDOWS)
    test = TensorLoader(
        inputs[chosen],
        targets[chosen],
        batch_size=batch_size,
        shuffle=False,
        generator=None,
        prepare=widen_tokens,
    )
    return Data(
        name=name,
        kind="tokens",
        train=train,
        test=test,
        input_shape=(context,),
        num_classes=256,
        description=(
            f"{len(stream):,} bytes of text: {train.num_rows} training and {test.num_rows} test "
            f"windows of {context} bytes"
        ),
    )


def cut_windows(stream: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """View a stream as windows of ``context`` elements and the same shifted by one.

    Elements at the end that do not fill a window and its last target are left out.

    Shapes:
        stream [N] -> inputs_WT, targets_WT; W = (N - 1) // T; views of the stream.

    Example:
        >>> inputs, targets = cut_windows(torch.arange(6), 2)
        >>> inputs.tolist(), targets.tolist()
        ([[0, 1], [2, 3]], [[1, 2], [3, 4]])
    """
    used = (len(stream) - 1) // context * context
    return stream[:used].view(-1, context), stream[1 : used + 1].view(-1, context)


def spread_evenly(total: int, wanted: int) -> Tensor:
    """Choose ``min(total, wanted)`` of ``total`` indices, evenly spaced, ascending, from 0."""
    num_chosen = min(total, wanted)
    return torch.arange(num_chosen) * total // num_chosen


def _read_path(path: Path, name: str) -> Tensor:
    if path.is_file():
        return _concatenate([path], name, keep_binary=True)
    if not path.is_dir():
        raise ConfigError(f"`{name}` must name a file or a folder, but `{path}` is neither.")
    return _concatenate(_list_files(path), name)


def _list_files(root: Path) -> list[Path]:
    """List the regular files under ``root``, sorted by path; what is hidden or a link is left."""
    found = []
    for folder, subfolders, names in os.walk(root, onerror=_raise_unreadable):
        subfolders[:] = [each for each in subfolders if each[0] != "." and each != "__pycache__"]
        paths = [Path(folder, each) for each in names if each[0] != "."]
        found += [path for path in paths if path.is_file() and not path.is_symlink()]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _raise_unreadable(exc: OSError) -> None:
    raise ConfigError(f"`{exc.filename}` must be a readable folder, but is not: {exc}.") from exc


def _concatenate(paths: Sequence[Path], name: str, *, keep_binary: bool = False) -> Tensor:
    stream = bytearray()
    for path in paths:
        try:
            with open_regular(path) as file:
                # One byte more than there is room for tells "just fits" from "too much".
                content = file.read(MAX_BYTES - len(stream) + 1)
        except OSError as exc:
            raise ConfigError(f"`{path}` must be a readable file, but is not: {exc}.") from exc
        if keep_binary or b"\0" not in content:
            stream += content
        if len(stream) > MAX_BYTES:
            raise ConfigError(
                f"`{name}` must hold at most {MAX_BYTES} bytes, but holds more. Give a part of it."
            )
    if not stream:
        raise ConfigError(f"`{name}` must hold some text, but holds none.")
    return torch.frombuffer(stream, dtype=torch.uint8)
