"""Numbers from an accelerator's own default generators, which no formation can repeat."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx
from phalanx.errors import UnsupportedError
from phalanx.replicas import default_generators
from phalanx.replicas.rng_watch import RngWatch
from tests.device.test_replicas import F64, batch
from tests.zoo import sgd


class Seeds(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch.dev.manual_seed(1)
        return super().forward(x)


class Reads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch.dev.get_rng_state(x.device)
        return super().forward(x)


@pytest.mark.parametrize(("kind", "called"), [(Seeds, "manual_seed"), (Reads, "get_state")])
def test_a_model_that_calls_a_devices_default_generator_is_refused(
    kind: type[nn.Linear], called: str
) -> None:
    net = kind(5, 6, dtype=F64, device="dev:0")
    told = rf"calls `{called}` of torch's default generator \(test_random_numbers.py:\d+\)"
    with (
        phalanx.Trainer(
            net, F.mse_loss, sgd, microbatches=None, replicas=["dev:0", "dev:1"]
        ) as trainer,
        pytest.raises(UnsupportedError, match=told),
    ):
        trainer.step(batch(0, "dev:0"))


@pytest.mark.parametrize("device", ["dev:0", "dev:1"])
def test_draws_of_another_thread_from_a_devices_default_generator(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw() -> None:  # as a thread would that the model has started: nobody sees the call
        with RngWatch(alone=True):
            torch.rand(3, device=device)

    with pytest.raises(UnsupportedError, match="default generator in a thread that it starts"):
        draw()
    monkeypatch.setattr(default_generators, "accelerator_module", lambda: None)
    draw()
