"""How far a training run has come."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Loss", "Position"]


class Loss(NamedTuple):
    """A batch's loss, what the batch stands for, and its rows."""

    value: float
    weight: float
    samples: int


class Position(NamedTuple):
    """Where a run stands.

    Attributes:
        steps: Updates done since the beginning.
        epochs: Epochs finished since the beginning.
        batch: Batches done in the running epoch.
        samples: Rows done in the running epoch.
        weight: What they stand for.
        weighted_loss: Sum of the losses of the epoch's batches, each times its weight.
    """

    steps: int = 0
    epochs: int = 0
    batch: int = 0
    samples: int = 0
    weight: float = 0.0
    weighted_loss: float = 0.0

    def note_on(self, error: Exception, *, in_epoch: bool) -> None:
        """Note on ``error`` in which step it was raised: the one that comes next here."""
        where = f": batch {self.batch + 1} of epoch {self.epochs + 1}" if in_epoch else ""
        note = f"In step {self.steps + 1}{where}."
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)

    def next_batch(self, loss: Loss) -> Position:
        """Return the position after one more batch."""
        return self._replace(
            steps=self.steps + 1,
            batch=self.batch + 1,
            samples=self.samples + loss.samples,
            weight=self.weight + loss.weight,
            weighted_loss=self.weighted_loss + loss.value * loss.weight,
        )

    def next_epoch(self) -> Position:
        """Return the position after the epoch's last batch."""
        return Position(steps=self.steps, epochs=self.epochs + 1)

    @property
    def mean_loss(self) -> float:
        """The epoch's loss so far."""
        return self.weighted_loss / self.weight
