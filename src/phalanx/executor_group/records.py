"""What a monitor has seen, and the forms in which it is told: a table, JSON lines, TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO

from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "Board",
    "NonFinite",
    "Record",
    "draw_table",
    "find_board",
    "write_board",
    "write_lines",
]


class Record(NamedTuple):
    """One value of one tensor in one step.

    Attributes:
        step: Which one, from 1.
        device: Where the tensor lay; ``"cpu#1"`` is replica 1 on the CPU, and ``"cpu#1/3"`` its
            microbatch 3 (its forward pass number 3, from 0, where there are no microbatches), if
            there were several in the step.
        name: Such as ``"body.0.output"``, ``"body.0.input"``, ``"body.0.weight"``,
            ``"body.0.weight.grad"``. Nested inputs and outputs have the path behind.
        value: The statistic of the tensor.
    """

    step: int
    device: str
    name: str
    value: float


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """Where infinity or nan was first seen in a step: the first module in the order of the forward.

    Attributes:
        module: Its name; empty for the whole model.
        name: The tensor's, as in :class:`Record`.
        device: Where it lay.
        replica: Which replica ran the module; None for parameters, and without replicas.
        microbatch: Which one it was; None where that is not known.
        forward: Which forward pass of the replica in this step, from 0; None for parameters.
    """

    step: int
    module: str
    name: str
    device: str
    replica: int | None
    microbatch: int | None
    forward: int | None

    def __str__(self) -> str:
        places = [
            f"{word} {number}"
            for word, number in (
                ("replica", self.replica),
                ("microbatch", self.microbatch),
                ("forward pass", self.forward if self.microbatch is None else None),
            )
            if number is not None
        ]
        where = ", ".join([f"step {self.step}", *places])
        return (
            f"`{self.name}` must be finite, but holds nan or infinity ({where} on {self.device}). "
            "It is the first of what is watched: look at its inputs and parameters."
        )


class Board(Protocol):
    """What takes numbers as TensorBoard's `SummaryWriter` does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Take one number."""

    def flush(self) -> object:
        """Write what was taken."""

    def close(self) -> object:
        """Write what was taken, and take no more."""


def find_board() -> Callable[[str], Board]:
    """Return what opens a TensorBoard writer on a folder.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    try:
        # Optional and slow: the extra `board`.
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "`board` must not be a folder without TensorBoard, but is one. Install it, as in "
            "`pip install phalanx[board]`, or give a writer of your own."
        ) from error
    found: Callable[[str], Board] = SummaryWriter
    return found


def write_board(records: Iterable[Record], board: Board) -> None:
    """Give all records to ``board``, by name and device."""
    for record in records:
        board.add_scalar(f"{record.name}/{record.device}", record.value, record.step)
    board.flush()


def write_lines(records: Iterable[Record], file: TextIO) -> None:
    """Write one JSON object per record; what is not finite as ``"nan"``, ``"inf"``, ``"-inf"``."""
    for record in records:
        value = record.value if math.isfinite(record.value) else str(record.value)
        file.write(json.dumps({**record._asdict(), "value": value}, ensure_ascii=False) + "\n")
    file.flush()


def draw_table(records: Sequence[Record]) -> Table:
    """Draw the records as a table; what is not finite in red."""
    from rich.table import Table  # here, as it takes long to import

    table = Table("step", "device", "name", "value")
    for record in records:
        style = None if math.isfinite(record.value) else "bold red"
        table.add_row(
            str(record.step), record.device, record.name, f"{record.value:.6g}", style=style
        )
    return table
