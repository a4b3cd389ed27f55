"""Worker processes are forks of the program: what they have, what they follow, what they print."""

from __future__ import annotations

import copy
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import phalanx
from tests.multiprocess.forked_scripts import run_forked
from tests.zoo import simple_sgd as sgd

F = nn.functional
ROOT = Path(__file__).parents[2]
PATIENCE_S = 200.0
gain = [1.0]

Change = Callable[[int], object]  # of the number of the step


def batches(count: int = 4) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=draw), torch.randint(0, 3, (8,), generator=draw))
        for _ in range(count)
    ]


def linear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))


def weights_of(net: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def trainer_of(executor: str, net: nn.Module, loss: Any = None, **options: Any) -> phalanx.Trainer:
    count = 1 if executor == "inline" else 2
    return phalanx.Trainer(
        net, loss, sgd, executor=executor, replicas=count, microbatches=2, **options
    )


def trained(
    executor: str,
    net: nn.Module,
    loss: Any = None,
    change: Change = lambda _: None,
    *,
    refreshes: bool = False,
    **options: Any,
) -> Tensor:
    """Return the weights after some steps, each of which comes after a change."""
    with trainer_of(executor, net, loss, **options) as trainer:
        for step, batch in enumerate(batches()):
            change(step)
            if refreshes:
                trainer.refresh()
            trainer.step(batch)
    return weights_of(net)


# -- what they have ----------------------------------------------------


@pytest.mark.promise("scripts-and-notebooks", "replicas-change-no-bit")
def test_nothing_need_be_importable_or_picklable_or_copyable_alike() -> None:
    """Local classes, lambdas, sentinels, cached properties, NumPy, hashes of strings."""
    missing = object()

    class Local(nn.Linear):
        default = missing

        @functools.cached_property
        def scale(self) -> float:
            return 0.5 + float(np.float64(1.5))

        def forward(self, x: Tensor, bias: Any = missing) -> Tensor:
            assert bias is missing is self.default
            assert type(self) is Local
            return super().forward(x) * self.scale * (1 + hash("text") % 7)

    def run(executor: str) -> Tensor:
        torch.manual_seed(0)
        net = Local(6, 3)
        weights = np.linspace(0.5, 1.5, 3)
        opened = open(__file__)  # noqa: SIM115 - it stays open over there

        def forward(module: nn.Module, batch: Any) -> Tensor:
            assert opened.name == __file__
            loss = F.cross_entropy(module(batch[0]), batch[1], weight=torch.tensor(weights).float())
            return loss + 1e-3 * net.weight.square().sum()

        with opened:
            return trained(executor, net, forward=forward)

    expected = run("inline")
    assert torch.equal(run("threads"), expected)
    assert torch.equal(run("processes"), expected)


def raise_a_local_error() -> None:
    class Wrong(OSError):
        def __init__(self, first: int, second: int) -> None:
            super().__init__(f"{first} and {second}")
            self.first = first

    raise Wrong(1, 2)


@pytest.mark.promise("errors-arrive-as-raised")
@pytest.mark.parametrize(
    "raising",
    [
        lambda: open("/missing/file"),  # noqa: SIM115
        lambda: b"\xff".decode(),
        lambda: compile("a b", "file", "exec"),
        raise_a_local_error,
    ],
    ids=["OSError", "UnicodeDecodeError", "SyntaxError", "local"],
)
def test_errors_of_python_arrive_with_all_that_they_tell(raising: Callable[[], object]) -> None:
    with pytest.raises((OSError, UnicodeDecodeError, SyntaxError)) as expected:
        raising()

    def forward(module: nn.Module, batch: Any) -> Tensor:
        raising()
        raise AssertionError

    with trainer_of("processes", linear(), forward=forward) as trainer:
        with pytest.raises((OSError, UnicodeDecodeError, SyntaxError)) as caught:
            trainer.step(batches()[0])
        assert caught.type.__name__ == expected.type.__name__  # a local class is made by each call
        assert str(caught.value) == str(expected.value)
        for name in ("filename", "first"):
            assert getattr(caught.value, name, None) == getattr(expected.value, name, None)


SCRIPT = """
import torch, phalanx
from torch import nn

print("once")
GAIN = 2.0

class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x) * GAIN

def told(module, batch):
    print("told" if module.training else "")
    return nn.functional.mse_loss(module(batch), torch.ones(1))

def weights(executor):
    torch.manual_seed(0)
    net = Net(5, 3)
    with phalanx.Trainer(net, None, lambda ps: torch.optim.SGD(ps, lr=0.1), forward=told,
                         executor=executor, replicas=1, microbatches=1) as trainer:
        trainer.step(torch.ones(7, 5))
    return net.weight

print(torch.equal(weights("threads"), weights("processes")))
"""


@pytest.mark.promise("scripts-and-notebooks")
def test_a_script_needs_no_guard_and_runs_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import warnings; warnings.simplefilter('ignore')" + SCRIPT)
    code, told = run_forked("python", "script.py", folder=tmp_path, deadline_s=PATIENCE_S)
    assert (code, told) == (0, "once\ntold\ntold\nTrue\n")


@pytest.mark.promise("scripts-and-notebooks")
@pytest.mark.night  # a start of Python for each
@pytest.mark.parametrize("way", ["-", "file", "-c"])
def test_a_script_needs_no_file_either(way: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = {"-": ["-"], "file": ["script.py"], "-c": ["-c", SCRIPT]}[way]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        input=SCRIPT if way == "-" else None,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout == "once\ntold\ntold\nTrue\n", done.stderr


@pytest.mark.promise("scripts-and-notebooks")
def test_cells_of_a_notebook_that_are_run_again_count_from_the_next_epoch_on() -> None:
    text = "import torch.nn.functional as F\nGAIN = 1.0\n"
    text += "def loss(x, y): return F.cross_entropy(x, y) * GAIN\n"

    def run(executor: str) -> Tensor:
        cell: dict[str, Any] = {"__name__": "__main__"}
        exec(text, cell)
        net = linear()
        with trainer_of(executor, net, lambda x, y: cell["loss"](x, y)) as trainer:
            trainer.fit(batches(), epochs=1)
            exec(text.replace("1.0", "3.0"), cell)
            trainer.fit(batches(), epochs=2)
            assert trainer.evaluate(batches())["loss"] > 1.0
        return weights_of(net)

    assert torch.equal(run("threads"), run("processes"))


# -- what they follow --------------------------------------------------


class Weighted:
    """A loss with attributes of its own."""

    def __init__(self) -> None:
        self.beta = 1.0
        self.power: Any = torch.ones(1)
        self.values = [1.0]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scale = self.beta * self.values[0] * gain[0]
        return F.cross_entropy(outputs, targets) * scale * self.power.squeeze()


def of_loss(name: str, value: Callable[[int], Any]) -> tuple[Any, Any, Change]:
    loss = Weighted()
    return linear(), loss, lambda step: setattr(loss, name, value(step))


def of_net(change: Callable[[nn.Sequential, int], object]) -> tuple[Any, Any, Change]:
    net = linear()
    return net, F.cross_entropy, lambda step: change(net, step)


def halved(self: nn.Linear, x: Tensor) -> Tensor:
    return nn.Linear.forward(self, x) * 0.5


def class_weights() -> tuple[Any, Any, Change]:
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    assert loss.weight is not None
    return linear(), loss, lambda step: loss.weight.data[1:].mul_(1.0 + step)


def closed_over() -> tuple[Any, Any, Change]:
    factor = 1.0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) * factor

    def change(step: int) -> None:
        nonlocal factor
        factor = 1.0 + step

    return linear(), loss, change


FOLLOWED: dict[str, Callable[[], tuple[Any, Any, Change]]] = {
    "a number of the loss": lambda: of_loss("beta", lambda step: 1.0 + step),
    "a tensor of the loss": lambda: of_loss("power", lambda step: torch.tensor([1.0 + step])),
    "a list of the loss that is assigned": lambda: of_loss("values", lambda step: [1.0 + step]),
    "a buffer of the loss": class_weights,
    "a rate of dropout": lambda: of_net(lambda net, step: setattr(net[1], "p", 0.2 * step)),
    "a value and back": lambda: of_net(lambda net, step: net[1].train(step % 2 == 0)),
    "a variable that the loss closes over": closed_over,
    "weights moved": lambda: of_net(
        lambda net, step: setattr(net[0].weight, "data", net[0].weight.data * 0.5)
    ),
    "a class": lambda: of_net(
        lambda net, step: setattr(net[2], "__class__", (nn.Tanh, nn.Sigmoid)[step % 2])
    ),
    "a layer": lambda: of_net(lambda net, step: net.__setitem__(2, (nn.Tanh, nn.ReLU)[step % 2]())),
    "a method": lambda: of_net(
        lambda net, step: step == 2 and setattr(net[0], "forward", MethodType(halved, net[0]))
    ),
    "frozen weights": lambda: of_net(lambda net, step: net[0].requires_grad_(step % 2 == 0)),
}


@pytest.mark.promise("attributes-are-followed", "state-is-shared")
@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_assigned_or_written_between_two_steps_counts_in_the_next(name: str) -> None:
    threads, processes = (trained(each, *FOLLOWED[name]()) for each in ("threads", "processes"))
    net, loss, _ = FOLLOWED[name]()
    assert torch.equal(threads, processes)
    assert not torch.equal(threads, trained("threads", net, loss))


@pytest.mark.promise("state-is-shared", "killed-workers-cost-no-bit")
def test_a_moving_average_that_a_loss_closes_over_teaches_in_worker_processes() -> None:
    def run(executor: str) -> Tensor:
        net, teacher = linear(), copy.deepcopy(linear()).requires_grad_(False)
        teacher.register_buffer("bias", torch.zeros(3))

        def forward(module: nn.Module, batch: Any) -> Tensor:
            outputs = module(batch[0])
            told = teacher(batch[0]) + teacher.bias
            return F.cross_entropy(outputs, batch[1]) + F.mse_loss(outputs, told)

        with trainer_of(executor, net, forward=forward) as trainer:
            for batch in batches():
                trainer.step(batch)
                for own, theirs in zip(teacher.parameters(), net.parameters(), strict=True):
                    own.data.lerp_(theirs.detach(), 0.5)
                teacher.bias.add_(0.1)
                for pid in trainer.worker_pids[:1]:
                    os.kill(pid, signal.SIGKILL)
        return weights_of(net)

    assert torch.equal(run("threads"), run("processes"))


@pytest.fixture
def put_back() -> Iterator[None]:
    yield
    gain[0] = 1.0


@pytest.mark.promise("refresh-of-workers")
@pytest.mark.usefixtures("put_back")
def test_other_changes_count_from_refresh_on() -> None:
    def run(executor: str, *, changes: bool = True) -> Tensor:
        loss = Weighted()

        def change(step: int) -> None:
            gain[0] = 1.0 + step * changes
            loss.values[0] = 1.0 + step * changes

        return trained(executor, linear(), loss, change, refreshes=True)

    assert torch.equal(run("threads"), run("processes"))
    assert not torch.equal(run("threads"), run("threads", changes=False))


@pytest.mark.promise("refresh-of-workers")
@pytest.mark.usefixtures("put_back")
def test_they_are_forked_for_an_epoch_an_evaluation_and_a_prediction() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) * gain[0]

    net = linear()
    with trainer_of("processes", net, loss) as trainer:
        trainer.step(batches()[0])
        pids = {trainer.worker_pids}
        trainer.step(batches()[0])
        assert pids == {trainer.worker_pids}
        first = trainer.evaluate(batches())["loss"]
        gain[0] = 2.0
        assert trainer.evaluate(batches())["loss"] == 2 * first
        pids.add(trainer.worker_pids)
        trainer.predict(batches())
        pids.add(trainer.worker_pids)
        trainer.fit(batches(), epochs=1)
        pids.add(trainer.worker_pids)
        assert len(pids) == 4


@pytest.mark.promise("nothing-is-left-behind")
def test_they_hold_none_of_the_programs_pipes_and_end_with_it() -> None:
    reads, writes = os.pipe()
    with trainer_of("processes", linear(), F.cross_entropy) as trainer:
        trainer.step(batches()[0])
        pids = trainer.worker_pids
        os.close(writes)
        assert os.read(reads, 1) == b""  # nobody else can write
    os.close(reads)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
