"""What broke under attack once, and must not again: each test is one way to misuse or interrupt."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import phalanx
from phalanx.errors import ConfigError
from tests.zoo import assert_same_bits, state_of
from tests.zoo import simple_sgd as sgd

mse = nn.functional.mse_loss
Params = list[nn.Parameter]


def adam(params: Params) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def batch(seed: int = 0, rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 1, generator=generator)


def trainer(module: nn.Module | None = None, make: Callable[..., Any] = sgd, **kw: Any) -> Any:
    return phalanx.Trainer(
        module or net(), mse, make, **{"microbatches": None, "replicas": 2, **kw}
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a weakref
@pytest.mark.promise("interrupts-leave-whole-steps")
def test_an_interrupt_at_any_moment_leaves_a_whole_number_of_steps() -> None:
    """Retried from `steps` until 25 are done, the weights are those of an undisturbed run."""

    def train(disturb: bool) -> tuple[dict[str, Tensor], int]:
        interrupts = 0
        with trainer(
            make=adam, microbatches=3, scheduler=lambda o: StepLR(o, 3), scheduler_interval="step"
        ) as t:
            t.step(batch(0))  # threads are open from here on
            while t.steps < 25:
                if disturb:
                    signal.setitimer(signal.ITIMER_REAL, 0.0004 + 0.0001 * (interrupts % 37))
                try:
                    t.step(batch(t.steps))
                except KeyboardInterrupt:
                    interrupts += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            return state_of(t.module), interrupts

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        expected, _ = train(disturb=False)
        found, interrupts = 0, 0
        for _ in range(4):
            try:
                got, count = train(disturb=True)
            except KeyboardInterrupt:  # it struck between two statements of this test
                continue
            assert_same_bits(got, expected)
            found += 1
            interrupts += count
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert found >= 1
    assert interrupts > 10


class Branching(nn.Module):
    """Without positive first numbers, `side` gets no gradient, and `main` one that is NaN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.main, self.side = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x) + (self.side(x) if (x[:, 0] > 0).all() else (self.main(x) * 0).sqrt())


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_a_step_that_clipping_refuses_changes_nothing(executor: str, tmp_path: Path) -> None:
    def train(*, with_refused: bool) -> tuple[bytes, ...]:
        options: dict[str, Any] = {"executor": executor, "replicas": 3, "clip_norm": 0.5}
        with trainer(Branching(), make=adam, **options) as t:
            for seed in range(3):
                inputs, targets = batch(seed)
                inputs[:, 0].abs_()
                t.step((inputs, targets))
                if with_refused and seed == 1:
                    inputs[:, 0].neg_()
                    with pytest.raises(ConfigError, match="norm must be finite to be clipped"):
                        t.step((inputs, targets))
            t.save(tmp_path)
        return tuple(each.read_bytes() for each in sorted(tmp_path.iterdir()))

    assert train(with_refused=True) == train(with_refused=False)


@pytest.mark.parametrize("first", ["evaluate", "predict"])
@pytest.mark.parametrize("executor", ["inline", "threads", "processes"])
def test_who_evaluates_in_inference_mode_trains_afterwards(executor, first) -> None:
    replicas = 1 if executor == "inline" else 2
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with trainer(make=adam, executor=executor, replicas=replicas) as ours:
            with mode():
                getattr(ours, first)([batch()])
            ours.step(batch())
            with mode():
                ours.close()
            assert not any(parameter.is_inference() for parameter in ours.module.parameters())
            found.append(state_of(ours.module))
    assert_same_bits(*found)
