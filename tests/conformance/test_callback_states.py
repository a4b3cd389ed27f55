"""What callbacks have counted is in the checkpoint, all or nothing, and goes to where that goes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.errors import CheckpointError, UnsupportedError
from phalanx.train.checkpoint import unpack
from phalanx.train.state import pack_state

pytestmark = pytest.mark.promise("callbacks", "checkpoints-are-complete")

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Mean:
    """A callback of the user's own: the mean of the losses, and a tensor beside it."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.count = 0
        self.total = torch.zeros(3)
        self.breaks = breaks
        self.trainer: phalanx.Trainer | None = None

    def attach(self, trainer: phalanx.Trainer) -> None:
        self.trainer = trainer

    def __call__(self, event: object) -> None:
        if isinstance(event, phalanx.StepDone):
            self.count += 1
            self.total += event.loss

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "total": self.total, "odd": [None, (1, 2.5), {"a": "b"}]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.breaks and state["count"] != self.count:  # not, where it is put back
            raise OSError("not mine")
        assert state["odd"] == [None, (1, 2.5), {"a": "b"}]  # also where it is put back
        self.count, self.total = state["count"], state["total"].clone()


class Other(Mean):
    """Has a name of its own."""


def data(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        (torch.randn(7, 5, generator=draw), torch.randn(7, 2, generator=draw)) for _ in range(count)
    ]


def make(*callbacks: Any) -> phalanx.Trainer:
    torch.manual_seed(0)
    return phalanx.Trainer(
        nn.Linear(5, 2),
        nn.functional.mse_loss,
        sgd,
        executor="inline",
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        callbacks=callbacks,
    )


def saved(folder: Path, *callbacks: Any) -> Path:
    with make(*callbacks) as trainer:
        trainer.fit(data())
        trainer.save(folder)
    return folder


def same(ours: Mean, theirs: Mean) -> bool:
    return ours.count == theirs.count and torch.equal(ours.total, theirs.total)


def test_every_callback_gets_its_own_state(tmp_path: Path) -> None:
    first, second, other = Mean(), Mean(), Other()
    second.count = 100
    folder = saved(tmp_path / "c", first, print, second, other)
    twins = Mean(), Mean(), Other()
    with make(*twins) as trainer:
        assert all(twin.trainer is trainer for twin in twins)
        trainer.resume(folder)
    assert [twin.count for twin in twins] == [3, 103, 3]
    assert same(twins[0], first)


def test_a_state_is_given_to_a_rank_that_joins() -> None:
    ours, theirs = Mean(), Mean()
    with make(ours) as trainer, make(theirs) as newcomer:
        trainer.fit(data())
        newcomer._restore(unpack(pack_state(trainer._state(), None))["content"], "A peer")
    assert same(ours, theirs)


def test_who_is_not_in_the_checkpoint_stays_and_who_is_not_here_is_left_aside(
    tmp_path: Path,
) -> None:
    folder = saved(tmp_path / "c", Mean())
    other = Other()
    other.count = 7
    with make(other) as trainer:
        trainer.resume(folder)
        assert trainer.steps == 3
    assert other.count == 7


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def untouched(folder: Path, match: str, *callbacks: Any) -> None:
    """See that ``folder`` is refused, and that nothing has changed then."""
    with make(*callbacks) as trainer:
        trainer.fit(data(), steps=2)
        trainer.save(folder.with_name("before"))
        with pytest.raises(CheckpointError, match=match):
            trainer.resume(folder)
        trainer.save(folder.with_name("after"))
    before, after = (bytes_of(folder.with_name(name)) for name in ("before", "after"))
    assert before == after


@pytest.mark.parametrize("breaks", [0, 1])
def test_one_that_refuses_its_state_leaves_all_as_they_were(breaks: int, tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", Mean(), Mean())
    callbacks = [Mean(breaks=place == breaks) for place in range(2)]
    match = f"callback '{['Mean', 'Mean 2'][breaks]}' takes, but that raised OSError.*has changed"
    untouched(folder, match, *callbacks)


@pytest.mark.parametrize("half_way", [False, True])
@pytest.mark.parametrize(
    "kind", [nn.Linear, torch.optim.SGD, torch.optim.lr_scheduler.StepLR, Mean]
)
def test_whoever_refuses_a_state_leaves_all_as_they_were(
    kind: type, half_way: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "c", Mean())
    take = kind.load_state_dict  # type: ignore[attr-defined]
    calls = []

    def load(self: Any, state: Any, **options: Any) -> None:
        calls.append(state)
        if len(calls) > 1:  # it is put back
            take(self, state, **options)
            return
        if half_way:
            take(self, state, **options)
        raise RuntimeError("half way")

    monkeypatch.setattr(kind, "load_state_dict", load)
    untouched(folder, "raised RuntimeError", Mean())


class Odd(Mean):
    """Has a state that cannot be stored."""

    def state_dict(self) -> Any:
        return {"x": object()}


def test_a_state_that_cannot_be_stored_is_refused_before_the_training() -> None:
    with pytest.raises(UnsupportedError, match=r"`Odd.state_dict\(\)` must hold only tensors"):
        make(Odd())
