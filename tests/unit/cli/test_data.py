"""Data of every kind becomes rows, and a schema by which later data is read."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from phalanx.cli.data import open_data, split
from phalanx.cli.schema import Schema, encode_targets
from phalanx.errors import ConfigError

pytestmark = pytest.mark.promise("command-line")

FLOWERS = """size;colour;kind
1.5;red;rose
;blue;tulip
3;red;rose
"""


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def rows_of(dataset: object) -> list[list[object]]:
    return [[part.tolist() for part in dataset[place]] for place in range(len(dataset))]


# --- tables ---------------------------------------------------------------------------------------


def test_a_table_has_numbers_words_gaps_and_classes(tmp_path):
    data = open_data(written(tmp_path / "flowers.csv", FLOWERS))
    schema = data.schema
    assert (schema.task, schema.classes, schema.num_outputs) == ("classify", ("rose", "tulip"), 2)
    assert (schema.columns, schema.target) == (("size", "colour"), "kind")
    assert schema.categories == {"colour": ["blue", "red"]}
    first, second, third = rows_of(data.train)
    assert (first, third) == ([[1.5, 1.0], 0], [[3.0, 1.0], 0])
    assert np.isnan(second[0][0])
    assert second[0][1:] + second[1:] == [0.0, 1]


def test_a_schema_goes_through_json_and_reads_other_data(tmp_path):
    schema = open_data(written(tmp_path / "flowers.csv", FLOWERS)).schema
    stored = Schema.from_json(json.loads(json.dumps(dataclasses.asdict(schema))))
    assert stored == schema
    later = written(tmp_path / "later.tsv", "colour\textra\tsize\nred\t9\t2\n")
    assert rows_of(open_data(later, schema=stored).train) == [[[2.0, 1.0]]]
    none = written(tmp_path / "none.CSV", "colour;size\n")
    assert len(open_data(none, schema=stored).train) == 0
    with_targets = written(tmp_path / "more.csv", "kind,colour,size\ntulip,red,2\n")
    assert rows_of(open_data(with_targets, schema=stored).train) == [[[2.0, 1.0], 1]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size,colour\n1,green\n", "Column 'colour' must hold words as in the training data"),
        ("size,kind\n1,rose\n", "must have the column 'colour', but lacks it. It has size, kind."),
        ("size,colour,kind\n1,red,oak\n", "must be one of the classes rose, tulip"),
        ("size,colour\n1,red,3\n", "Line 2 of .* must have 2 cells, but has 3"),
        ("size,colour\n1,red\n-inf,red\n", "Column 'size' must hold finite .* '-inf' in row 2"),
        ("1,2\n3,4\n", "must begin with the names of its columns"),
        ("1.5, red,rose\n3,blue,oak\n2, red,rose\n", "its first line is a row: 1.5,red,rose. Wr"),
        ("size,colour,size\n1,red,2\n", "of different names, but has 'size' 2 times. Rename"),
        ("size,colour\n1,red\n1_000,red\n", "must hold numbers as in the .* '1_000' in row 2"),
        ("", "must have a header of 2 columns or more and rows below"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path, text, message):
    schema = open_data(written(tmp_path / "flowers.csv", FLOWERS)).schema
    with pytest.raises(ConfigError, match=message):
        open_data(written(tmp_path / "other.csv", text), schema=schema)


def test_a_run_of_a_table_takes_tables(tmp_path):
    schema = open_data(written(tmp_path / "flowers.csv", FLOWERS)).schema
    with pytest.raises(ConfigError, match=r"must be a \.csv or \.tsv file, as in training"):
        open_data(written(tmp_path / "flowers.txt", FLOWERS), schema=schema)


def test_a_few_words_among_numbers_are_warned_of(tmp_path):
    rows = [*(f"{row},0" for row in range(10)), "x,1"]
    with pytest.warns(UserWarning, match="1 of its 11 cells are no numbers, first 'x' in row 11"):
        open_data(written(tmp_path / "typo.csv", "\n".join(["size,kind", *rows])))


def test_names_of_columns_may_be_numbers_and_have_separators(tmp_path):
    text = '"a, b, c";b;y\n1;2,5;u\n2;3;v\n'  # as spreadsheets write it in many countries
    data = open_data(written(tmp_path / "quoted.csv", text))
    assert data.schema.columns == ("a, b, c", "b")
    assert rows_of(data.train)[0] == [[1.0, 2.5], 0]
    text = "country,2019,2020,grows\nA,1,2,yes\nB,2,1,no\n"
    data = open_data(written(tmp_path / "wide.csv", text))
    assert data.schema.columns == ("country", "2019", "2020")
    assert len(data.train) == 2


@pytest.mark.parametrize(
    ("values", "asked", "task", "classes", "targets"),
    [
        (["b", "a", "b"], "auto", "classify", ("a", "b"), [1, 0, 1]),
        ([3, 10, 3], "auto", "classify", ("3", "10"), [0, 1, 0]),
        (["1.5", "2", "1"], "auto", "regress", (), [[1.5], [2.0], [1.0]]),
        ([1, 2], "regress", "regress", (), [[1.0], [2.0]]),
        ([0.5, 1.5], "classify", "classify", ("0.5", "1.5"), [0, 1]),
        (["7", "007", "7.0"], "auto", "classify", ("7",), [0, 0, 0]),
        (["7", "007", "1e3", "x"], "auto", "classify", ("x", "007", "7", "1e3"), [2, 1, 3, 0]),
        ([2**53 + 1, str(2**53)], "auto", "classify", (str(2**53), str(2**53 + 1)), [1, 0]),
    ],
)
def test_targets_decide_the_task(values, asked, task, classes, targets):
    found, found_task, found_classes = encode_targets(values, asked, None)
    assert (found.tolist(), found_task, found_classes) == (targets, task, classes)


def test_many_whole_numbers_are_regressed_unless_they_repeat():
    assert encode_targets(range(30), "auto", None)[1] == "regress"
    assert encode_targets([*range(30)] * 30, "auto", None)[1] == "classify"


def test_words_are_no_numbers_to_regress():
    with pytest.raises(ConfigError, match="is a word in 1 of 2 rows"):
        encode_targets(["1.5", "x"], "regress", None)


@pytest.mark.parametrize("gap", ["", " NaN", float("nan")])
@pytest.mark.parametrize("task", ["auto", "regress", "classify"])
def test_a_row_without_a_target_is_refused(gap, task):
    with pytest.raises(ConfigError, match="in 1 of 3 rows, first in row 2"):
        encode_targets([1.5, gap, 2.25], task, None)


# --- arrays, pictures, text -----------------------------------------------------------------------


def test_arrays_have_pixels_labels_and_a_test_set(tmp_path):
    x = np.full((4, 3, 3), 255, dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=[1, 0, 1, 2], x_test=x[:1], y_test=[2])
    data = open_data(str(tmp_path / "a.npz"))
    assert (data.schema.input_shape, data.schema.classes) == ((1, 3, 3), ("0", "1", "2"))
    assert data.train[0][0].tolist() == [[[1.0] * 3] * 3]
    assert rows_of(data.validation)[0][1] == 2
    np.savez(tmp_path / "last.npz", x=np.ones((4, 5, 6, 3)), y=[0, 1, 0, 1])
    assert open_data(str(tmp_path / "last.npz")).schema.input_shape == (3, 5, 6)
    np.save(tmp_path / "x.npy", np.zeros((3, 5)))
    assert open_data(str(tmp_path / "x.npy")).schema == Schema(input_shape=(5,))
    np.save(tmp_path / "y.npy", np.zeros((3, 2)))
    several = open_data(str(tmp_path / "x.npy")).schema
    assert (several.task, several.num_outputs) == ("regress", 2)


@pytest.mark.parametrize("name", ["a.npz", "a.npy"])
def test_a_file_of_another_kind_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"must be a \{name[1:]} file that can be read"):
        open_data(written(tmp_path / name, "no array"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros(3)}, "must hold x .* holds images"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, r"as many rows, but have \(3, 2\) and \(2,\)"),
        ({"x": np.array(["a", "b"])}, "x of .* must be an array of real numbers .* is of <U1"),
        ({"x": np.float64(3)}, r"x of .* with a first dimension of rows, .* and shape \(\)"),
        ({"x": np.zeros((3, 2), complex)}, "x of .* must be an array of real .* of complex128"),
        ({"x": np.zeros(3), "y": np.zeros(3, complex)}, "targets of .* must be .* of complex128"),
        ({"x": np.zeros((3, 2)), "x_test": np.zeros((3, 4))}, r"x_test of .*\(2,\), .* \(4,\)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ConfigError, match=message):
        open_data(str(tmp_path / "a.npz"))


def test_pictures_of_a_folder_have_the_classes_of_its_subfolders(tmp_path):
    for part in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            Image.new("RGB", (6, 4), (255 * number, 0, 0)).save(folder / "1.png")
    data = open_data(str(tmp_path))
    assert (data.schema.classes, data.schema.size) == (("cat", "dog"), (6, 4))
    inputs, target = data.validation[1]
    assert (tuple(inputs.shape), inputs.amax().item(), target.item()) == ((3, 4, 6), 1.0, 1)
    flat = tmp_path / "train" / "cat"
    with pytest.raises(ConfigError, match="a subfolder of pictures"):
        open_data(str(flat))
    (flat / "notes.txt").touch()
    with pytest.warns(
        UserWarning, match=r"1 files in .* left out, first 'notes.txt': pictures end"
    ):
        found = open_data(str(flat), schema=data.schema)
    assert (found.names, len(found.train[0])) == (("1.png",), 1)
    assert open_data(str(flat / "1.png"), schema=data.schema).names == ("1.png",)


def test_no_picture_is_lost(tmp_path):
    grey = np.linspace(0, 65535, 24).reshape(4, 6).astype(np.uint16)
    for name in ("train/cat/1", "train/.hidden/1", "val/cat/1", "new/cat/1", "new/Cat/1"):
        (tmp_path / name).parent.mkdir(parents=True)
        Image.fromarray(grey).save(tmp_path / f"{name}.{'tif' if 'val' in name else 'png'}")
    (tmp_path / "train" / "__pycache__").mkdir()
    data = open_data(str(tmp_path))
    assert (data.schema.classes, len(data.validation)) == (("cat",), 1)
    expected = torch.from_numpy(grey / np.float32(65535)).expand(3, -1, -1)
    torch.testing.assert_close(data.train[0][0], expected)
    with pytest.raises(ConfigError, match=r"one of the classes cat of .*, but 'Cat' is none"):
        open_data(str(tmp_path / "new"), schema=data.schema)
    frames = [Image.new("L", (6, 4), shade) for shade in (0, 99)]
    frames[0].save(tmp_path / "train/cat/2.gif", save_all=True, append_images=frames[1:])
    with pytest.raises(ConfigError, match=r"2\.gif must be a picture, .* 2 frames of mode"):
        open_data(str(tmp_path)).train[1]
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(ConfigError, match=r"cat/0\.png must be a picture, but cannot be read"):
        open_data(str(tmp_path))


def test_each_byte_of_a_text_follows_its_context(tmp_path):
    data = open_data(written(tmp_path / "book.txt", "abcdefgh" * 50))
    assert data.schema.is_text
    inputs, targets = data.train[0]
    assert inputs[1:].tolist() == targets[:-1].tolist()
    train, validation = split(data, 0.2, seed=0)
    assert (train.indices, validation.indices) == ([0, 1, 2, 3, 4], [5])
    with pytest.raises(ConfigError, match="a text of more than 128 bytes"):
        open_data(written(tmp_path / "short.txt", "abc"))
    for name, content in (("a.bin", b"a\n" * 99 + b"\0"), ("a.csv", b"a\n" * 99 + b"\xe9")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"text in UTF-8, .*{name}' is none in line 100"):
            open_data(str(tmp_path / name))


# --- code of the user's own -----------------------------------------------------------------------

OWN = """
from torch.utils.data import TensorDataset
import torch
rows = TensorDataset(torch.ones(4, 2), torch.zeros(4))
def both():
    return rows, rows
def broken():
    raise ArithmeticError("mine")
number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_rows.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_rows", None)


def test_data_of_ones_own_is_an_object_or_made_by_a_function(own):
    assert open_data("own_rows:rows").validation is None
    assert len(open_data("own_rows:both").validation) == 4
    with pytest.raises(ArithmeticError) as caught:
        open_data("own_rows:broken")
    assert caught.value.__notes__ == ["raised by `own_rows:broken`"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("own_rows:number", "must be a Dataset, a loader, or a pair"),
        ("own_rows:lacking", "must have the attribute `lacking`"),
        ("lacking:rows", "must be importable, but was not found"),
        ("own_rows:no name", "must be of the form"),
        ("lacking.csv", "must be a file, a folder or module:attribute, but .* does not exist"),
    ],
)
def test_data_that_is_not_there_is_refused(own, spec, message):
    with pytest.raises(ConfigError, match=message):
        open_data(spec)


def test_the_seed_decides_the_rows_of_the_validation(own):
    data = open_data("own_rows:rows")
    one, same, other = (split(data, 0.25, seed)[1].indices for seed in (0, 0, 3))
    assert one == same
    assert len({*one, *split(data, 0.25, 0)[0].indices}) == 4
    assert other != one
    assert split(data, 0.0, 0) == (data.train, None)


def test_a_saved_dataset_of_hugging_face_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"a": [1.0, 2.0], "b": [3.0, 4.0], "label": [1, 0]})
    rows.save_to_disk(str(tmp_path / "saved"))
    data = open_data(str(tmp_path / "saved"))
    assert rows_of(data.train) == [[[1.0, 3.0], 1], [[2.0, 4.0], 0]]
    assert (data.schema.target, data.schema.classes) == ("label", ("0", "1"))
    assert torch.is_tensor(data.train[0][0])
