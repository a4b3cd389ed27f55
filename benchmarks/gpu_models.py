"""The models that are measured on accelerators, each with a made-up batch of so many rows.

They are made on the device that `torch.device` names around the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import GPT, mlp

__all__ = ["gpt2", "resnet50", "small_mlp"]

Batch = tuple[Tensor, Tensor]
_CONTEXT, _VOCABULARY = 1024, 50_257


def small_mlp(rows: int) -> tuple[nn.Module, Batch]:
    """Build an MLP, 784-1024-1024-10: its step is the overhead of each call."""
    return mlp((784,), (1024, 1024), 10), (torch.randn(rows, 784), torch.randint(10, (rows,)))


def resnet50(rows: int) -> tuple[nn.Module, Batch]:
    """Build ResNet-50 in channels_last, and images of 224 pixels."""
    model = ResNet((3, 4, 6, 3), num_classes=1000)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(rows, 3, 224, 224).to(memory_format=torch.channels_last)
    return model, (images, torch.randint(1000, (rows,)))


def gpt2(rows: int, dropout: float) -> tuple[nn.Module, Batch]:
    """Build GPT-2 small (124 million parameters), and rows of 1,024 tokens."""
    model = GPT(_VOCABULARY, _CONTEXT, width=768, layers=12, heads=12, dropout=dropout)
    nn.init.normal_(model.tokens.weight, std=0.02)
    model.head.weight = model.tokens.weight
    inputs, targets = torch.randint(_VOCABULARY, (2, rows, _CONTEXT))
    return model, (inputs, targets)


class ResNet(nn.Module):
    """A residual network of bottlenecks.

    Shapes:
        images [B, 3, H, W] -> logits [B, num_classes].

    Source: He et al., Deep Residual Learning for Image Recognition, 2016, table 1; the stride is
    on the 3×3 convolution, as in torchvision.
    """

    def __init__(self, blocks: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_convolution(3, 64, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        layers: list[nn.Module] = []
        channels = 64
        for stage, count in enumerate(blocks):
            width = 64 << stage
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Bottleneck(channels, width, stride))
                channels = 4 * width
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.stem(images))
        logits: Tensor = self.head(F.adaptive_avg_pool2d(features, 1).flatten(1))
        return logits


class Bottleneck(nn.Module):
    """Three convolutions, 1×1, 3×3 and 1×1, with a way around them."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride=stride),
            nn.ReLU(inplace=True),
            *_convolution(width, 4 * width, 1),
        )
        self.around: nn.Module = nn.Identity()
        if stride > 1 or channels != 4 * width:
            self.around = nn.Sequential(*_convolution(channels, 4 * width, 1, stride=stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.around(x))


def _convolution(
    inputs: int, outputs: int, kernel: int, stride: int = 1
) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)
