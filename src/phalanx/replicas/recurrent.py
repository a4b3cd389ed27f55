"""Recurrent layers whose dropout draws from a microbatch's generator on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


def run_layer_by_layer(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Call a function of `RECURRENT` once for each layer, with dropout between the calls.

    An accelerator's kernel for all layers draws from its own state, which carries over from call
    to call.

    Args:
        func: The function.
        args: As torch's modules give them: a padded batch, or packed data and its batch sizes;
            then states, weights, biases or not, layers, dropout, training, both directions or not.

    Returns:
        The outputs of the last layer, and the last states of all layers.
    """
    is_padded = isinstance(args[3], bool)
    values, *sizes = args[: 1 if is_padded else 2]
    states, weights, biases, layers, dropout, train, both, *rest = args[1 + len(sizes) :]
    is_lstm = not isinstance(states, torch.Tensor)
    per_layer = len(weights) // layers
    directions = 2 if both else 1
    last = []
    for layer in range(layers):
        if layer > 0:
            values = F.dropout(values, dropout, train)
        place = slice(layer * directions, (layer + 1) * directions)
        own = tuple([each[place] for each in states]) if is_lstm else states[place]
        own_weights = weights[layer * per_layer : (layer + 1) * per_layer]
        values, *ends = func(values, *sizes, own, own_weights, biases, 1, 0.0, train, both, *rest)
        last.append(ends)
    return (values, *[torch.cat(ends) for ends in zip(*last, strict=True)])
