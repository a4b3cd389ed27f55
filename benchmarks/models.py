"""The models that are measured, each with a batch of random data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]
_CONTEXT, _VOCABULARY = 1024, 50_257  # of GPT-2


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy, of each token where rows have several."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def sgd(parameters: Iterable[nn.Parameter], momentum: float = 0.0) -> Optimizer:
    """Return the optimizer of most models."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=momentum)


def _adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that is measured.

    Attributes:
        build: Returns it, and a batch of so many rows.
        rows: Rows of the batch.
        optimizer: Makes the optimizer of its parameters.
        steps: Steps of a turn on an accelerator.
        tokens: Tokens of a row.
        low_precision: Whether it computes in bfloat16, by autocast.
    """

    build: Callable[[int], tuple[nn.Module, Batch]]
    rows: int
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = sgd
    steps: int = 100
    tokens: int = 1
    low_precision: bool = False

    def make(self, device: str = "cpu") -> tuple[nn.Module, Batch]:
        """Return the model and its batch, with the same values in each process."""
        with torch.device(device):
            torch.manual_seed(0)
            return self.build(self.rows)


def mlp(rows: int) -> tuple[nn.Module, Batch]:
    """Return an MLP, 784-1024-1024-10."""
    model = nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    return model, (torch.randn(rows, 784), torch.randint(10, (rows,)))


def cnn(rows: int) -> tuple[nn.Module, Batch]:
    """Return two convolutions with batch norm, two linear layers, and images of 3×32×32."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64)):
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(64 * 8 * 8, 256), nn.ReLU(), nn.Linear(256, 10)]
    return _channels_last(nn.Sequential(*layers), torch.randn(rows, 3, 32, 32), classes=10)


def resnet50(rows: int) -> tuple[nn.Module, Batch]:
    """Return ResNet-50, and images of 224 pixels.

    Source: He et al., Deep Residual Learning for Image Recognition, 2016, table 1; the stride is
    on the 3×3 convolution, as in torchvision.
    """
    layers = [*_convolution(3, 64, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(channels, 64 << stage, stride))
            channels = 4 * (64 << stage)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    images = torch.randn(rows, 3, 224, 224)
    return _channels_last(nn.Sequential(*layers), images, classes=1000)


def gpt(rows: int) -> tuple[nn.Module, Batch]:
    """Return a transformer of 4 layers of width 256, and rows of 64 tokens."""
    inputs, targets = torch.randint(1000, (2, rows, 64))
    return GPT(1000, 64, width=256, layers=4, heads=4), (inputs, targets)


def gpt2(rows: int, dropout: float) -> tuple[nn.Module, Batch]:
    """Return GPT-2 small (124 million parameters), and rows of 1,024 tokens."""
    model = GPT(_VOCABULARY, _CONTEXT, width=768, layers=12, heads=12, dropout=dropout)
    nn.init.normal_(model.tokens.weight, std=0.02)
    model.head.weight = model.tokens.weight
    inputs, targets = torch.randint(_VOCABULARY, (2, rows, _CONTEXT))
    return model, (inputs, targets)


def _channels_last(model: nn.Module, images: Tensor, classes: int) -> tuple[nn.Module, Batch]:
    """Lay out convolutions as they run fastest, and draw targets."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    targets = torch.randint(classes, (len(images),))
    return model, (images.to(memory_format=torch.channels_last), targets)


class GPT(nn.Module):
    """A decoder-only transformer: torch's own layers, with learned positions and GELU.

    Shapes:
        tokens int64 [B, T], T at most ``context`` -> logits [B, T, vocab].

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019, §2.3.
    """

    def __init__(
        self, vocab: int, context: int, width: int, layers: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.positions[:length]
        logits: Tensor = self.head(self.blocks(x_BTD, mask, is_causal=True))
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


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


_resnet = partial(Model, build=resnet50, optimizer=partial(sgd, momentum=0.9), low_precision=True)
_gpt2 = partial(Model, rows=8, steps=6, optimizer=_adamw, tokens=1024, low_precision=True)

MODELS = {
    "mlp": Model(build=mlp, rows=128),
    "cnn": Model(build=cnn, rows=64),
    "gpt": Model(build=gpt, rows=16, tokens=64),
    "resnet50": _resnet(rows=64, steps=10),
    "resnet50-256": _resnet(rows=256, steps=4),
    "gpt2": _gpt2(build=partial(gpt2, dropout=0.0)),
    "gpt2-dropout": _gpt2(build=partial(gpt2, dropout=0.1)),
}
