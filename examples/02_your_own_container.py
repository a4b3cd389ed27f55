"""A container of one's own: experts on their own threads, weighed by a gate.

Run it with ``python examples/02_your_own_container.py``. It trains the mixture beside its twin in
plain PyTorch, and compares the two.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import phalanx


class Mixture(phalanx.AbstractParallel):
    """Every column sees the whole input; a gate weighs what the columns say."""

    def __init__(self, num_features: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(num_features, num_experts)
        self.weights: Tensor | None = None

    def distribute(self, inputs: Tensor) -> list[Tensor]:
        self.weights = self.gate(inputs).softmax(dim=-1)
        return [inputs] * len(self)

    def merge(self, outputs: list[Tensor]) -> Tensor:
        weights, self.weights = self.weights, None  # of this call alone
        return weigh(weights, outputs)


def weigh(weights: Tensor, outputs: list[Tensor]) -> Tensor:
    """Return the sum of ``outputs``, each times its column of ``weights``."""
    return torch.stack(outputs, dim=-1).mul(weights.unsqueeze(1)).sum(dim=-1)


def main() -> None:
    torch.manual_seed(0)
    points = torch.randn(301, 4)
    labels = points.square().sum(dim=1).gt(3.5).long()
    mixture = Mixture(4, num_experts=3)
    for _ in range(3):
        mixture.add(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)))
    gate, *experts = copy.deepcopy([mixture.gate, *(mixture.get(i) for i in range(3))])
    twin = nn.ModuleList([gate, *experts])

    def plain(inputs: Tensor) -> Tensor:
        return weigh(gate(inputs).softmax(dim=-1), [expert(inputs) for expert in experts])

    with mixture:
        for model, run in ((mixture, mixture), (twin, plain)):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, nesterov=True)
            for _ in range(60):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(run(points), labels)
                loss.backward()
                optimizer.step()
            print(f"{type(model).__name__:<10} loss {loss.item():.4f}")
    print(mixture)
    distance = max(
        (a - b).abs().max().item()
        for a, b in zip(mixture.parameters(), twin.parameters(), strict=True)
    )
    print(f"largest difference of any weight after 60 steps: {distance:.1e}")
    print(f"equal within rounding: {distance < 1e-4}")


if __name__ == "__main__":
    main()
