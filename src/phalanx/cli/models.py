"""The models and losses of ``phalanx train``: by the data, or the user's own."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from phalanx.cli.imports import import_attribute, make
from phalanx.cli.schema import Schema
from phalanx.errors import ConfigError
from phalanx.types import LossFn

_MOST_ROWS = 4096  # of which mean and deviation are taken


class Standardize(nn.Module):
    """Subtract the mean of the training set and divide by its deviation; a gap becomes the mean.

    Both are buffers, and so in the file of the weights. Numbers have theirs by column, pictures by
    channel.

    Attributes:
        part: The part of a row that :meth:`fit` looks at: 0 for inputs, 1 for targets.

    Shapes:
        [B, *shape] -> the same.
    """

    part = 0
    mean: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        own = (shape[0], 1, 1) if len(shape) == 3 else shape
        self.register_buffer("mean", torch.zeros(own))
        self.register_buffer("scale", torch.ones(own))

    def fit(self, rows: Dataset[tuple[Tensor, ...]]) -> None:
        """Take mean and deviation of up to 4,096 rows, evenly spaced."""
        count = len(rows)  # type: ignore[arg-type]
        stride = math.ceil(count / _MOST_ROWS)
        values = torch.stack([rows[place][self.part] for place in range(0, count, stride)])
        dims = (0, 2, 3) if self.mean.dim() == 3 else (0,)
        if values.isinf().any():
            raise ConfigError("`DATA` must hold finite numbers, but holds an infinite one.")
        mean = values.nanmean(dims).nan_to_num(0)
        self.mean.copy_(mean.view_as(self.mean))
        deviation = ((values - self.mean).nan_to_num(0) ** 2).mean(dims).sqrt().view_as(self.scale)
        self.scale.copy_(torch.where(deviation > 0, deviation, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.scale).nan_to_num(0)


class Rescale(Standardize):
    """Multiply by the deviation of the training set's targets, and add their mean.

    So a model of prices learns as soon as one of their thousands does.
    """

    part = 1

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.mean


class GPT(nn.Module):
    """A small decoder-only transformer: torch's own layers under a causal mask.

    Args:
        vocab: Number of different tokens.
        context: Most tokens in a row.
        width: Of the embeddings; a multiple of ``heads``.
        layers: Number of blocks.
        heads: Of the attention.

    Shapes:
        int64 [B, T], T at most ``context`` -> logits [B, vocab, T], as cross entropy takes them.

    Example:
        >>> model = GPT(vocab=256, context=8, width=16, layers=1, heads=2)
        >>> tuple(model(torch.zeros(3, 8, dtype=torch.long)).shape)
        (3, 256, 8)

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019, §2.3.
    """

    def __init__(
        self, vocab: int, context: int, width: int = 128, layers: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.positions[:length]
        logits_BTV: Tensor = self.head(self.blocks(x_BTD, mask, is_causal=True))
        return logits_BTV.transpose(1, 2)


def choose_model(schema: Schema) -> str:
    """Return the model that suits the data: "gpt" for text, "cnn" for pictures, else "mlp"."""
    if schema.is_text:
        return "gpt"
    return "cnn" if schema.input_shape and len(schema.input_shape) == 3 else "mlp"


def build_model(spec: str, schema: Schema, *, seed: int) -> nn.Module:
    """Return a model that fits the data.

    Args:
        spec: "mlp" (two hidden layers), "cnn" (three convolutions with batch norm), "gpt" (a small
            transformer over bytes), or ``module:attribute``: an ``nn.Module``, or a class or
            function that makes one without arguments.
        schema: Decides the sizes of the first and the last layer.
        seed: Decides the parameters: torch's default generator is seeded with it meanwhile.

    Raises:
        ConfigError: There is no such model, or it does not fit the data.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if ":" in spec:
            return _own_model(spec, seed)
        shape, outputs = schema.input_shape, schema.num_outputs
        if spec not in ("mlp", "cnn", "gpt"):
            raise ConfigError(
                f"`--model` must be mlp, cnn, gpt or module:attribute, but is {spec!r}."
            )
        if shape is not None and outputs is None:
            raise ConfigError("`DATA` must have targets, but has rows of inputs alone.")
        if shape is None or outputs is None:
            raise ConfigError(
                "`--model` must be module:attribute for your own data: name an nn.Module, or "
                "a class or function that makes one."
            )
        if schema.is_text != (spec == "gpt") or (spec == "cnn" and len(shape) != 3):
            fitting = choose_model(schema)
            raise ConfigError(
                f"`--model` must fit rows of shape {list(shape)}, but is {spec}. "
                f"Give --model {fitting}."
            )
        if spec == "gpt":
            return GPT(outputs, shape[0])
        model = _mlp(shape, outputs) if spec == "mlp" else _cnn(shape, outputs)
        return model.append(Rescale((outputs,))) if schema.task == "regress" else model


def _mlp(shape: tuple[int, ...], num_outputs: int) -> nn.Sequential:
    return nn.Sequential(
        Standardize(shape),
        nn.Flatten(),
        nn.Linear(math.prod(shape), 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, num_outputs),
    )


def _cnn(shape: tuple[int, ...], num_outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = [Standardize(shape)]
    channels = shape[0]
    for width in (16, 32, 64):
        layers += [
            nn.Conv2d(channels, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
        ]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(128, num_outputs))
    # The CPU's convolutions run faster so.
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _own_model(spec: str, seed: int) -> nn.Module:
    found = import_attribute(spec)
    torch.manual_seed(seed)  # again, because the first import may have drawn numbers
    model = make(found, spec, nn.Module)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"`{spec}` must be an nn.Module or make one, but gives a {type(model).__name__}."
        )
    return model


# -- losses ----------------------------------------------------------
#
# torch computes some pairs that no loss is meant for: the cross entropy of one column is 0 whatever
# the model predicts; the mean squared error of [B] and [B, 1] is taken over B × B pairs.

_LOSSES: dict[str, LossFn] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
}


def find_loss(spec: str, task: str) -> tuple[str, LossFn]:
    """Return a loss and its name; "auto" is cross entropy to classify, else mse.

    Raises:
        ConfigError: There is no such loss.
    """
    if spec == "auto":
        spec = "cross_entropy" if task == "classify" else "mse"
    if ":" in spec:
        function = import_attribute(spec)
        function = function() if isinstance(function, type) else function
        if callable(function):
            return spec, function
    if spec not in _LOSSES:
        raise ConfigError(
            f"`--loss` must be {', '.join(_LOSSES)} or module:attribute, but is {spec!r}."
        )
    return spec, _LOSSES[spec]


def check_loss(name: str, outputs: Tensor, targets: Tensor, num_classes: int) -> None:
    """Refuse outputs and targets that a loss of torch's would take for something else.

    Args:
        name: Of the loss.
        outputs: Of the model, for some rows.
        targets: Of these rows.
        num_classes: Classes of the data; 0 where they are not known.
    """
    if name in _LOSSES and not isinstance(outputs, Tensor):
        raise ConfigError(
            f"The model's outputs must be a tensor, but are of type {type(outputs).__name__}. "
            "Write a script with `Trainer` and its argument `forward`, which returns the loss."
        )
    if name == "cross_entropy" and num_classes == 1:
        raise ConfigError(
            "The target must have 2 or more classes, but is the same in each row. Give other data, "
            "or another column: --target COLUMN."
        )
    if name == "cross_entropy" and (outputs.dim() < 2 or outputs.shape[1] < 2):
        raise ConfigError(
            "The model must have an output for each of 2 or more classes, but its outputs have "
            f"the shape {tuple(outputs.shape)}. Give --task regress, or another model."
        )
    if name == "cross_entropy" and outputs.shape[1] < num_classes:
        raise ConfigError(
            f"The model must have an output for each of {num_classes} classes, but has "
            f"{outputs.shape[1]}. Change the model."
        )
    if name in ("mse", "l1", "bce") and outputs.shape != targets.shape:
        raise ConfigError(
            f"Targets must have the shape {tuple(outputs.shape)} of the outputs for the loss "
            f"{name}, but have {tuple(targets.shape)}. Change the data or the model."
        )
