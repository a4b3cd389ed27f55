"""The small models that the CLI trains and measures.

Parameters are drawn by :func:`draw_parameters` and not by torch's own defaults, whose last bit
depends on the machine (see Note [Same parameters on every machine]).

Legend: B batch, T tokens of context, D width, V size of the vocabulary, H attention heads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.cli.data import Data, call_without_arguments, import_attribute
from phalanx.errors import ConfigError


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

    Raises:
        ConfigError: A size is less than 1, ``width`` is no multiple of ``heads``, or ``dropout`` is
            outside 0 to 1. From ``forward``: more than ``context`` tokens.

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
        sizes = {"vocab": vocab, "context": context, "width": width, "layers": layers}
        for name, size in {**sizes, "heads": heads}.items():
            if size < 1:
                raise ConfigError(f"`{name}` must be 1 or more, but is {size!r}.")
        if width % heads:
            raise ConfigError(f"`width` must be a multiple of `heads` ({heads}), but is {width}.")
        if not 0 <= dropout < 1:
            raise ConfigError(f"`dropout` must be from 0 to less than 1, but is {dropout!r}.")
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(
            [TransformerBlock(width, heads, dropout) for _ in range(layers)]
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        num_tokens = tokens_BT.shape[1]
        if num_tokens > self.context:
            raise ConfigError(
                f"`tokens` must hold at most {self.context} tokens per row (`context`), "
                f"but holds {num_tokens}."
            )
        x_BTD = self.tokens(tokens_BT) + self.positions[:num_tokens]
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


def build_model(spec: str, data: Data, *, seed: int) -> nn.Module:
    """Build a model that fits ``data``.

    Args:
        spec: ``mlp`` (two hidden layers), ``cnn`` (three convolutions with batch norm), ``gpt`` (a
            small transformer over bytes), or ``module:attribute``: an ``nn.Module``, taken as it
            is, or a class or function that gives one without arguments.
        data: Decides the sizes of the first and the last layer.
        seed: Decides the parameters. A user's own function runs with torch's default generator
            seeded by it.

    The caller's default generator is left as it was.

    Determinism: The parameters of the built-in models are the same bits on every machine.

    Raises:
        ConfigError: There is no such model, or it does not fit the data.

    Example:
        >>> from phalanx.cli.data import open_data
        >>> model = build_model("cnn", open_data("digits", batch_size=8, seed=0), seed=0)
        >>> tuple(model(torch.zeros(2, 1, 8, 8)).shape)
        (2, 10)
    """
    builder_by_spec: dict[str, Callable[[Data], nn.Module]] = {
        "mlp": _mlp_for,
        "cnn": _cnn_for,
        "gpt": _gpt_for,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if spec in builder_by_spec:
            return draw_parameters(builder_by_spec[spec](data), seed=seed)
        if ":" in spec:
            return _own_model(spec, seed)
    raise ConfigError(f"Model must be `mlp`, `cnn`, `gpt` or `module:attribute`, but is {spec!r}.")


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


def _mlp_for(data: Data) -> nn.Module:
    input_shape, num_classes = _sizes_of_images("mlp", data)
    return mlp(input_shape, (256, 256), num_classes)


def _cnn_for(data: Data) -> nn.Module:
    input_shape, num_classes = _sizes_of_images("cnn", data)
    if len(input_shape) != 3:
        raise ConfigError(
            f"Model `cnn` must be given inputs [channels, height, width], but `{data.name}` has "
            f"{list(input_shape)}. Choose `mlp`, or name a model as `module:attribute`."
        )
    model = cnn(input_shape, (16, 32, 64), 128, num_classes)
    # The CPU's convolutions run faster so.
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _gpt_for(data: Data) -> nn.Module:
    if data.kind != "tokens" or data.input_shape is None or data.num_classes is None:
        raise ConfigError(
            f"Model `gpt` must be given tokens, but `{data.name}` holds {_contents(data)}. "
            "Choose `cnn` or `mlp`, or `text:PATH` as data."
        )
    return GPT(vocab=data.num_classes, context=data.input_shape[0], width=128, layers=4, heads=4)


def _sizes_of_images(spec: str, data: Data) -> tuple[tuple[int, ...], int]:
    if data.kind == "tokens":
        raise ConfigError(
            f"Model `{spec}` must be given images, but `{data.name}` holds {_contents(data)}. "
            "Choose `gpt`, or `digits` as data."
        )
    if data.input_shape is None or data.num_classes is None:
        raise ConfigError(
            f"Model `{spec}` must know the shape of an input and the number of classes, but "
            f"`{data.name}` does not tell. Name a Dataset with an attribute `num_classes`, or name "
            "a model as `module:attribute`."
        )
    return data.input_shape, data.num_classes


def _contents(data: Data) -> str:
    return {"images": "images", "tokens": "text", "custom": "data of your own"}[data.kind]


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


def _own_model(spec: str, seed: int) -> nn.Module:
    found = import_attribute(spec)
    # Again, because importing may have drawn (only the first time), and the call must not notice.
    torch.manual_seed(seed)
    if callable(found) and not isinstance(found, nn.Module):
        found = call_without_arguments(found, spec)
    if not isinstance(found, nn.Module):
        raise ConfigError(
            f"`{spec}` must be an nn.Module or give one, but is a {type(found).__name__}."
        )
    for name, tensor in itertools.chain(found.named_parameters(), found.named_buffers()):
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise ConfigError(
                f"`{spec}` must have parameters of known sizes, but `{name}` has none yet. Name a "
                "function that runs the model on a batch first."
            )
    return found
