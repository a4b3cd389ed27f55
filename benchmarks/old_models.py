"""The models that are measured, each with a made-up batch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "bench_cnn", "bench_gpt", "bench_mlp", "mlp"]

Batch = tuple[Tensor, Tensor]


def bench_mlp(*, seed: int = 0) -> tuple[nn.Module, Batch]:
    """Build the MLP that is measured, 784-1024-1024-10, and a batch of 128 made-up images."""
    inputs, targets = _made_up_images((128, 784), seed)
    return draw_parameters(mlp((784,), (1024, 1024), 10), seed=seed), (inputs, targets)


def bench_cnn(*, seed: int = 0) -> tuple[nn.Module, Batch]:
    """Build the CNN that is measured (3x32x32, batch norm) and a batch of 64 made-up images."""
    inputs, targets = _made_up_images((64, 3, 32, 32), seed)
    model = draw_parameters(cnn((3, 32, 32), (32, 64), 256, 10), seed=seed)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, (inputs.to(memory_format=torch.channels_last), targets)


def bench_gpt(*, seed: int = 0) -> tuple[nn.Module, Batch]:
    """Build the transformer that is measured (4 layers, width 256) and 16x64 made-up tokens."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(vocab=1000, context=64, width=256, layers=4, heads=4, dropout=0.0)
    inputs, targets = torch.randint(0, 1000, (2, 16, 64), generator=generator)
    return draw_parameters(model, seed=seed), (inputs, targets)


def _made_up_images(shape: tuple[int, ...], seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    # Whole numbers over a power of two: exact, where `randn` differs between machines.
    inputs = torch.randint(-128, 128, shape, generator=generator).float().div_(64)
    return inputs, torch.randint(0, 10, shape[:1], generator=generator)


class GPT(nn.Module):
    """A decoder-only transformer: pre-norm blocks, learned positions, GELU, an untied head.

    Shapes:
        tokens int64 [B, T], T at most ``context`` -> logits_BTV.

    Args:
        vocab: Number of different tokens (V).
        context: The most tokens that it sees at once (T).
        width: Size of a token's vector (D), a multiple of ``heads``.
        layers: Number of blocks.
        heads: Attention heads (H) per block.
        dropout: Probability of dropping, of attention weights and of each block's two additions.

    Determinism: In training mode with ``dropout`` above 0 it draws from the default generator.

    Example:
        >>> model = GPT(vocab=256, context=8, width=16, layers=1, heads=2)
        >>> tuple(model(torch.zeros(3, 8, dtype=torch.long)).shape)
        (3, 8, 256)

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019, §2.3.
    """

    def __init__(
        self,
        vocab: int,
        context: int,
        width: int,
        layers: int,
        heads: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(
            [TransformerBlock(width, heads, dropout) for _ in range(layers)]
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(tokens_BT) + self.positions[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


class TransformerBlock(nn.Module):
    """One pre-norm transformer block: causal self-attention, then an MLP of four times the width.

    Shapes:
        x_BTD -> x_BTD.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self._drop(self._attend(self.attention_norm(x_BTD)))
        return x_BTD + self._drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BTD)))))

    def _attend(self, x_BTD: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, T, D / H]
            for part in self.attention_in(x_BTD).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        out_BTD: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(-2))
        return out_BTD

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


# Note [Same parameters on every machine]
# torch's `uniform_` and `normal_` give other last bits with AVX2 than without (a fused multiply-add
# in one, a vectorized logarithm in the other). Whole numbers are drawn alike everywhere, so we draw
# 24-bit ones, as many as a float32 holds exactly. The way to [-1, 1) is exact (a power of two, then
# a difference that fits), and the one product with the bound is rounded once: no machine differs.


def draw_parameters(module: nn.Module, *, seed: int) -> nn.Module:
    """Overwrite a module's parameters with reproducible ones, and return it.

    Matrices and kernels become uniform within ±1/sqrt(elements of one row), in the order of
    ``named_parameters``; biases become 0; all other vectors (of norms) are left as they are.

    Determinism: The same bits on every machine, see Note [Same parameters on every machine].
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim >= 2:
                bound = 1 / math.sqrt(parameter[0].numel())
                numbers = torch.randint(0, 1 << 24, parameter.shape, generator=generator)
                parameter.copy_(numbers.float().mul_(2.0**-23).sub_(1.0).mul_(bound))
            elif name.rpartition(".")[2] == "bias":
                parameter.zero_()
    return module


def mlp(input_shape: tuple[int, ...], widths: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return linear layers of these widths, with ReLUs between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    size = math.prod(input_shape)
    for width in widths:
        layers += [nn.Linear(size, width), nn.ReLU()]
        size = width
    return nn.Sequential(*layers, nn.Linear(size, num_classes))


def cnn(
    input_shape: tuple[int, ...], widths: tuple[int, ...], hidden: int, num_classes: int
) -> nn.Module:
    """Return convolutions of these widths with batch norm and pooling, and a hidden layer."""
    channels, height, width = input_shape
    layers: list[nn.Module] = []
    for num_kernels in widths:
        layers += [
            nn.Conv2d(channels, num_kernels, kernel_size=3, padding=1),
            nn.BatchNorm2d(num_kernels),
            nn.ReLU(),
        ]
        channels = num_kernels
        if min(height, width) >= 2:
            layers.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
    layers += [nn.Flatten(), nn.Linear(channels * height * width, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, num_classes))
