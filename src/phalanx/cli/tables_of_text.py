"""Tables of text: CSV and TSV with a header, where one column is the target."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from phalanx.cli.schema import Data, Schema, encode_targets, number_of
from phalanx.errors import ConfigError
from phalanx.warning import warn_user

_LOOKED_AT = 1000  # rows that a first line is compared with
_FEW = 0.1  # words among numbers, as a share, that may be mistakes


def open_table(path: Path, *, target: str | None, task: str, schema: Schema | None) -> Data:
    """Open a table; columns of words are numbered in alphabetical order, gaps are nan.

    With ``schema`` its columns are read, and the target and rows may be missing.

    Raises:
        ConfigError: The table has no header or no rows, lacks a column, or has an unknown word.
    """
    header, rows = _read(path, is_new=schema is None)
    name = (schema.target if schema is not None else target) or header[-1]
    has = f"It has {', '.join(header)}."
    if schema is None and name not in header:
        raise ConfigError(f"`--target` must be a column of {path}, but is {name!r}. {has}")
    columns = schema.columns if schema else tuple(each for each in header if each != name)
    if schema is not None and not columns:
        raise ConfigError(f"{path} is a table, but the run was trained on data without columns.")
    missing = [each for each in columns if each not in header]
    if missing:
        raise ConfigError(f"{path} must have the column {missing[0]!r}, but lacks it. {has}")
    categories = dict(schema.categories) if schema else {}
    values = {each: [row[place].strip() for row in rows] for place, each in enumerate(header)}
    inputs = torch.stack(
        [_read_column(each, values[each], categories, schema is None) for each in columns], dim=1
    )
    if name not in values:
        return Data(train=TensorDataset(inputs), schema=schema or Schema())
    targets, task, classes = encode_targets(values[name], task, schema)
    found = Schema(
        task=task,
        input_shape=(len(columns),),
        num_outputs=len(classes) or 1,
        classes=classes,
        columns=columns,
        target=name,
        categories=categories,
    )
    return Data(train=TensorDataset(inputs, targets), schema=schema or found)


def read_utf8(path: Path) -> bytes:
    """Return the content of a text; what is none, or in another encoding, is refused."""
    content = path.read_bytes()
    wrong = re.search("[\0\udc80-\udcff]", content.decode(errors="surrogateescape"))
    if wrong:
        raise ConfigError(
            f"`DATA` must be a text in UTF-8, an .npz or .npy file, or pictures, but {str(path)!r} "
            f"is none in line {wrong.string.count(chr(10), 0, wrong.start()) + 1}. Save it as one."
        )
    return content


def _read(path: Path, *, is_new: bool) -> tuple[list[str], list[list[str]]]:
    file = io.StringIO(read_utf8(path).decode("utf-8-sig"), newline="")
    unquoted = re.sub(r'"[^"]*("|$)', "", file.readline())
    file.seek(0)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=unquoted.count)
    header, *rows = [row for row in csv.reader(file, delimiter=delimiter) if row] or [[]]
    if delimiter == ";":  # then the decimal point may be a comma
        rows = [
            [re.sub(r"^\s*([+-]?\d+),(\d+)\s*$", r"\1.\2", cell) for cell in row] for row in rows
        ]
    header = [name.strip() for name in header]
    if not header or (is_new and (len(header) < 2 or not rows)):
        raise ConfigError(
            f"{path} must have a header of 2 columns or more and rows below it, but has "
            f"{len(header)} and {len(rows)}."
        )
    if len(set(header)) < len(header):
        double = next(name for name in header if header.count(name) > 1)
        raise ConfigError(
            f"{path} must have columns of different names, but has {double!r} "
            f"{header.count(double)} times. Rename them in its first line."
        )
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ConfigError(
                f"Line {number} of {path} must have {len(header)} cells, but has {len(row)}."
            )
    if rows and _is_row(header, rows):
        raise ConfigError(
            f"{path} must begin with the names of its columns, but its first line is a row: "
            f"{','.join(header):.80}. Write a line of names above it."
        )
    return header, rows


def _is_row(header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Tell whether each cell is a number in a column of numbers, or one of its column's words."""

    def fits(name: str, column: Iterable[str]) -> bool:
        cells = [cell.strip() for cell in column]
        has_words = any(number_of(cell) is None for cell in cells)
        return name in cells if has_words else number_of(name) is not None

    are_numbers = all(number_of(name) is not None for name in header)
    return are_numbers or all(map(fits, header, zip(*rows[:_LOOKED_AT], strict=True)))


def _read_column(
    name: str, texts: Sequence[str], categories: dict[str, list[str]], is_new: bool
) -> Tensor:
    """Return numbers; ``categories`` gets the words of a column that ``is_new``."""
    numbers = [number_of(text) for text in texts]
    if name not in categories:
        if all(number is not None for number in numbers):
            endless = [row for row, number in enumerate(numbers, 1) if abs(number or 0) == math.inf]
            if endless:
                raise ConfigError(
                    f"Column {name!r} must hold finite numbers, but holds "
                    f"{texts[endless[0] - 1]!r} in row {endless[0]}. Leave the cell empty."
                )
            return torch.tensor(numbers)
        if is_new:
            categories[name] = sorted(set(texts))
            words = [row for row, number in enumerate(numbers, 1) if number is None]
            if len(words) < _FEW * len(texts):
                warn_user(
                    f"Column {name!r} is read as words, because {len(words)} of its {len(texts)} "
                    f"cells are no numbers, first {texts[words[0] - 1]!r} in row {words[0]}. If "
                    "that is a mistake, leave the cell empty."
                )
    places = {word: float(place) for place, word in enumerate(categories.get(name, ()))}
    fits = [each in places for each in texts] if places else [each is not None for each in numbers]
    if not all(fits):
        row = fits.index(False)
        shown = f" ({', '.join([*places][:20])})" if places else ""
        raise ConfigError(
            f"Column {name!r} must hold {'words' if places else 'numbers'} as in the training "
            f"data{shown}, but holds {texts[row]!r} in row {row + 1}."
        )
    return torch.tensor([places[text] for text in texts])
