"""The position of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.warning import warn_user


class BatchLoss(NamedTuple):
    """A batch's loss, its weight (see `Trainer`), and its rows."""

    value: float
    weight: float
    samples: int


class Position(NamedTuple):
    """The position of a run: its steps, epochs, and batches of the running epoch.

    Attributes:
        steps: Updates done since the beginning.
        epochs: Epochs finished since the beginning.
        batch: Batches done in the running epoch.
        samples: Rows done in the running epoch.
        weight: The sum of the weights of these batches.
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

    def next_batch(self, loss: BatchLoss) -> Position:
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


@dataclass(kw_only=True)
class RunPosition:
    """The position of a run and its settings: a part of its state."""

    seed: int
    microbatches: int | None
    position: Position = field(default_factory=Position)

    # Any, here and below: plain values.
    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        settings = {"seed": self.seed, "microbatches": self.microbatches}
        return {**settings, "position": tuple(self.position)}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Continue from ``state``; seed and microbatches stay as they were given."""
        self.position = Position(*state["position"])

    def warn_of_settings(self, saved: dict[str, Any]) -> None:
        """Warn, at the line that calls `resume()`, of other settings than those saved."""
        for name in ("microbatches", "seed"):
            if (given := getattr(self, name)) != saved[name]:
                warn_user(
                    f"`{name}` must be {saved[name]!r} as in the checkpoint to continue with "
                    f"identical weights, but is {given!r}.",
                )
