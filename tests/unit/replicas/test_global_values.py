"""What the code of a model and a loss reads of global variables, and which of it is followed."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from phalanx.replicas.global_values import GlobalValues, adopt_globals
from phalanx.replicas.packing import load

OPTIONS = """
ALPHA = 0.5
UNREAD = 1
"""

SOURCE = """
from dataclasses import dataclass
import argparse
import torch
import own_options
from torch import nn
from torch.nn import functional as F

ALPHA = 0.0
UNREAD = 1
TABLE = {"weights": [1, 2], "name": "a"}
WEIGHTS = torch.ones(3)
ARGS = argparse.Namespace(rate=0.5)
ACT = F.relu
calls = 0
lock = object()

@dataclass
class Config:
    depth: int = 2

CONFIG = Config()

def helper(x):
    return x * TABLE["weights"][0] + CONFIG.depth

def loss(out, y):
    global calls
    calls += 1
    lock
    return helper(out).mean() * ALPHA + WEIGHTS.sum() + ARGS.rate + own_options.ALPHA

class Net(nn.Module):
    scale = 1.0
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
    def forward(self, x):
        return ACT(self.layer(x)) * self.scale

def other(self, x):
    return x
"""


@pytest.fixture
def model(monkeypatch) -> Any:
    """Two modules as files would make them."""
    for name, text in (("own_options", OPTIONS), ("own_model", SOURCE)):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(text, vars(module))
    return sys.modules["own_model"]


def values_of(packed: Any) -> dict[str, Any]:
    return {
        f"{m}.{c}.{n}" if c else f"{m}.{n}": load(v) if v else "gone"
        for (m, c, n), v in packed.items()
    }


def test_what_the_code_reads_is_found_and_what_it_assigns_is_left_alone(model):
    found = values_of(GlobalValues([model.Net(), model.loss]).at_first)
    weights = found.pop("own_model.WEIGHTS")
    assert torch.equal(weights, torch.ones(3))
    assert found == {
        "own_model.ALPHA": 0.0,
        "own_model.TABLE": {"weights": [1, 2], "name": "a"},
        "own_model.ARGS": model.ARGS,
        "own_model.CONFIG": model.CONFIG,
        "own_model.ACT": torch.nn.functional.relu,
        "own_model.Config.depth": 2,
        "own_model.Net.scale": 1.0,
        "own_options.ALPHA": 0.5,
    }


def change_all(model: Any) -> None:
    model.ALPHA = 2.0
    model.TABLE["weights"][0] = 7
    model.WEIGHTS += 1
    model.ARGS.rate = 3
    model.CONFIG.depth = 5
    model.ACT = torch.nn.functional.gelu
    model.Net.scale = 4.0
    model.Net.forward = model.other
    sys.modules["own_options"].ALPHA = 6.0
    model.UNREAD = 2


def test_every_change_is_seen_once_and_kept_for_later_workers(model):
    values = GlobalValues([model.Net(), model.loss])
    assert values.changes() == {}
    change_all(model)
    changed = values_of(values.changes())
    assert torch.equal(changed.pop("own_model.WEIGHTS"), torch.full((3,), 2.0))
    assert changed["own_model.TABLE"]["weights"] == [7, 2]
    assert changed["own_model.ACT"] is torch.nn.functional.gelu
    assert {name.rpartition(".")[2] for name in changed} == {
        "ALPHA", "TABLE", "ARGS", "CONFIG", "ACT", "scale", "forward"
    }  # fmt: skip
    assert values.changes().keys() == values.changes().keys()


def test_a_worker_adopts_them_where_its_own_code_reads_them(model, monkeypatch):
    before = model.Net.forward
    change_all(model)
    packed = GlobalValues([model.Net(), model.loss]).at_first
    model.Net.scale, model.Net.forward, model.ALPHA = 1.0, before, 0.0  # as imported anew
    model.TABLE, model.WEIGHTS = {"weights": [1, 2], "name": "a"}, torch.ones(3)
    sys.modules["own_options"].ALPHA = 0.5
    adopt_globals(packed, [model.Net(), model.loss])
    assert (model.ALPHA, model.Net.scale, sys.modules["own_options"].ALPHA) == (2.0, 4.0, 6.0)
    assert model.TABLE["weights"] == [7, 2]
    assert model.Net.forward is model.other
    assert torch.equal(model.WEIGHTS, torch.full((3,), 2.0))


def test_modules_that_name_each_other_are_read_to_an_end(model):
    options = sys.modules["own_options"]
    options.own_options = options
    options.model = model
    model.own_model = model
    exec("def reads():\n    return own_options.model.own_model.ALPHA", vars(model))
    found = values_of(GlobalValues([model.reads]).at_first)
    assert found["own_model.ALPHA"] == 0.0


def test_of_large_values_and_foreign_modules_nothing_is_followed(model):
    model.TABLE = {i: i for i in range(2000)}
    model.WEIGHTS = torch.ones(1 << 20)
    found = values_of(
        GlobalValues([nn.Linear(2, 2), model.loss, torch.nn.functional.mse_loss]).at_first
    )
    assert "own_model.ALPHA" in found
    assert not {"own_model.TABLE", "own_model.WEIGHTS"} & set(found)
    assert all(name.startswith("own_") for name in found)


OBJECTS = """
import argparse, collections, dataclasses, types
import numpy as np
import torch

class Options:
    def __init__(self):
        self.rate = 1.0

class Arguments(argparse.Namespace):
    pass

@dataclasses.dataclass(slots=True)
class Slotted:
    rate: float = 1.0

plain, arguments, slotted = Options(), Arguments(rate=1.0), Slotted()
held, listed = types.SimpleNamespace(inner=Options()), [Options()]
ordered = collections.OrderedDict(rate=1.0)
counted = collections.defaultdict(float, rate=1.0)
queue = collections.deque([1.0])
array, number, statistics = np.ones(3), np.float32(1.0), {"mean": torch.ones(2)}

def loss(out, y):
    return (
        plain, arguments, slotted, held, listed, ordered, counted, queue, array, number, statistics
    )
"""


@pytest.fixture
def objects(monkeypatch) -> Any:
    module = types.ModuleType("own_objects")
    monkeypatch.setitem(sys.modules, "own_objects", module)
    exec(OBJECTS, vars(module))
    return module


def change_objects(module: Any) -> None:
    for record in (module.plain, module.arguments, module.slotted):
        record.rate = 2.0
    module.held.inner.rate = module.listed[0].rate = 2.0
    module.ordered["rate"] = module.counted["rate"] = module.queue[0] = 2.0
    module.array[0], module.number = 2.0, np.float32(2.0)
    module.statistics["mean"] += 1.0


def found_in(module: Any) -> list[float]:
    return [
        *(each.rate for each in (module.plain, module.arguments, module.slotted)),
        *(module.held.inner.rate, module.listed[0].rate, module.ordered["rate"]),
        *(module.counted["rate"], module.queue[0], float(module.array[0]), float(module.number)),
        float(module.statistics["mean"][1]),
    ]


def test_plain_objects_arrays_and_other_containers_are_followed_too(objects):
    values = GlobalValues([objects.loss])
    assert len(values.at_first) == 11
    assert values.changes() == {}
    change_objects(objects)
    changed = values.changes()
    assert len(changed) == 11
    assert values.changes() == changed
    exec(OBJECTS, vars(objects))  # as a worker imports it
    adopt_globals(changed, [objects.loss])
    assert found_in(objects) == [2.0] * 11


def test_an_object_with_code_of_its_own_for_pickle_is_left_alone(objects):
    objects.plain.__class__.__getstate__ = lambda self: pytest.fail("run")
    assert ("own_objects", "", "plain") not in GlobalValues([objects.loss]).at_first


def test_a_variable_may_become_anything_or_go(objects):
    objects.plain, objects.number, objects.held = 1.0, [1.0], 2.0
    values = GlobalValues([objects.loss])
    objects.plain, objects.number = np.ones(2), iter([])
    del objects.held
    changed = values_of(values.changes())
    assert changed.keys() == {"own_objects.plain", "own_objects.held"}
    assert changed["own_objects.held"] == "gone"
    assert changed["own_objects.plain"].tolist() == [1.0, 1.0]


def test_objects_that_name_each_other_are_read_to_an_end(objects):
    ring = [objects.Options() for _ in range(300)]
    for each in ring:
        each.others = ring
    objects.plain.rate = ring
    assert ("own_objects", "", "plain") not in GlobalValues([objects.loss]).at_first
