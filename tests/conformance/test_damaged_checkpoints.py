"""A checkpoint that was changed by somebody who made its digests anew: our error, or none.

What is refused changes nothing: a checkpoint saved afterwards has the bytes of the one before.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.callbacks import EMA, EarlyStopping, History
from phalanx.errors import CheckpointError, PhalanxError

pytestmark = pytest.mark.promise("checkpoints-are-whole")

F = nn.functional
ROUNDS = [25, pytest.param(200, marks=pytest.mark.night)]
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 5, 2**31, 2**63, 10**40, -0.5, 1e300, float("nan"), float("inf"),
    "", "x", "..", "\ud800", [], {}, [[]], [None], [1, 2, 3], {"pairs": 5}, {"pairs": [[1]]},
    {"pairs": [[[], 1]]}, {"pairs": [["step", 1]]}, {"x": 1},
]  # fmt: skip


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def one_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 10)


KINDS: dict[str, dict[str, Any]] = {
    "AdamW, StepLR and callbacks": {
        "optimizer": adamw,
        "scheduler": one_scheduler,
        "callbacks": (EMA, EarlyStopping, History, EMA),
    },
}


def open_trainer(kind: str) -> tuple[phalanx.Trainer, DataLoader[Any]]:
    from torchmetrics.classification import MulticlassAccuracy

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    data = TensorDataset(torch.randn(24, 5), torch.arange(24) % 3)
    loader = DataLoader(
        data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    callbacks = [
        EarlyStopping("train.loss") if each is EarlyStopping else each()
        for each in KINDS[kind].get("callbacks", ())
    ]
    trainer = phalanx.Trainer(
        net,
        F.cross_entropy,
        replicas=1,
        microbatches=2,
        executor="inline",
        metrics={"accuracy": MulticlassAccuracy(num_classes=3)},
        **{**KINDS[kind], "callbacks": callbacks},
    )
    return trainer, loader


# --- changes --------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the document, and make all digests anew."""
    path = folder / "checkpoint.json"
    content = json.loads(path.read_text())["content"]
    for name in content["files"]:
        if (folder / name).is_file():
            content["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    change(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"digest": digest, "content": content}))


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each place of a document as (container, key)."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places_in(value[key])


def change_document(folder: Path, draw: random.Random) -> str:
    told = ""

    def change(content: dict[str, Any]) -> None:
        nonlocal told
        container, key = draw.choice([*places_in(content)])
        told = f"{key!r} of {str(container)[:60]}: "
        what = draw.choice(["replaced", "replaced", "replaced", "removed", "twice"])
        if what == "removed" or (what == "twice" and isinstance(container, dict)):
            del container[key]
        elif what == "twice":
            container.insert(key, copy.deepcopy(container[key]))
        else:
            container[key] = draw.choice(HOSTILE)
            what = f"now {container[key]!r:.30}"
        told += what

    rewrite(folder, change)
    return told


def change_tensors(folder: Path, draw: random.Random) -> str:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = draw.choice(sorted(tensors))
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "longer": lambda t: torch.cat([t.reshape(-1), t.reshape(-1)[:1]]),
        "empty": lambda t: t.new_empty(0),
        "single": lambda t: t.new_ones(()),
        "of another dim": lambda t: t.unsqueeze(0),
        "float64": lambda t: t.double(),
        "int64": lambda t: t.nan_to_num().long(),
        "bool": lambda t: t != 0,
        "complex": lambda t: t.to(torch.complex64),
        "float8": lambda t: t.float().to(torch.float8_e4m3fn),
        "NaN": lambda t: t.double() * float("nan"),
        "large": lambda t: t.double().fill_(1e300),
        "full": lambda t: torch.full_like(t, 255 if t.dtype == torch.uint8 else -7),
    }
    what = draw.choice([*changes, "gone", "renamed", "named without a dot", "doubled"])
    tensor = tensors.pop(name)
    if what in changes:
        tensors[name] = changes[what](tensor).contiguous()
    elif what == "renamed":
        number = draw.choice(["99", "-1", "00", "1" * 30, "٣", ""])
        tensors[f"{number}.{name.partition('.')[2] or name}"] = tensor
    elif what == "named without a dot":
        tensors[name.replace(".", "")] = tensor
    elif what == "doubled":
        tensors[name] = tensor
        tensors["other." + name] = tensor.clone()
    save_file(tensors, path)
    rewrite(folder, lambda content: None)
    return f"{name!r} in {path.name}: {what}"


def change_bytes(folder: Path, draw: random.Random) -> str:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    at = draw.randrange(min(len(content), 400))  # the header, mostly
    what = draw.choice(["cut", "changed", "longer"])
    if what == "cut":
        del content[at:]
    elif what == "longer":
        content += bytes(9)
    else:
        content[at] = draw.randrange(256)
    path.write_bytes(content)
    rewrite(folder, lambda _: None)
    return f"byte {at} of {path.name}: {what}"


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def go_on(kind: str, folder: Path) -> tuple[phalanx.Trainer, DataLoader[Any]]:
    trainer, loader = open_trainer(kind)
    trainer.resume(folder)
    return trainer, loader


def error_of(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_checkpoint_is_refused_with_our_error_and_changes_nothing(
    kind: str, rounds: int, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    trainer, loader = open_trainer(kind)
    good, bad, later, now = (tmp_path / name for name in ("good", "bad", "later", "now"))
    with trainer:
        trainer.fit(loader, steps=4)  # in the middle of an epoch
        trainer.save(good)
        trainer.fit(loader, steps=1)
        trainer.save(later)
    trainer, loader = go_on(kind, later)
    trainer.save(now)
    before, refused = bytes_of(now), 0
    for turn in range(rounds):
        shutil.copytree(good, bad)
        change = draw.choice([change_document, change_document, change_tensors, change_bytes])
        told = change(bad, draw)
        error = error_of(partial(trainer.resume, bad))
        if error is not None:
            assert isinstance(error, PhalanxError), (turn, told, error)
            trainer.save(now)
            assert bytes_of(now) == before, (turn, told, error)
            refused += 1
        else:
            # What was accepted must be good for more, or refused with a sentence then.
            error = error_of(partial(trainer.fit, loader, steps=1))
            assert error is None or isinstance(error, PhalanxError), (turn, told)
            trainer.close()
            trainer, loader = go_on(kind, later)
        shutil.rmtree(bad)
    trainer.close()
    assert refused > rounds / 3


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trainer, loader = open_trainer("AdamW, StepLR and callbacks")
    with trainer:
        trainer.fit(loader, steps=4)
        trainer.save(tmp_path / "saved")
    return tmp_path / "saved"


def refused(folder: Path, message: str) -> None:
    """See that ``folder`` is refused, and that nothing has changed then."""
    trainer, loader = open_trainer("AdamW, StepLR and callbacks")
    with trainer:
        trainer.fit(loader, steps=2)
        trainer.save(folder.with_name("before"))
        with pytest.raises(CheckpointError, match=message):
            trainer.resume(folder)
        trainer.save(folder.with_name("after"))
    before, after = (bytes_of(folder.with_name(name)) for name in ("before", "after"))
    assert before == after


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["checkpoint.json", "model.safetensors", "state.pt"])
def test_pipes_and_devices_in_a_checkpoint_are_not_waited_for(saved: Path, name: str) -> None:
    (saved / name).unlink()
    os.mkfifo(saved / name)
    refused(saved, "it is a pipe and not a regular file")
    (saved / name).unlink()
    (saved / name).symlink_to("/dev/zero")
    refused(saved, "it is a device and not a regular file")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "checkpoint.json", ""]
)
def test_a_name_that_leads_out_of_the_folder_is_not_followed(saved: Path, name: str) -> None:
    shutil.copy(saved / "model.safetensors", saved.parent)

    def change(content: dict[str, Any]) -> None:
        content["files"][name] = content["files"].pop("model.safetensors")

    rewrite(saved, change)
    refused(saved, "as its files")
