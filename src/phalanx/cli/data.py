"""The data of ``phalanx train``: a file, a folder, or ``module:attribute``.

.csv .tsv           a table whose target is one column (tables_of_text.py)
.npz .npy           x and y; or x_train, y_train, x_test, y_test
a folder            pictures, one subfolder for each class; or saved by the library `datasets`
module:attribute    a Dataset, a loader, or a pair of them (training, validation)
digits              handwritten digits, which Phalanx brings with it
any other file      text in UTF-8: each byte is predicted from the bytes before it
"""

from __future__ import annotations

import csv
import hashlib
import math
import os
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from phalanx.cli.imports import import_attribute, make
from phalanx.cli.schema import Data, Schema, encode_targets
from phalanx.cli.tables_of_text import open_table, read_utf8
from phalanx.errors import ConfigError
from phalanx.warning import warn_user

_CONTEXT = 64  # bytes that each byte of a text is predicted from, at most
_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_VALIDATION_FOLDERS = ("val", "validation", "test")

Array = npt.NDArray[Any]


def open_data(
    spec: str, *, target: str | None = None, task: str = "auto", schema: Schema | None = None
) -> Data:
    """Open data, see the top of this file.

    Args:
        spec: A path, ``module:attribute``, or "digits".
        target: The column to predict; default: the last one.
        task: "classify", "regress", or "auto": words and whole numbers are classes.
        schema: Of a run, whose classes and categories are used; default: they are found.

    Raises:
        ConfigError: There is no such data, or it cannot be read.

    Example:
        >>> data = open_data("digits")
        >>> len(data.train), len(data.validation), data.schema.input_shape
        (1442, 355, (1, 8, 8))
    """
    path = Path(spec)
    if spec == "digits" and not path.exists():
        path = Path(str(files("phalanx.cli") / "assets" / "digits.npz"))
    suffix = path.suffix.lower()
    if path.is_dir() or (path.is_file() and suffix in _PICTURES):
        return _open_folder(path, target, schema)
    if not path.is_file():
        if ":" in spec:
            return _open_own(spec, task)
        raise ConfigError(
            f"`DATA` must be a file, a folder or module:attribute, but {spec!r} does not exist."
        )
    try:
        if suffix in (".csv", ".tsv"):
            return open_table(path, target=target, task=task, schema=schema)
        if suffix == ".npz":
            return _open_npz(path, task, schema)
        if suffix == ".npy":
            return _open_npy(path, target, task, schema)
        if schema is not None and schema.input_shape is not None and not schema.is_text:
            kind = "a .csv or .tsv file" if schema.columns else "arrays or pictures"
            raise ConfigError(f"`DATA` must be {kind}, as in training, but is {spec!r}. Rename it.")
        return _open_text(path)
    except ConfigError:
        raise
    except (OSError, ValueError, EOFError, csv.Error, BadZipFile) as error:
        raise ConfigError(
            f"`DATA` must be a {suffix or 'text'} file that can be read, but {spec!r} is not: "
            f"{type(error).__name__}."
        ) from error


def digest_of(spec: str) -> str | None:
    """Return a hash of a file, or of the names and sizes in a folder; None for code."""
    path = Path(spec)
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if not path.is_dir():
        return None
    found = [(str(each.relative_to(path)), each.stat().st_size) for each in path.rglob("*")]
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()


def split(data: Data, share: float, seed: int) -> tuple[Any, Any]:
    """Return the training and the validation set; the latter is None without any.

    Rows are drawn by ``seed``; of a text the end is taken.
    """
    has_rows = hasattr(data.train, "__len__") and not isinstance(data.train, DataLoader)
    if data.validation is not None or not share or not has_rows or not len(data.train):
        return data.train, data.validation
    rows = list(range(len(data.train)))
    if not data.schema.is_text:
        rows = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    cut = len(rows) - max(1, round(len(rows) * share))
    if cut < 1:
        advice = "" if len(data.schema.classes) == 1 else " Give --validation 0."
        raise ConfigError(f"`DATA` must have 2 rows or more, but has {len(rows)}.{advice}")
    return Subset(data.train, rows[:cut]), Subset(data.train, rows[cut:])


def _open_npz(path: Path, task: str, schema: Schema | None) -> Data:
    with np.load(path, allow_pickle=False) as stored:
        arrays = dict(stored)
    name = "x_train" if "x_train" in arrays else "x"
    if name not in arrays:
        raise ConfigError(
            f"`DATA` must hold x (and y), or x_train and so on, but {str(path)!r} holds "
            f"{', '.join(arrays)}."
        )
    targets = arrays.get("y_train", arrays.get("y"))
    data = _from_arrays(arrays[name], targets, task, schema, f"{name} of {path}")
    if "x_test" not in arrays:
        return data
    inputs, targets = arrays["x_test"], arrays.get("y_test")
    test = _from_arrays(inputs, targets, task, data.schema, f"x_test of {path}")
    return replace(data, validation=test.train)


def _open_npy(path: Path, target: str | None, task: str, schema: Schema | None) -> Data:
    targets = path.with_name(target or "y.npy")
    found = np.load(targets, allow_pickle=False) if targets.is_file() else None
    return _from_arrays(np.load(path, allow_pickle=False), found, task, schema, str(path))


def _from_arrays(x: Array, y: Array | None, task: str, schema: Schema | None, place: str) -> Data:
    """Make rows of arrays; bytes are pixels, and pictures without channels have one."""
    if x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        x = np.moveaxis(x, -1, 1)  # pictures have their channels last
    inputs = _floats(x, place) / (255.0 if x.dtype == np.uint8 else 1.0)
    if inputs.dim() in (1, 3):
        inputs = inputs[:, None]
    shape = tuple(inputs.shape[1:])
    known = schema.input_shape if schema is not None else None
    # Pictures may have other heights and widths: a model of convolutions takes them.
    if known is not None and (len(shape), shape[0]) != (len(known), known[0]):
        raise ConfigError(f"{place} must have rows of shape {known}, but has rows of {shape}.")
    if y is None:
        return Data(train=TensorDataset(inputs), schema=schema or Schema(input_shape=shape))
    if y.shape[:1] != x.shape[:1]:
        raise ConfigError(f"x and y must have as many rows, but have {x.shape} and {y.shape}.")
    if y.dtype.kind == "c" or (y.ndim > 1 and math.prod(y.shape[1:]) > 1):
        targets, classes = _floats(y, f"The targets of {place}"), tuple[str, ...]()
        task = "regress"
    else:
        if task == "auto" and y.dtype.kind in "iub":
            task = "classify"
        targets, task, classes = encode_targets(y.reshape(-1).tolist(), task, schema)
    outputs = len(classes) or math.prod(targets.shape[1:])
    found = Schema(task=task, input_shape=shape, num_outputs=outputs, classes=classes)
    return Data(train=TensorDataset(inputs, targets), schema=schema or found)


def _floats(array: Array, place: str) -> Tensor:
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise ConfigError(
            f"{place} must be an array of real numbers with a first dimension of rows, but is of "
            f"{array.dtype} and shape {array.shape}."
        )
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


class _Pictures(Dataset[tuple[Tensor, ...]]):
    """Pictures of subfolders, one for each class, which are decoded when they are asked for.

    With ``schema`` a folder without such subfolders, or a file, has pictures without targets.
    """

    def __init__(self, root: Path, schema: Schema | None) -> None:
        found = _find_pictures(root)
        others = found.pop("", [])
        if schema is None or found.keys() != {"."}:
            others += found.pop(".", [])
        if not found:
            raise ConfigError(
                "`DATA` must be a folder with a subfolder of pictures for each class, but "
                f"{str(root)!r} has none."
            )
        self.classes = tuple(found) if schema is None else schema.classes
        if unknown := found.keys() - {*self.classes, "."}:
            raise ConfigError(
                f"Each subfolder of {str(root)!r} must be one of the classes "
                f"{', '.join(self.classes[:20])} of the training data, but {min(unknown)!r} is "
                "none. Rename it, or move it out."
            )
        if others:
            warn_user(
                f"{len(others)} files in {root} are left out, first {others[0].name!r}: pictures "
                f"end in {', '.join(_PICTURES)}, and are in subfolders if there are any."
            )
        numbers = {name: number for number, name in enumerate(self.classes)}
        self._files = [(path, numbers.get(name)) for name in found for path in found[name]]
        home = root if root.is_dir() else root.parent
        names = [os.fsencode(path.relative_to(home)) for path, _ in self._files]
        self.names = tuple(name.decode("utf-8", "replace") for name in names)
        self.size: tuple[int, int] = (schema and schema.size) or self._open(0).size

    def __len__(self) -> int:
        return len(self._files)

    def _open(self, place: int) -> Any:  # Any: PIL has its own types
        from PIL import Image  # matplotlib brings it

        path = self._files[place][0]
        try:
            with Image.open(path) as image:
                frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
                if image.mode == "F" or frames > 1:
                    raise ValueError(f"{frames} frames of mode {image.mode}")
                if image.mode.startswith("I"):  # grey of 16 bits, which `convert` clips to 8
                    return Image.fromarray(np.asarray(image, dtype=np.float32) / 257)
                return image.convert("RGB")
        except Exception as error:  # PIL's decoders raise many kinds
            raise ConfigError(
                f"{path} must be a picture, but cannot be read: {error or type(error).__name__}. "
                "Move it out."
            ) from error

    def __getitem__(self, place: int) -> tuple[Tensor, ...]:
        pixels = np.asarray(self._open(place).resize(self.size), dtype=np.float32) / 255
        channels = torch.from_numpy(np.atleast_3d(pixels)).permute(2, 0, 1).expand(3, -1, -1)
        number = self._files[place][1]
        return (channels,) if number is None else (channels, torch.tensor(number))


def _find_pictures(root: Path) -> dict[str, list[Path]]:
    """Return the pictures below each subfolder, and of "."; under "" all else but hidden files."""
    found: dict[str, list[Path]] = {}
    for each in sorted(root.iterdir()) if root.is_dir() else [root]:
        for path in sorted(each.rglob("*")) or [each]:
            is_hidden = any(part.startswith(".") for part in path.parts[len(root.parts) :])
            if not is_hidden and not path.is_dir():
                name = "." if path == each else each.name
                is_picture = path.suffix.lower() in _PICTURES
                found.setdefault(name if is_picture else "", []).append(path)
    return found


def _open_folder(root: Path, target: str | None, schema: Schema | None) -> Data:
    if any((root / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return _open_hugging_face(root, target, schema)
    home = root / "train" if (root / "train").is_dir() else root
    train = _Pictures(home, schema)
    width, height = train.size
    if schema is None:
        schema = Schema(
            task="classify",
            input_shape=(3, height, width),
            num_outputs=len(train.classes),
            classes=train.classes,
            size=train.size,
        )
    places = [root / name for name in _VALIDATION_FOLDERS if (root / name).is_dir()]
    validation = _Pictures(places[0], schema) if places and home != root else None
    return Data(train=train, validation=validation, schema=schema, names=train.names)


def _open_hugging_face(root: Path, target: str | None, schema: Schema | None) -> Data:
    """Open a folder that `datasets` saved: one column is the target, the others are the input."""
    try:
        from datasets import load_from_disk  # optional
    except ImportError as error:
        raise ConfigError(
            f"{str(root)!r} must be read by the library `datasets`, which is not installed. "
            "Install it by `pip install datasets`."
        ) from error
    stored = load_from_disk(str(root))
    parts = dict(stored) if isinstance(stored, dict) else {"train": stored}
    training = parts.get("train", next(iter(parts.values())))
    names = list(training.column_names)
    name = (schema.target if schema else target) or next(
        (each for each in ("label", "labels") if each in names), names[-1]
    )

    def rows(part: Any) -> tuple[Array, Array | None]:
        columns = part.with_format("numpy")[:]
        y = columns.pop(name, None)
        inputs = [np.asarray(column) for column in columns.values()]
        x = inputs[0] if len(inputs) == 1 else np.stack(inputs, axis=1)
        return x, y

    data = _from_arrays(*rows(training), "auto", schema, str(root))
    data = replace(data, schema=replace(data.schema, target=name))
    others = [parts[each] for each in ("validation", "test") if each in parts]
    if not others:
        return data
    test = _from_arrays(*rows(others[0]), "auto", data.schema, str(root))
    return replace(data, validation=test.train)


def _open_text(path: Path) -> Data:
    stream = torch.frombuffer(bytearray(read_utf8(path)), dtype=torch.uint8).long()
    used = (len(stream) - 1) // _CONTEXT * _CONTEXT
    if used < 2 * _CONTEXT:
        raise ConfigError(
            f"`DATA` must be a text of more than {2 * _CONTEXT} bytes, but {str(path)!r} has "
            f"{len(stream)}."
        )
    rows = TensorDataset(stream[:used].view(-1, _CONTEXT), stream[1 : used + 1].view(-1, _CONTEXT))
    schema = Schema(task="classify", input_shape=(_CONTEXT,), num_outputs=256, is_text=True)
    return Data(train=rows, schema=schema)


def _open_own(spec: str, task: str) -> Data:
    found = make(import_attribute(spec), spec, Dataset | tuple | list | DataLoader)
    train, validation = (
        found if isinstance(found, (tuple, list)) and len(found) == 2 else (found, None)
    )
    for part in (train, validation):
        if part is not None and not hasattr(part, "__getitem__") and not hasattr(part, "__iter__"):
            raise ConfigError(
                f"`{spec}` must be a Dataset, a loader, or a pair of them, but is or holds a "
                f"{type(part).__name__}."
            )
    names = getattr(getattr(train, "dataset", train), "classes", ())  # as torchvision has them
    classes = tuple(map(str, names)) if isinstance(names, (list, tuple)) else ()
    return Data(train=train, validation=validation, schema=Schema(task=task, classes=classes))
