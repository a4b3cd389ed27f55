"""A user's own data set, loader, or function that gives one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from phalanx.cli.data import open_data
from phalanx.errors import ConfigError

SOURCE = """
import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

rows = torch.arange(10.0).view(5, 2)
labels = torch.tensor([0, 1, 2, 0, 1])
tensors = TensorDataset(rows, labels)

class Named(TensorDataset):
    classes = ["cat", "dog", "cow"]

class Own(Dataset):
    num_classes = 3
    def __len__(self): return 5
    def __getitem__(self, index): return rows[index], labels[index]

class Stream(IterableDataset):
    def __iter__(self): return iter([(rows[0], labels[0])] * 5)

class Batches:
    def __iter__(self): return iter([(rows, labels)])

named = Named(rows, labels)
stream = Stream()
loader = DataLoader(named, batch_size=4)
batch_list = [(rows[:2], labels[:2]), (rows[2:], labels[2:])]
pair = (tensors, batch_list)
iterator = iter(batch_list)
number = 3
mapping = {"rows": rows}
triple = (tensors, tensors, tensors)
nested = Batches
nested.inner = tensors

class Endless(Dataset):
    def __getitem__(self, index): return rows[index % 5], labels[index % 5]

class OfBits(Own):
    num_classes = numpy.int64(3)

class OfFlag(Own):
    num_classes = True

class OfOne(Own):
    num_classes = 1

class OfHalves(Own):
    num_classes = 2.5

empty = TensorDataset(rows[:0], labels[:0])
untested = (tensors, empty)
def make_pair(): return Own, tensors
def make_dataset(): return tensors
def needs_argument(folder): return tensors
def fails(): raise KeyError("own error")
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_data.py").write_text(SOURCE)
    (tmp_path / "own_broken.py").write_text("import no_such_package_anywhere")
    (tmp_path / "own_failing.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("own_data", "own_broken", "own_failing"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    ("attribute", "sizes", "has_test", "input_shape", "num_classes"),
    [
        ("tensors", [2, 2, 1], False, (2,), None),
        ("named", [2, 2, 1], False, (2,), 3),
        ("Own", [2, 2, 1], False, (2,), 3),
        ("OfBits", [2, 2, 1], False, (2,), 3),
        ("stream", [2, 2, 1], False, None, None),
        ("loader", [4, 1], False, (2,), 3),
        ("batch_list", [2, 3], False, None, None),
        ("Batches", [5], False, None, None),
        ("Batches.inner", [2, 2, 1], False, (2,), None),
        ("make_dataset", [2, 2, 1], False, (2,), None),
        ("pair", [2, 2, 1], True, (2,), None),
        ("make_pair", [2, 2, 1], True, (2,), 3),
    ],
)
def test_what_a_user_may_name(
    attribute: str,
    sizes: list[int],
    has_test: bool,
    input_shape: tuple[int, ...] | None,
    num_classes: int | None,
) -> None:
    data = open_data(f"own_data:{attribute}", batch_size=2, seed=0)
    assert data.kind == "custom"
    for _ in range(2):  # every epoch anew
        assert [len(inputs) for inputs, _ in data.train] == sizes
    assert (data.test is not None) == has_test
    assert (data.input_shape, data.num_classes) == (input_shape, num_classes)


def test_a_dataset_is_shuffled_by_its_own_generator_and_the_seed() -> None:
    def read(seed: int) -> tuple[float, ...]:
        data = open_data("own_data:tensors", batch_size=5, seed=seed)
        assert isinstance(data.train, DataLoader)
        assert isinstance(data.train.generator, torch.Generator)
        return tuple(row for _ in range(4) for x, _ in data.train for row in x[:, 0].tolist())

    before = torch.get_rng_state()
    assert read(1) == read(1)
    assert read(1) != read(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_test_set_is_read_in_order_and_leaves_the_default_generator_alone() -> None:
    data = open_data("own_data:make_pair", batch_size=5, seed=0)
    assert data.test is not None
    before = torch.get_rng_state()
    ((inputs, _),) = data.test
    assert inputs[:, 0].tolist() == [0, 2, 4, 6, 8]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("no_such_module_here:x", "Module `no_such_module_here` of .* was not found"),
        ("own_data.sub:x", r"Module `own_data\.sub` of .* was not found"),
        ("own_data:absent", "must have the attribute `absent` that `own_data:absent` names"),
        ("own_data:Own.absent", r"must have the attribute `Own\.absent`"),
        ("own_data:needs_argument", "callable without arguments, .*'folder'"),
        ("own_data:number", "must be a Dataset, .* but is a int"),
        ("own_data:mapping", "must be a Dataset, .* but is a dict"),
        ("own_data:triple", "must be a Dataset, .* but is a tuple"),
        ("own_data:rows", "must be a Dataset, .* but is a Tensor"),
        ("own_data:iterator", "once per epoch, but is a list_iterator, which runs out"),
        ("own_data:OfFlag", "`num_classes` of .* must be an int of at least 2, but is True"),
        ("own_data:OfOne", "`num_classes` of .* must be an int of at least 2, but is 1"),
        ("own_data:OfHalves", r"`num_classes` of .* must be an int of at least 2, but is 2\.5"),
        ("own_data:Endless", "must be a Dataset with `__len__`, but Endless has none"),
        ("own_data:empty", "^`own_data:empty` must hold at least one row, but its TensorDataset"),
        ("own_data:untested", "^The validation set of `own_data:untested` must hold at least one"),
        ("own data:x", "must be of the form `module:attribute`"),
        ("own_data:x:y", "must be of the form `module:attribute`"),
    ],
)
def test_what_cannot_be_data_is_refused_by_name(spec: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        open_data(spec, batch_size=2, seed=0)


@pytest.mark.parametrize(
    ("spec", "error", "note"),
    [
        ("own_broken:x", ModuleNotFoundError, "while importing `own_broken`"),
        ("own_failing:x", ZeroDivisionError, "while importing `own_failing`"),
        ("own_data:fails", KeyError, "raised by `own_data:fails`"),
    ],
)
def test_an_error_of_the_users_own_code_stays_what_it_is(
    spec: str, error: type[Exception], note: str
) -> None:
    with pytest.raises(error) as caught:
        open_data(spec, batch_size=2, seed=0)
    assert note in caught.value.__notes__[-1]
