"""Train digits by named inputs on three uneven replicas, with a mask, a monitor and two metrics.

Run it with ``python examples/03_executor_group.py``. The digits come with Phalanx.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from phalanx import DataBatch, DataDesc, DataParallelExecutorGroup, Monitor
from phalanx.cli.data import open_data

BATCH, WORKLOADS = 100, [1, 5, 9]


class Net(nn.Module):
    """Classifies 8×8 digits, of which ``mask`` hides some pixels; returns its loss and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 48)
        self.head = nn.Linear(48, 10)

    def forward(self, image: Tensor, mask: Tensor, digit: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body((image * mask).flatten(1)).relu()
        scores = self.head(hidden)
        return nn.functional.cross_entropy(scores, digit), scores


def batches(pairs: Iterable[tuple[Tensor, Tensor]], mask: Tensor) -> list[DataBatch]:
    """Name what a loader yields; the last batch is filled up with rows that count nowhere."""
    found = []
    for image, digit in pairs:
        pad = BATCH - len(image)
        image = torch.cat([image, image[:1].repeat_interleave(pad, 0)])
        digit = torch.cat([digit, digit[:1].repeat_interleave(pad, 0)])
        found.append(DataBatch({"image": image, "mask": mask}, {"digit": digit}, pad=pad))
    return found


def plain_loss(net: Net, batch: DataBatch) -> Tensor:
    """Return the loss of the rows that count, on one device."""
    rows = BATCH - batch.pad
    return net(batch.data["image"][:rows], batch.data["mask"], batch.label["digit"][:rows])[0]


def main() -> None:
    """Train in a group and in plain PyTorch, and compare."""
    torch.manual_seed(0)
    data = open_data("digits")
    mask = (torch.arange(64).view(8, 8) % 7 != 0).float()
    train = batches(DataLoader(data.train, batch_size=BATCH, shuffle=True), mask)
    held = batches(DataLoader(data.validation, batch_size=BATCH), mask)
    net = Net()
    twin = copy.deepcopy(net)
    monitor = Monitor(interval=10, pattern="body|head", sort=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with DataParallelExecutorGroup(
        net,
        ["cpu"] * 3,
        data_shapes=[
            DataDesc("image", (BATCH, 1, 8, 8), torch.float32, "NCHW"),
            DataDesc("mask", (8, 8), torch.float32, "HW"),
        ],
        label_shapes=[DataDesc("digit", (BATCH,), torch.int64)],
        workload=WORKLOADS,
    ) as group:
        group.install_monitor(monitor)
        for epoch in range(1, 5):
            for batch in train:
                monitor.tic()
                group.forward(batch)
                group.backward()
                optimizer.step()
                monitor.toc_print()
            metrics = {
                "accuracy": MulticlassAccuracy(10, average="micro"),
                "macro F1": MulticlassF1Score(10, average="macro"),
            }
            for batch in held:
                group.forward(batch, is_train=False)
                for metric in metrics.values():
                    group.update_metric(metric)
            told = ", ".join(f"{name} {each.compute():.3f}" for name, each in metrics.items())
            print(f"epoch {epoch}: {told}")
        rows = [part.stop - part.start for part in group.slices]
    print(f"rows of the last batch by replica: {rows}")
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for batch in train * 4:
        optimizer.zero_grad()
        plain_loss(twin, batch).backward()
        optimizer.step()
    pairs = zip(net.parameters(), twin.parameters(), strict=True)
    print(f"equal to one device: {all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)}")


if __name__ == "__main__":
    main()
