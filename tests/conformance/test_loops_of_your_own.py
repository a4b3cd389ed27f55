"""`DataParallel(microbatches=…)` in a loop of the user's own: any replicas, the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from phalanx import ConfigError, DataParallel
from tests.zoo import (
    class_loss,
    cnn_norm,
    gpt_dropout,
    image_batch,
    mlp,
    token_batch,
    token_loss,
    vector_batch,
)

pytestmark = pytest.mark.promise("loops-of-your-own")

ROWS, STEPS = 11, 3  # pieces of 3, 3, 3 and 2 rows


def norm_and_dropout() -> nn.Module:
    return nn.Sequential(cnn_norm(), nn.Dropout(0.3))


MODELS = {
    "batch norm, dropout": (norm_and_dropout, image_batch, class_loss),
    "dropout in attention": (gpt_dropout, token_batch, token_loss),
}


def train(name: str, replicas: int, microbatches: int = 4) -> list[Tensor]:
    """Train with clipped gradients; return the state, the losses and the gradients of inputs."""
    make, batch_of, loss_fn = MODELS[name]
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(3)
    found = []
    with DataParallel(net, devices=replicas, microbatches=microbatches) as model:
        for step in range(STEPS):
            inputs, targets = batch_of(ROWS, seed=step)
            inputs.requires_grad_(inputs.is_floating_point())
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            found += [loss.detach(), *([] if inputs.grad is None else [inputs.grad])]
    return [*net.state_dict().values(), *found]


@pytest.mark.parametrize("name", MODELS)
def test_the_number_of_replicas_changes_no_bit(name: str) -> None:
    expected = train(name, 1)
    for replicas in (2, 3):
        assert all(map(torch.equal, train(name, replicas), expected))
    others = train(name, 1, microbatches=3)
    assert not all(map(torch.equal, others, expected))


def test_pieces_of_the_callers_own() -> None:
    net, (inputs, _) = mlp(), vector_batch(6)
    with DataParallel(net, devices=2, microbatches=3) as model:
        first, none, last = model.forward_parts([inputs[:2], None, inputs[2:]])
        assert (len(first), none, len(last)) == (2, None, 4)
        assert model(inputs[:1]).shape == (1, 4)
        assert model(inputs[:0]).shape == (0, 4)


def test_what_cannot_be_cut_so_is_refused() -> None:
    with pytest.raises(ConfigError, match="`devices` must be at most as many"):
        DataParallel(mlp(), devices=3, microbatches=2)
    with pytest.raises(ConfigError, match="`microbatches` must"):
        DataParallel(mlp(), microbatches=0)
