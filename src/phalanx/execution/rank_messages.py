"""The messages of the ranks of a job about a step, before they add their gradients.

JSON and tensors in safetensors' form, no pickle. Floats travel as hexadecimals: every bit counts.
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
from phalanx.execution.run import PartialSum
from phalanx.execution.task import MicrobatchResult
from phalanx.plan import Node, flatten, unflatten
from phalanx.replicas import Statistic
from phalanx.torch_internals import pytree
from phalanx.types import Nested

_TEXT = "text"


@dataclass
class RankMessage:
    """One rank's part in a step.

    Attributes:
        fingerprint: The step and the batch, on which all ranks must agree.
        error: The exception that it raised instead of computing; None if all went well.
        results: By microbatch.
        has_gradients: Whether a parameter got one.
        statistics: By node of the tree, what its microbatches left in the buffers.
    """

    fingerprint: str
    error: str | None = None
    results: dict[int, MicrobatchResult] = field(default_factory=dict)
    has_gradients: bool = False
    statistics: dict[Node, dict[str, Statistic]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        fingerprint: str,
        results: Sequence[MicrobatchResult | None],
        sums: Mapping[Node, PartialSum | None],
    ) -> RankMessage:
        """Return the message of what was computed here."""
        message = cls(fingerprint, results={i: r for i, r in enumerate(results) if r is not None})
        for node, partial in sums.items():
            if partial is not None:
                message.has_gradients |= any(each is not None for each in partial.gradients)
                message.statistics[node] = partial.statistics
        return message

    def pack(self) -> bytes:
        """Write it down."""
        tensors: dict[str, Tensor] = {}
        text = {
            "fingerprint": self.fingerprint,
            "error": self.error,
            "results": [
                [index, each.loss.hex(), _pack_nested(tensors, (each.outputs, each.targets))]
                for index, each in self.results.items()
            ],
            "has_gradients": self.has_gradients,
            "statistics": [
                [
                    n.level,
                    n.index,
                    key,
                    each.weight.hex(),
                    each.rule,
                    _pack_nested(tensors, each.value),
                ]
                for n, found in self.statistics.items()
                for key, each in found.items()
            ],
        }
        tensors[_TEXT] = torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)
        return safetensors.torch.save(tensors)

    @classmethod
    def read(cls, packed: bytes) -> RankMessage:
        """Undo :meth:`pack`."""
        tensors = safetensors.torch.load(packed)  # bytes of a rank: numbers, and no code to run
        text = json.loads(tensors[_TEXT].numpy().tobytes())
        message = cls(text["fingerprint"], text["error"])
        for index, loss, kept in text["results"]:
            outputs, targets = _unpack_nested(tensors, kept)
            message.results[index] = MicrobatchResult(float.fromhex(loss), outputs, targets)
        message.has_gradients = text["has_gradients"]
        for level, index, name, weight, rule, value in text["statistics"]:
            message.statistics.setdefault(Node(level, index), {})[name] = Statistic(
                _unpack_nested(tensors, value), float.fromhex(weight), rule
            )
        return message


# Any, here and below: what JSON can hold.
def _pack_nested(tensors: dict[str, Tensor], value: Nested) -> Any:
    """Set the tensors of ``value`` aside, by number, and return the rest.

    Raises:
        UnsupportedError: It holds something that JSON cannot hold.
    """
    leaves, structure = flatten(value)
    names: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            names.append([str(len(tensors))])
            tensors[str(len(tensors))] = leaf.detach().cpu().contiguous().clone()
        else:
            names.append(leaf)
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
