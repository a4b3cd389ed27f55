"""`--loss` and `--forward`: what they name, and what is refused before it trains to nonsense."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.cli.app import main
from phalanx.cli.data.data import Data, Kind
from phalanx.cli.losses import (
    NamedLoss,
    build_loss,
    import_forward,
    token_cross_entropy,
)
from phalanx.errors import ConfigError

OWN = """
import torch
from torch import nn

class Halved(nn.Module):
    def forward(self, outputs, targets):
        return (outputs - targets).square().mean() / 2

class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

def absolute(outputs, targets):
    return (outputs - targets).abs().mean()

def forward(module, batch):
    return nn.functional.mse_loss(module(batch["x"]), batch["y"])

number = 3

generator = torch.Generator().manual_seed(1)
x = torch.randn(24, 4, generator=generator)
y = x.sum(1, keepdim=True)
rows = torch.utils.data.TensorDataset(x, y)
flat = torch.utils.data.TensorDataset(x, y[:, 0])
dicts = [{"x": x[:12], "y": y[:12]}, {"x": x[12:], "y": y[12:]}]

def net():
    return nn.Linear(4, 1)
"""


@pytest.fixture(autouse=True)
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_losses.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_losses", raising=False)


def data_of(kind: Kind) -> Data:
    return Data(
        name="own:data",
        kind=kind,
        train=[],
        test=None,
        input_shape=None,
        num_classes=None,
        description="",
    )


CLASSES = torch.tensor([0, 2, 1])
LOGITS = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.1, 0.0], [3.0, 1.0, 0.0]])


def test_the_loss_is_cross_entropy_over_samples_or_over_tokens() -> None:
    logits, targets = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    assert build_loss(None, data_of("tokens")) is token_cross_entropy
    assert build_loss("cross_entropy", data_of("tokens")) is token_cross_entropy
    expected = F.cross_entropy(logits.reshape(15, 7), targets.reshape(15))
    assert torch.equal(token_cross_entropy(logits, targets), expected)
    assert build_loss(None, data_of("images")) is F.cross_entropy
    assert build_loss(None, data_of("custom")) == NamedLoss("cross_entropy")
    assert build_loss("mse", data_of("custom")) == NamedLoss("mse")


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "expected"),
    [
        ("cross_entropy", LOGITS, CLASSES, F.cross_entropy),
        ("cross_entropy", LOGITS, LOGITS.softmax(1), F.cross_entropy),
        ("cross_entropy", LOGITS, CLASSES.to(torch.uint8), F.cross_entropy),
        (
            "cross_entropy",
            torch.randn(2, 3, 4),
            torch.ones(2, 4, dtype=torch.int64),
            F.cross_entropy,
        ),
        ("mse", LOGITS, LOGITS + 1, F.mse_loss),
        ("l1", LOGITS, LOGITS + 1, F.l1_loss),
        ("bce", LOGITS, LOGITS / 3, F.binary_cross_entropy_with_logits),
    ],
)
def test_a_named_loss_is_torchs(name: str, outputs: Tensor, targets: Tensor, expected: Any) -> None:
    loss = pickle.loads(pickle.dumps(NamedLoss(name)))
    assert torch.equal(loss(outputs, targets), expected(outputs, targets))


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "told"),
    [
        ("cross_entropy", torch.ones(3, 1), torch.ones(3, 1), r"Outputs .* 2 or more classes"),
        ("cross_entropy", torch.ones(3), torch.ones(3), r"Outputs .* 2 or more classes"),
        ("mse", torch.ones(3, 1), torch.ones(3), r"the outputs' shape \(3, 1\) .* shape \(3,\)"),
        ("l1", torch.ones(3), torch.ones(3, 1), r"the outputs' shape \(3,\) .* shape \(3, 1\)"),
    ],
)
def test_what_a_loss_is_not_meant_for_is_refused(
    name: str, outputs: Any, targets: Any, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        NamedLoss(name)(outputs, targets)
    assert "Give --loss" in str(raised.value)


def test_a_loss_of_ones_own_is_a_function_a_module_or_its_class() -> None:
    for attribute, expected in (("Halved", 0.5), ("absolute", 1.0)):
        loss = build_loss(f"own_losses:{attribute}", data_of("custom"))
        assert loss(torch.ones(2), torch.zeros(2)).item() == expected
    assert import_forward("own_losses:forward").__name__ == "forward"


def run(*words: str) -> int:
    """Run the command line and return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["phalanx", *words])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


def run_new(*words: str) -> int:
    return run("train", "--model", "own_losses:net", "--replicas", "2", "--out", "run", *words)


@pytest.mark.parametrize(
    "options",
    [
        ("--data", "own_losses:rows", "--loss", "mse"),
        ("--data", "own_losses:rows", "--loss", "own_losses:Halved"),
        ("--data", "own_losses:dicts", "--forward", "own_losses:forward"),
    ],
    ids=["mse", "own", "forward"],
)
def test_a_run_trains_with_the_loss_that_was_named(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_new(*options, "--epochs", "2") == 0
    again = ("train", "--resume", "run", "--model", "own_losses:net", *options)
    assert run(*again, "--epochs", "3") == 0
    assert run(*again, "--epochs", "4", "--loss", "l1") != 0
    told = " ".join(capsys.readouterr().err.split())
    assert "`--loss` must be" in told
