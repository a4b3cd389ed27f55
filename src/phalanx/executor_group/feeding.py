"""A batch on its way to the devices: read, cut into shares, and laid out as each module takes it.

Shape legend: B rows of the batch; device i has rows_i of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.executor_group.binding import Binding, Share, is_batch
from phalanx.executor_group.passes import apart, leaves_of, normal_share
from phalanx.executor_group.states import States
from phalanx.plan import workload_sizes
from phalanx.types import Nested

__all__ = ["Feed", "feed", "read_shares"]


@dataclass(frozen=True)
class Feed:
    """What a forward pass starts from.

    Attributes:
        shares: What each device is given.
        leaves: The data by device as its module gets them.
        parts: All arguments of the module's forward by device; None for one that rests.
        axis: The data's batch axis.
    """

    shares: list[Share]
    leaves: list[dict[str, Tensor]]
    parts: list[Nested]
    axis: int

    @property
    def sizes(self) -> list[int]:
        """Each device's rows."""
        return [share.rows for share in self.shares]


# Any: a batch in any of its forms.
def read_shares(
    binding: Binding, batch: Any, workloads: Sequence[float]
) -> tuple[Binding, list[Share], list[int]]:
    """Read a batch, or a list of one per device; return what it is bound to, shares and pads.

    Raises:
        ConfigError: It does not fit.
    """
    if isinstance(batch, list) and batch and all(b is None or is_batch(b) for b in batch):
        return _read_list(binding, batch, len(workloads))
    fed = binding.read(batch)
    sizes = workload_sizes(fed.rows - fed.pad, workloads)
    binding = binding.fed_with(fed)
    return binding, binding.cut(fed, sizes), [fed.pad]


def _read_list(
    binding: Binding, batches: Sequence[Any], num_devices: int
) -> tuple[Binding, list[Share], list[int]]:
    if len(batches) != num_devices or all(each is None for each in batches):
        raise ConfigError(
            f"`data_batch` must hold one batch per device ({num_devices}), not all None, but "
            f"holds {len(batches)}."
        )
    shares, pads, rows = [], [], 0
    for batch in batches:
        if batch is None:
            shares.append(Share({}, {}, 0))
            pads.append(0)
            continue
        fed = binding.read(batch)
        shares += binding.cut(fed, [fed.rows - fed.pad])
        pads.append(fed.pad)
        rows += fed.rows
    return binding.of_rows(rows), shares, pads


def feed(
    binding: Binding,
    shares: list[Share],
    states: States,
    devices: Sequence[torch.device],
    *,
    pad: int,
    graph: bool,
    needs_grad: bool,
) -> Feed:
    """Lay shares and states out as the devices' modules take them.

    Args:
        pad: Padded rows at the end of the whole batch.
        graph: Whether the pass is to be gone back through.
        needs_grad: Whether the data shall have gradients then.

    Raises:
        ConfigError: States have other rows.
    """
    if graph:
        shares = [normal_share(share) for share in shares]
    sizes = [share.rows for share in shares]
    used = sizes if any(sizes) else [1] + [0] * (len(sizes) - 1)
    shares = [
        replace(share, data=own, labels=labels)
        for share, own, labels in zip(
            shares,
            apart([share.data for share in shares], binding.data, devices, used),
            apart([share.labels for share in shares], binding.labels, devices, used),
            strict=True,
        )
    ]
    leaves = [leaves_of(share, graph and needs_grad) for share in shares]
    own_states = apart(states.cut(binding.states, sizes, pad), binding.states, devices, used)
    return Feed(
        shares=shares,
        leaves=leaves,
        parts=[
            binding.call(share, own, state) if size else None
            for share, own, state, size in zip(shares, leaves, own_states, used, strict=True)
        ],
        axis=next((each.batch_axis for each in binding.data if each.batch_axis is not None), 0),
    )
