"""The messages of the ranks of a job about a step, before they add their gradients.

JSON, whose floats keep every bit, and tensors in safetensors' form; no pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from phalanx.errors import UnsupportedError
from phalanx.execution.run import MicrobatchResult, PartialSum, add_nodes, add_sums
from phalanx.plan import Node, flatten, unflatten
from phalanx.replicas import Statistic, Statistics
from phalanx.torch_internals import pytree
from phalanx.types import Nested

_TEXT = "text"


# Any, here and below: what JSON can hold.
@dataclass
class RankMessage:
    """One rank's part in a step.

    Attributes:
        about: The step and the batch, on which all ranks must agree; as JSON has it.
        error: The exception that it raised instead of computing; None if all went well.
        results: By microbatch.
        statistics: By node of the tree, what its microbatches left in the buffers.
    """

    about: Any
    error: str | None = None
    results: dict[int, MicrobatchResult] = field(default_factory=dict)
    statistics: dict[Node, dict[str, Statistic]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        about: Any,
        results: Sequence[MicrobatchResult | None],
        sums: Mapping[Node, PartialSum | None],
    ) -> RankMessage:
        """Return the message of what was computed here."""
        found = {index: each for index, each in enumerate(results) if each is not None}
        written = {node: each.statistics for node, each in sums.items() if each is not None}
        return cls(about, results=found, statistics=written)

    def to_bytes(self) -> bytes:
        """Write it down."""
        tensors: dict[str, Tensor] = {}
        results = [
            [index, each.loss, _pack_nested(tensors, (each.outputs, each.targets))]
            for index, each in self.results.items()
        ]
        statistics = [
            [*node, key, _set_aside(tensors, each.value), each.weight, each.is_mean]
            for node, found in self.statistics.items()
            for key, each in found.items()
        ]
        text = json.dumps([self.about, self.error, results, statistics])
        tensors[_TEXT] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return safetensors.torch.save(tensors)

    @classmethod
    def from_bytes(cls, packed: bytes) -> RankMessage:
        """Undo :meth:`to_bytes`."""
        tensors = safetensors.torch.load(packed)  # bytes of a rank: numbers, and no code to run
        about, error, results, statistics = json.loads(tensors[_TEXT].numpy().tobytes())
        message = cls(about, error)
        for index, loss, kept in results:
            message.results[index] = MicrobatchResult(loss, *_unpack_nested(tensors, kept))
        for level, index, key, name, weight, is_mean in statistics:
            written = message.statistics.setdefault(Node(level, index), {})
            written[key] = Statistic(tensors[name], weight, is_mean)
        return message


def add_statistics(messages: Sequence[RankMessage], num_microbatches: int) -> Statistics:
    """Return what the microbatches of all ranks left in the buffers, added along the tree."""
    found = {
        node: PartialSum([], each)
        for message in messages
        for node, each in message.statistics.items()
    }
    total = add_nodes(num_microbatches, found, add_sums)
    return {} if total is None else total.statistics


def _set_aside(tensors: dict[str, Tensor], tensor: Tensor) -> str:
    """Put ``tensor`` among the others, and return its name."""
    name = str(len(tensors))
    tensors[name] = tensor.detach().cpu().contiguous().clone()
    return name


def _pack_nested(tensors: dict[str, Tensor], value: Nested) -> Any:
    """Set the tensors of ``value`` aside, by number, and return the rest.

    Raises:
        UnsupportedError: It holds something that JSON cannot hold.
    """
    leaves, structure = flatten(value)
    names = [[_set_aside(tensors, leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    try:
        json.dumps(names)
        return [names, pytree.treespec_dumps(structure)]
    except (TypeError, NotImplementedError) as error:
        raise UnsupportedError(
            "Outputs and targets must be tensors, numbers and texts in lists, tuples and dicts to "
            "be counted by metrics over ranks and to be saved in the middle of an epoch, but hold "
            f"something else: {error}."
        ) from error


def _unpack_nested(tensors: Mapping[str, Tensor], packed: Any) -> Nested:
    """Return what :func:`_pack_nested` was given."""
    names, structure = packed
    leaves = [tensors[each[0]] if isinstance(each, list) else each for each in names]
    return unflatten(leaves, pytree.treespec_loads(structure))
