"""What a script or a notebook defines works in worker processes, which run neither of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from tests.zoo import simple_sgd as sgd

PATIENCE_S = 200.0
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.filterwarnings("ignore:`replicas` should be at most"),
    pytest.mark.promise("scripts-and-notebooks"),
]

NOTEBOOK = """
import dataclasses, enum, functools, threading
from typing import NamedTuple
import torch, torch.nn.functional as F
from torch import nn

GAIN = 2.0
TABLE = torch.arange(40_000.0)  # larger than what is followed
SHIFT = [0.0]
LOCK = threading.Lock()
UNREAD = threading.Lock()

class Out(NamedTuple):
    logits: torch.Tensor
    note: str

class Mode(enum.Enum):
    PLAIN = 1
    ODD = 2

@dataclasses.dataclass
class Options:
    width: int = 7
    mode: Mode = Mode.ODD

class Wrong(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.first = first

class Named(nn.Module):
    known = {}
    def __init_subclass__(cls):
        super().__init_subclass__()
        Named.known[cls.__name__] = cls

@functools.lru_cache(maxsize=3)
def scale_of(mode):
    return 3.0 if mode is Mode.ODD else 1.0

class Net(Named):
    def __init__(self, options):
        super().__init__()
        self.options = options
        self.act = lambda x: F.silu(x) * GAIN + TABLE[2]
        self.layers = nn.Sequential(nn.Linear(5, options.width), nn.Linear(options.width, 3))

    def forward(self, x):
        assert isinstance(self.options, Options) and Named.known["Net"] is Net is type(self)
        return self.layers[1](self.act(self.layers[0](x))) * scale_of(self.options.mode)

def helper(outputs, targets):
    return F.cross_entropy(outputs + SHIFT[0], targets)

loss = lambda outputs, targets: helper(outputs, targets) * GAIN

def forward_of(power):
    def forward(module, batch):
        outputs = module(batch[0])
        return F.cross_entropy(outputs, batch[1]) ** power, Out(outputs, "told"), batch[1]
    return forward

def raising(module, batch):
    if module.training:
        raise Wrong(1, 2)

def locking(module, batch):
    with LOCK:
        return F.cross_entropy(module(batch[0]), batch[1])

def maybe_locking(module, batch):
    if batch is None:
        UNREAD.acquire()
    return F.cross_entropy(module(batch[0]), batch[1])

class Locked(nn.Linear):
    lock = LOCK

class Rows:
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return TABLE[index + 1 : index + 6] / 9, torch.tensor(index % 3)

collate = lambda rows: (GAIN * torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows]))
"""


@pytest.fixture
def cell() -> dict[str, Any]:
    """What stands in a notebook after its first cell."""
    return run_in({"__name__": "__main__"}, NOTEBOOK)


def run_in(cell: dict[str, Any], text: str) -> dict[str, Any]:
    exec(text, cell)
    return cell


def make(net: nn.Module, executor: str, loss: Any = None, **options: Any) -> phalanx.Trainer:
    return phalanx.Trainer(net, loss, sgd, executor=executor, replicas=2, microbatches=3, **options)


def net_of(cell: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return cell["Net"](cell["Options"]())


def batches(count: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(7, 5, generator=generator), torch.randint(0, 3, (7,), generator=generator))
        for _ in range(count)
    ]


def weights_of(net: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def train(
    cell: dict[str, Any], executor: str, act: Any = lambda *_: None, **options: Any
) -> Tensor:
    net = net_of(cell)
    with make(net, executor, **(options or {"loss": cell["loss"]})) as trainer:
        for step, batch in enumerate(batches()):
            act(step, trainer)
            trainer.step(batch)
    return weights_of(net)


def test_classes_lambdas_and_inner_functions_train_to_the_bits_of_threads(
    cell: dict[str, Any],
) -> None:
    for options in ({"loss": cell["loss"]}, {"forward": cell["forward_of"](2.0)}):
        assert torch.equal(*(train(cell, each, **options) for each in ("threads", "processes")))


def test_cells_that_are_run_again_count_from_the_next_step_on(cell: dict[str, Any]) -> None:
    def act(step: int, trainer: phalanx.Trainer) -> None:
        cell["SHIFT"][0] = float(step)
        if step == 1:
            text = "GAIN = 5.0\nBIAS = 0.5\n"
            text += "def helper(outputs, targets): return F.cross_entropy(outputs * BIAS, targets)"
            run_in(cell, text)
        if step == 2 and trainer.worker_pids:
            os.kill(trainer.worker_pids[0], signal.SIGKILL)  # another one has to learn it all

    found = []
    for executor in ("threads", "processes"):
        run_in(cell, NOTEBOOK)
        found.append(train(cell, executor, act))
    unchanged = train(run_in(cell, NOTEBOOK), "threads")
    assert torch.equal(*found)
    assert not torch.equal(found[0], unchanged)


def test_a_new_trainer_begins_with_what_stands_there_now(cell: dict[str, Any]) -> None:
    train(cell, "processes")
    run_in(cell, "TABLE = TABLE * 2\ndef scale_of(mode): return 0.5")
    assert torch.equal(*(train(cell, each) for each in ("threads", "processes")))


def test_what_comes_back_is_of_the_classes_that_are_here(cell: dict[str, Any]) -> None:
    with make(net_of(cell), "processes", forward=cell["forward_of"](1.0)) as trainer:
        found = trainer.predict(batches())
        assert type(found) is cell["Out"]
        assert (found.note, found.logits.shape) == ("told", (21, 3))
    with (
        make(net_of(cell), "processes", forward=cell["raising"]) as trainer,
        pytest.raises(cell["Wrong"], match="1 and 2") as caught,
    ):
        trainer.step(batches()[0])
    assert caught.value.first == 1


def test_inner_functions_of_modules_see_their_modules_variables() -> None:
    captured = threading.local  # something that a closure holds by name

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        assert captured is threading.local
        return nn.functional.cross_entropy(outputs, targets) * PATIENCE_S

    class Local(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert type(self) is Local
            return super().forward(x)

    found = []
    for executor in ("threads", "processes"):
        torch.manual_seed(0)
        net = Local(5, 3)
        with make(net, executor, loss) as trainer:
            trainer.step(batches()[0])
        found.append(weights_of(net))
    assert torch.equal(*found)


# -- scripts -----------------------------------------------------------

SCRIPT = (
    NOTEBOOK
    + """
import phalanx
print("once")

def weights(executor):
    torch.manual_seed(0)
    net = Net(Options())
    batch = torch.randn(7, 5), torch.randint(0, 3, (7,))
    with phalanx.Trainer(net, loss, lambda ps: torch.optim.SGD(ps, lr=0.1), executor=executor,
                         replicas=1, microbatches=3) as trainer:
        trainer.step(batch)
    return torch.cat([each.flatten() for each in net.parameters()])

print(torch.equal(weights("threads"), weights("processes")))
"""
)


def run(*words: str, text: str | None = None, cwd: Path) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        input=text,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=PATIENCE_S,
        check=False,
    )
    return done.stdout, done.stderr


def test_a_script_needs_no_guard_and_runs_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    stdout, stderr = run("script.py", cwd=tmp_path)
    assert stdout == "once\nTrue\n", stderr


@pytest.mark.night
def test_a_module_of_a_package_may_be_run(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "options.py").write_text("gain = 4.0")
    text = SCRIPT.replace("GAIN = 2.0", "from .options import gain as GAIN")
    text = text.replace(
        "    return F.cross_entropy", "    from . import options\n    return F.cross_entropy"
    )
    (tmp_path / "package" / "script.py").write_text(text)
    stdout, stderr = run("-m", "package.script", cwd=tmp_path)
    assert stdout == "once\nTrue\n", stderr


@pytest.mark.night
@pytest.mark.parametrize("way", ["-c", "-", "-i"])
def test_a_script_need_not_be_a_file(way: str, tmp_path: Path) -> None:
    if way == "-c":
        stdout, stderr = run("-c", SCRIPT, cwd=tmp_path)
    elif way == "-i":
        (tmp_path / "script.py").write_text(SCRIPT)
        stdout, stderr = run("-i", "script.py", text="print(end='')\n", cwd=tmp_path)
    else:
        stdout, stderr = run("-", text=SCRIPT, cwd=tmp_path)
    assert stdout == "once\nTrue\n", stderr
