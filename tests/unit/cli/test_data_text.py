"""Text: which files are read, how they are cut, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from phalanx.cli.data import Data, TensorLoader, open_data
from phalanx.cli.data.text import cut_windows, spread_evenly
from phalanx.errors import ConfigError


def open_small(where: object, **settings: object) -> Data:
    settings = {"batch_size": 2, "seed": 0, "context": 4, **settings}
    return open_data(f"text:{where}", **settings)  # type: ignore[arg-type]


def read_stream(data: Data) -> bytes:
    """Everything that the training windows hold, in the order of the stream."""
    assert isinstance(data.train, TensorLoader)
    return bytes(data.train.inputs.flatten().tolist())


def test_windows_cover_the_stream_once_and_targets_are_the_next_byte(tmp_path: Path) -> None:
    content = bytes(range(100))
    path = tmp_path / "text"
    path.write_bytes(content)
    data = open_small(path, batch_size=3)
    assert (data.kind, data.input_shape, data.num_classes) == ("tokens", (4,), 256)
    batches = list(data.train)
    for inputs, targets in batches:
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)
    starts = [row[0] for inputs, _ in batches for row in inputs.tolist()]
    assert starts != sorted(starts)
    assert sorted(starts) == list(range(0, 88, 4))  # 90 bytes are for training
    assert data.test is not None
    assert [row for inputs, _ in data.test for row in inputs.tolist()] == [
        [90, 91, 92, 93],
        [94, 95, 96, 97],
    ]


@pytest.mark.parametrize(
    ("length", "context", "windows"), [(5, 4, 1), (8, 4, 1), (9, 4, 2), (6, 5, 1), (3, 1, 2)]
)
def test_a_window_needs_one_element_more_for_its_last_target(
    length: int, context: int, windows: int
) -> None:
    inputs, targets = cut_windows(torch.arange(length), context)
    assert inputs.shape == targets.shape == (windows, context)
    assert torch.equal(targets, inputs + 1)


def test_windows_are_views_of_compact_bytes() -> None:
    stream = torch.arange(9, dtype=torch.uint8)
    inputs, targets = cut_windows(stream, 2)
    assert inputs.data_ptr() == stream.data_ptr()
    assert targets.data_ptr() == stream.data_ptr() + 1


@pytest.mark.parametrize(
    ("total", "wanted", "chosen"),
    [(3, 5, [0, 1, 2]), (5, 5, [0, 1, 2, 3, 4]), (10, 4, [0, 2, 5, 7])],
)
def test_indices_are_spread_evenly(total: int, wanted: int, chosen: list[int]) -> None:
    assert spread_evenly(total, wanted).tolist() == chosen


def test_the_test_set_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abcd" * 10_000)
    data = open_small(path, test_fraction=0.5)
    assert isinstance(data.test, TensorLoader)
    assert data.test.num_rows == 512


def test_a_folder_is_read_in_order_without_hidden_binary_cached_or_linked_files(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    content_by_path = {
        "b.txt": b"b" * 40,
        "a/z.py": b"z" * 40,
        "a/y": b"y" * 20,
        "a.txt": b"a" * 20,
        "empty": b"",
        ".hidden": b"H" * 40,
        ".git/config": b"G" * 40,
        "__pycache__/b.pyc": b"P" * 40,
        "binary": b"B\0B" * 20,
    }
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"L" * 40)
    for path, content in content_by_path.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    (root / "linked_folder").symlink_to(outside)
    (root / "linked_file").symlink_to(outside / "file")
    (root / "dangling").symlink_to(root / "nowhere")
    os.mkfifo(root / "pipe")
    # 120 bytes, of which 6 are for the test set and one more is a target only.
    stream = read_stream(open_small(root, test_fraction=0.05, context=1))
    assert stream == (b"y" * 20 + b"z" * 40 + b"a" * 20 + b"b" * 40)[:113]


def test_a_single_file_is_read_even_if_binary(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\0" * 100)
    assert open_small(path).num_classes == 256


def test_the_seed_decides_the_order_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 2)
    one, same, other = (open_small(path, seed=seed, batch_size=999) for seed in (1, 1, 2))
    assert read_stream(one) == read_stream(other)
    (first,), (again,), (another,) = one.train, same.train, other.train
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], another[0])


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 44)
    with pytest.raises(ConfigError, match=r"at least 5 bytes .* they hold 40 and 4"):
        open_small(path)
    path.write_bytes(b"x" * 45)
    with pytest.raises(ConfigError, match="they hold 41 and 4"):
        open_small(path)
    path.write_bytes(b"x" * 50)
    assert open_small(path).test is not None
