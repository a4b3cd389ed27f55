"""Train on one replica and on two, and compare the weights bit for bit.

Run it with ``python examples/01_two_replicas.py``.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import phalanx


def make_batches(
    num_rows: int = 900, batch_size: int = 96
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of points in a ring or inside it; the last batch is smaller."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(num_rows, 2, generator=generator)
    labels = (points.square().sum(dim=1) > 1.4).long()
    return list(zip(points.split(batch_size), labels.split(batch_size), strict=True))


def train(net: nn.Module, replicas: int) -> dict[str, torch.Tensor]:
    """Train a copy of ``net`` and return its weights."""
    net = copy.deepcopy(net)
    with phalanx.Trainer(
        net,
        nn.functional.cross_entropy,
        lambda params: torch.optim.AdamW(params, lr=1e-2),
        replicas=replicas,
        microbatches=6,
    ) as trainer:
        epochs = trainer.fit(make_batches(), epochs=20)
    print(f"{replicas} replica(s): loss {epochs[-1].train['loss']:.4f}")
    return net.state_dict()


def main() -> None:
    """Train twice and compare."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2))
    one, two = train(net, replicas=1), train(net, replicas=2)
    same = all(torch.equal(one[name], two[name]) for name in one)
    print(f"the same bits: {same}")


if __name__ == "__main__":
    main()
