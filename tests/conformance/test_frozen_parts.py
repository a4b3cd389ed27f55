"""Parts of a model that the user has put into eval mode stay so, as in a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import phalanx
from tests.contracts.containers import draw
from tests.worlds import in_every_executor
from tests.zoo import assert_close, plain_steps, sgd, state_of, twin_of

pytestmark = pytest.mark.promise("state-is-shared")

F64 = torch.float64
loss = nn.functional.mse_loss


def net(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    return kind(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(draw(12, 5, seed=seed) * 3 + 1, draw(12, 3, seed=seed)) for seed in range(4)]


def modes(module: nn.Module) -> list[bool]:
    return [each.training for each in module.modules()]


@in_every_executor
def test_a_frozen_part_stays_frozen_in_fit_and_evaluate(executor: str, replicas: int) -> None:
    module = net().train()
    module[1].eval()
    twin = twin_of(module)
    with phalanx.Trainer(
        module, loss, sgd, microbatches=None, replicas=replicas, executor=executor
    ) as trainer:
        trainer.fit(batches()[:2], validate=batches())
        trainer.evaluate(batches())
        trainer.fit(batches()[2:])
        assert modes(module) == [True, True, False, True]
    plain_steps(twin, loss, sgd, batches())
    assert_close(state_of(module), state_of(twin), F64)


@pytest.mark.parametrize("method", ["fit", "step"])
def test_a_model_in_eval_mode_as_a_whole_is_put_into_training_mode(method: str) -> None:
    module = net().eval()
    with phalanx.Trainer(module, loss, sgd, microbatches=None, replicas=2) as trainer:
        if method == "fit":
            trainer.fit(batches())
        else:
            trainer.step(batches()[0])
    assert all(modes(module))
