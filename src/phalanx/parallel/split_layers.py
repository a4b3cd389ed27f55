"""Cut an ordinary layer into columns along its output features, and put it back together.

Shape legend: I inputs, O outputs (features or channels), O_i those of column i, K the kernel.

    Linear, O = 5:    weight_OI  ┌───────┐           ┌───────┐
                                 │ 0   0 │ column 0  │ 0   0 │  weight_[3]I
                                 │ 1   1 │           │ 1   1 │
                                 │ 2   2 │           │ 2   2 │
                                 ├───────┤           └───────┘
                                 │ 3   3 │ column 1  ┌───────┐
                                 │ 4   4 │           │ 3   3 │  weight_[2]I
                                 └───────┘           └───────┘
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.parallel.abstract_parallel import AbstractParallel
from phalanx.parallel.data_parallel import DataParallel
from phalanx.parallel.on_device import OnDevice
from phalanx.plan import check_argument, check_iterable, equal_sizes

__all__ = ["split_conv", "split_linear", "unsplit"]

Conv = TypeVar(
    "Conv",
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_LINEAR_SETTINGS = ("in_features",)
_CONV_SETTINGS = (
    "in_channels",
    "kernel_size",
    "stride",
    "padding",
    "output_padding",
    "dilation",
    "groups",
    "padding_mode",
)


def split_linear(layer: nn.Linear, parts: int | Sequence[int]) -> list[nn.Linear]:
    """Cut ``layer`` along its output features into columns for a :class:`ModelParallel`.

    The columns' outputs, concatenated along the last dim, are the layer's. Values are copied; the
    layer stays as it is. Columns take over dtype, device, `requires_grad` and training mode; not
    gradients.

    Args:
        parts: How many columns, of sizes that differ by at most one; or their output features.

    Shapes:
        weight [O, I] -> [O_i, I] each; bias [O] -> [O_i] each.

    Raises:
        ConfigError: It is no linear layer, or ``parts`` does not cut its features.
        UnsupportedError: It is a subclass, or has hooks or a parametrized weight: what they do to
            the whole layer need not be what they do to a column.

    Example:
        >>> layer = nn.Linear(3, 5)
        >>> left, right = split_linear(layer, 2)
        >>> left, right
        (Linear(in_features=3, out_features=3, bias=True),
         Linear(in_features=3, out_features=2, bias=True))
        >>> torch.equal(right.weight, layer.weight[3:])
        True

    Source: fbcunn's test of ModelParallel, which cut a convolution by hand.
    """
    if not isinstance(layer, nn.Linear):
        hint = " Call `split_conv()`." if isinstance(layer, (*_CONVS, *_TRANSPOSED)) else ""
        raise ConfigError(f"`layer` must be an `nn.Linear`, but is {_kind(layer)}.{hint}")
    _check_plain(layer, (nn.Linear,), "`layer`")
    return [
        _column(layer, start, size, "out_features")
        for start, size in _cuts(layer.out_features, parts)
    ]


def split_conv(layer: Conv, parts: int | Sequence[int]) -> list[Conv]:
    """Cut a convolution along its output channels into columns for a :class:`ModelParallel`.

    Ordinary and transposed ones of one to three dims. The columns' outputs, concatenated along the
    channel dim (1, or 0 without a batch dim), are the layer's. Values are copied; the layer stays
    as it is. Columns take over all its settings; not gradients.

    Args:
        parts: How many columns, of sizes that differ by at most one; or their output channels.

    Shapes:
        weight [O, I, K…] -> [O_i, I, K…] each, transposed [I, O, K…] -> [I, O_i, K…];
        bias [O] -> [O_i] each.

    Raises:
        ConfigError: It is no convolution, or ``parts`` does not cut its channels.
        UnsupportedError: It has groups (a column gets the whole input, a group only its share), or
            is what :func:`split_linear` refuses.

    Example:
        >>> columns = split_conv(nn.Conv2d(3, 64, 11), 4)
        >>> [column.out_channels for column in columns]
        [16, 16, 16, 16]

    Source: fbcunn's test of ModelParallel, which cut a convolution by hand.
    """
    if not isinstance(layer, (*_CONVS, *_TRANSPOSED)):
        hint = " Call `split_linear()`." if isinstance(layer, nn.Linear) else ""
        raise ConfigError(f"`layer` must be a convolution, but is {_kind(layer)}.{hint}")
    _check_plain(layer, (*_CONVS, *_TRANSPOSED), "`layer`")
    if layer.groups > 1:
        raise UnsupportedError(
            f"`layer` must have 1 group to be split, but has {layer.groups}: every column gets the "
            "whole input, and a group only its share of the channels. Extend `AbstractParallel` "
            "with a `distribute()` that cuts the channels, and give each column whole groups."
        )
    return [
        _column(layer, start, size, "out_channels")
        for start, size in _cuts(layer.out_channels, parts)
    ]


def unsplit(columns: AbstractParallel | Sequence[nn.Module]) -> nn.Module:
    """Return the ordinary layer that ``columns`` are the parts of.

    The inverse of :func:`split_linear` and :func:`split_conv`, also after training. Values are
    copied; the columns stay as they are. The layer lies on the first column's device.

    Args:
        columns: A container of the columns, or the columns in order. A `DataParallel` or `OnDevice`
            stands for the layer inside.

    Shapes:
        weights [O_i, I] or [O_i, I, K…], transposed [I, O_i, K…] -> the same with O = ΣO_i.

    Raises:
        ConfigError: There is none, one is no layer that could have been split, or differs from the
            first in type, settings, bias, dtype or `requires_grad`.
        UnsupportedError: One is what :func:`split_linear` or :func:`split_conv` refuses.

    Determinism: bitwise equal to what was split.

    Example:
        >>> layer = nn.Linear(3, 5)
        >>> torch.equal(unsplit(split_linear(layer, 2)).weight, layer.weight)
        True
    """
    layers = _layers(columns)
    first = layers[0]
    for index, layer in enumerate(layers):
        _check_column(index, layer, first)
    name = "out_features" if isinstance(first, nn.Linear) else "out_channels"
    values = {
        key: _join([layer._parameters[key] for layer in layers], _output_dim(first, key))
        for key in first._parameters
    }
    return _remade(first, values, name, sum(int(getattr(layer, name)) for layer in layers))


def _layers(columns: AbstractParallel | Sequence[nn.Module]) -> list[nn.Module]:
    if isinstance(columns, AbstractParallel):
        columns = [columns.get(index) for index in range(len(columns))]
    if isinstance(columns, nn.Module) and not isinstance(columns, (nn.ModuleList, nn.Sequential)):
        raise ConfigError(
            "`columns` must be a container of columns, or the columns in a list, but is "
            f"{_kind(columns)}."
        )
    check_iterable("columns", columns, "be a container of columns, or the columns in a list")
    layers = [_unwrapped(column) for column in columns]
    if not layers:
        raise ConfigError("`columns` must hold at least one column, but is empty.")
    return layers


def _unwrapped(column: nn.Module) -> nn.Module:
    while isinstance(column, (DataParallel, OnDevice)):
        column = column.module
    return column


def _column(layer: Any, start: int, size: int, name: str) -> Any:
    """Return the column of ``size`` outputs from ``start``; Any: one of the layers' own types."""
    values = {
        key: None
        if parameter is None
        else parameter.detach().narrow(_output_dim(layer, key), start, size).clone()
        for key, parameter in layer._parameters.items()
    }
    return _remade(layer, values, name, size)


def _remade(layer: nn.Module, values: dict[str, Tensor | None], name: str, size: int) -> nn.Module:
    """Return a copy of ``layer`` with ``values`` for parameters and ``size`` outputs.

    Copied with the new parameters in the old ones' place: nothing is initialised, no random number
    drawn, and no setting can be forgotten.
    """
    memo: dict[int, object] = {}
    for key, value in values.items():
        parameter = layer._parameters[key]
        if value is not None and parameter is not None:
            memo[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
    made = copy.deepcopy(layer, memo)
    setattr(made, name, size)
    return made


def _join(parameters: Sequence[Tensor | None], dim: int) -> Tensor | None:
    tensors = [parameter.detach() for parameter in parameters if parameter is not None]
    return torch.cat([tensor.to(tensors[0].device) for tensor in tensors], dim) if tensors else None


def _output_dim(layer: nn.Module, key: str) -> int:
    """Return the dim of a parameter that the outputs are along."""
    return 1 if key == "weight" and isinstance(layer, _TRANSPOSED) else 0


def _cuts(num_outputs: int, parts: int | Sequence[int]) -> list[tuple[int, int]]:
    """Return where every column starts, and its size."""
    sizes = _sizes(num_outputs, parts)
    return [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]


def _sizes(num_outputs: int, parts: int | Sequence[int]) -> list[int]:
    wanted = "be a number of columns or their sizes"
    check_argument(not isinstance(parts, bool), "parts", wanted, parts)
    if isinstance(parts, int):
        if not 1 <= parts <= num_outputs:
            raise ConfigError(
                f"`parts` must be 1 to {num_outputs} columns, as the layer has {num_outputs} "
                f"output features, but is {parts!r}."
            )
        return equal_sizes(num_outputs, parts)
    try:
        fits = not any(isinstance(size, bool) for size in parts)
        sizes = [operator.index(size) for size in parts]
    except TypeError:
        fits, sizes = False, []
    check_argument(fits, "parts", wanted, parts)
    if sum(sizes) != num_outputs or any(size < 1 for size in sizes):
        raise ConfigError(
            f"`parts` must hold sizes of at least 1 that make {num_outputs} output features "
            f"together, but is {sizes!r}."
        )
    return sizes


def _check_plain(layer: nn.Module, kinds: Sequence[type[nn.Module]], name: str) -> None:
    """Refuse a layer whose outputs are made by more than its type, weight and bias."""
    if type(layer) not in kinds:
        plain = next(kind for kind in kinds if isinstance(layer, kind))
        lazy = any(map(is_lazy, layer.parameters()))
        hint = " Run it once on a sample batch first." if lazy else ""
        raise UnsupportedError(
            f"{name} must be an `nn.{plain.__name__}` itself, but is of its subclass "
            f"{_kind(layer)}, which may compute something else.{hint}"
        )
    if set(layer._parameters) != {"weight", "bias"} or layer._buffers or layer._modules:
        names = ", ".join(sorted({**layer._parameters, **layer._buffers, **layer._modules}))
        raise UnsupportedError(
            f"{name} must have just a weight and a bias, but has {names}. Remove its "
            "parametrization or mask first, and put it on the columns."
        )
    if any(getattr(layer, hooks) for hooks in _HOOKS):
        raise UnsupportedError(
            f"{name} must have no hooks, but has some. Remove them, and register them on the "
            "columns."
        )


def _check_column(index: int, layer: nn.Module, first: nn.Module) -> None:
    if not isinstance(layer, (nn.Linear, *_CONVS, *_TRANSPOSED)):
        raise ConfigError(
            f"Column {index} must be a linear layer or a convolution, but is {_kind(layer)}."
        )
    _check_plain(layer, (nn.Linear, *_CONVS, *_TRANSPOSED), f"Column {index}")
    own, expected = _settings(layer), _settings(first)
    for setting, value in own.items():
        if setting not in expected or expected[setting] != value:
            raise ConfigError(
                f"Column {index} must have `{setting}` {expected.get(setting)!r} like column 0, "
                f"but has {value!r}."
            )


def _settings(layer: nn.Module) -> dict[str, object]:
    """Return by name what all columns of one layer have in common."""
    names = _LINEAR_SETTINGS if isinstance(layer, nn.Linear) else _CONV_SETTINGS
    settings: dict[str, object] = {"type": type(layer).__name__}
    settings |= {name: getattr(layer, name) for name in names}
    settings["bias"] = layer._parameters["bias"] is not None
    for key, parameter in layer._parameters.items():
        if parameter is not None:
            settings[f"{key}.dtype"] = parameter.dtype
            settings[f"{key}.requires_grad"] = parameter.requires_grad
    return settings


def _kind(value: object) -> str:
    return repr(type(value).__name__)
