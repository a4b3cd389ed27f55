"""The optimizer's step, every rank its slice (ZeRO, stage 1)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from phalanx.distributed import Exchange
from phalanx.execution.elementwise import STEP
from phalanx.execution.rank_reduction import slices_of, spread
from phalanx.execution.sharded_optimizer import FlatStepper
from phalanx.memory import FlatParameters, Segment

__all__ = ["RankStepper"]


class RankStepper(FlatStepper):
    """An elementwise optimizer, of which every rank steps its slice and keeps its slice's state.

    After each step all ranks have all new parameters. The state of other ranks' slices is where
    they are, until :meth:`complete` brings it here; the memory for it is not touched before.

    Args:
        optimizer: The user's; its options and state stay the truth.
        flat: The parameters.
        counts: Replicas by rank, each with a part of its rank's slice.
        exchange: The job's ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        flat: FlatParameters,
        counts: Sequence[int],
        exchange: Exchange,
    ) -> None:
        self._exchange = exchange
        self._slices = slices_of(flat, counts)
        self._wholes: dict[tuple[int, str], Tensor] = {}  # by segment and name
        first = sum(counts[: exchange.rank])
        own = range(first, first + counts[exchange.rank])
        super().__init__(optimizer, flat, sum(counts), own=own)
        self._state_options = self._options_that_matter() if optimizer.state else None

    def finish(self) -> None:
        """Give everybody the new parameters; see that the user's optimizer shows the state."""
        segments = self._flat.segments
        spread(
            self._exchange,
            self._slices,
            [(place, each.values) for place, each in enumerate(segments)],
        )
        self._count()
        if self._state_options != self._options_that_matter():
            self._gather_state()
            self._state_options = self._options_that_matter()
            self._remember()

    def complete(self) -> None:
        """Bring the state of all slices here; every rank must call it."""
        spread(
            self._exchange,
            self._slices,
            [(place, each) for (place, _), each in sorted_items(self._wholes)],
        )

    def _options_that_matter(self) -> str:
        """Return those options that decide which state there is."""
        groups = self._optimizer.param_groups
        kept = ("lr", "weight_decay", "params", "initial_lr", "param_names")
        return repr([{k: v for k, v in group.items() if k not in kept} for group in groups])

    def _gather_state(self) -> None:
        """Lay out the state of all slices as their owners say it is, with ours in its place."""
        gathered = self._exchange.gather(self._described(), "gather the optimizer")
        told = [json.loads(each) for each in gathered]
        for place, segment in enumerate(self._flat.segments):
            kinds: dict[str, Any] = next((each[place] for each in told if each[place]), {})
            for key, (dtype, value) in kinds.items():
                self._install(segment, key, self._laid_out(segment, key, dtype, value))

    def _laid_out(self, segment: Segment, key: str, dtype: str | None, value: Any) -> Any:
        if dtype is None:
            return value
        kind = getattr(torch, dtype)
        if value is not None:
            return torch.tensor(value, dtype=kind)
        whole = self._room(segment, key, kind)
        for where, state in self._owned(segment):
            whole[where.start : where.stop] = state[key]
        return whole

    def _described(self) -> bytes:
        """Return, by segment, what state our part of it has; None where we have none of it."""
        found: list[dict[str, Any] | None] = []
        for segment in self._flat.segments:
            owned = self._owned(segment)
            found.append(
                {key: _kind_of(key, value) for key, value in owned[0][1].items()} if owned else None
            )
        return json.dumps(found).encode()

    def _install(self, segment: Segment, key: str, value: Any) -> None:
        super()._install(segment, key, value)
        if isinstance(value, Tensor) and key != STEP:
            self._wholes[self._flat.segments.index(segment), key] = value


def sorted_items(wholes: dict[tuple[int, str], Tensor]) -> Sequence[tuple[tuple[int, str], Tensor]]:
    """Return them in an order that is the same on all ranks."""
    return sorted(wholes.items(), key=lambda item: item[0])


def _kind_of(key: str, value: Any) -> tuple[str | None, Any]:
    """Return the dtype of a tensor, and the value of anything that is one for all elements."""
    if not isinstance(value, Tensor):
        return None, value
    return str(value.dtype).removeprefix("torch."), value.item() if key == STEP else None
