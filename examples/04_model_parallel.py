"""Cut one big layer into columns, train them, and compare with the layer that was not cut.

Run it with ``python examples/04_model_parallel.py``. Columns go to all accelerators of the machine
in turn, or share its CPU.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import phalanx


class Net(nn.Module):
    """A classifier of 16×16 pictures, most of whose weights are in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.wide = nn.Linear(8 * 16 * 16, 301)
        self.head = nn.Linear(301, 2)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        features = self.stem(pictures).relu().flatten(1)
        return self.head(self.wide(features).tanh())


def make_batches(num_batches: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pictures of noise; in those of class 1 the left half is brighter."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(num_batches):
        pictures = torch.randn(32, 1, 16, 16, generator=generator)
        labels = torch.randint(2, (32,), generator=generator)
        pictures[labels == 1, :, :, :8] += 0.3
        batches.append((pictures, labels))
    return batches


def train(net: Net) -> float:
    """Train ``net`` in place and return its last loss."""
    device = net.stem.weight.device
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    loss = torch.zeros(())
    for pictures, labels in make_batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(pictures.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
    return loss.item()


def cut(layer: nn.Linear, parts: int) -> list[nn.Linear]:
    """Cut ``layer`` along its output features into columns, with copies of its values."""
    columns = []
    for weight, bias in zip(layer.weight.chunk(parts), layer.bias.chunk(parts), strict=True):
        column = nn.Linear(layer.in_features, len(bias))
        column.load_state_dict({"weight": weight, "bias": bias})
        columns.append(column)
    return columns


def main() -> None:
    """Train with and without columns."""
    torch.manual_seed(0)
    twin = Net()
    net = copy.deepcopy(twin)

    with phalanx.ModelParallel(dim=1) as columns:
        for column in cut(net.wide, 3):
            columns.add(column)
        for each in (net, twin):  # the rest goes to where the columns' outputs come together
            each.to(columns.devices[0])
        net.wide = columns
        print(columns)
        print(f"loss in columns: {train(net):.6f}")
    print(f"loss of the twin: {train(twin):.6f}")

    error = max(
        (ours - theirs).abs().max().item()
        for column, other in zip(columns.children(), cut(twin.wide, 3), strict=True)
        for ours, theirs in zip(column.parameters(), other.parameters(), strict=True)
    )
    print(f"the same weights: {error < 1e-5}, largest difference {error:.1e}")


if __name__ == "__main__":
    main()
