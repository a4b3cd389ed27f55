"""The curve and the epochs of a training, from its events."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phalanx.callbacks.callback import Callback
from phalanx.callbacks.events import EpochDone, FitBegun, StepDone
from phalanx.errors import ConfigError
from phalanx.files import written_whole
from phalanx.plan import check_argument

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PANELS = 4  # a confusion matrix has many means


class History(Callback):
    """A callback that keeps the curve of a training and its epochs.

    Attributes:
        losses: The loss of each step since it was first called; that of step s is at index s - 1
            where that was at the run's beginning.
        epochs: The finished epochs.

    Example:
        >>> history = History()
        >>> history.losses, history.epochs
        ([], [])
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.epochs: list[EpochDone] = []
        self._writes = True  # noted in each `fit`: a plot comes when the ranks' group may be gone

    def attach(self, trainer: Any) -> None:
        """Start over, with the training of ``trainer``."""
        super().attach(trainer)
        self.losses.clear()
        self.epochs.clear()

    def plot(self, path: str | Path | None = None, *, title: str = "Training") -> Figure:
        """Draw the losses, and the first metrics of the epochs.

        Args:
            path: A PNG file to be written, by the first of the ranks.
            title: The line above all.

        Returns:
            matplotlib's figure, which a notebook shows after ``%matplotlib inline``.

        Raises:
            ConfigError: It cannot be written there.
        """
        fits = path is None or isinstance(path, (str, os.PathLike))
        check_argument(fits, "path", "be a path", path)
        figure = self._draw(title)
        if path is not None and self._writes:
            try:
                with written_whole(Path(path)) as draft:
                    figure.savefig(draft, format="png", dpi=140)
            except OSError as error:
                raise ConfigError(
                    f"`path` must be a file that can be written, but is {str(path)!r}: {error}. "
                    "Name another, in a folder that exists."
                ) from error
        return figure

    def _draw(self, title: str) -> Figure:
        # Late: it takes a second to import. Agg by hand: pyplot's may want a screen.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        held = [means for each in self.epochs for means in (each.train, each.validation or {})]
        names = list(dict.fromkeys(["loss", *(name for means in held for name in means)]))
        names = names[:_MOST_PANELS]
        figure = Figure(figsize=(5.5 * max(2, len(names)), 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, parse_math=False)
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            self._draw_panel(axes, name)
        return figure

    def _draw_panel(self, axes: Axes, name: str) -> None:
        axes.set_title(name, parse_math=False)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if name == "loss":
            steps = range(1, len(self.losses) + 1)
            axes.plot(steps, self.losses, color="#b5cdea", linewidth=0.8, label="each step")
        for kind, colour in (("train", "#2563a8"), ("validation", "#e07a1f")):
            found = [(each.steps, getattr(each, kind) or {}) for each in self.epochs]
            points = [(steps, means[name]) for steps, means in found if name in means]
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, marker="o", ms=4.5, label=kind)
        axes.legend()

    def state_dict(self) -> dict[str, Any]:  # Any: a tensor, or JSON
        """Return the losses and the epochs, for a checkpoint."""
        losses = torch.tensor(self.losses, dtype=torch.float64)
        return {"losses": losses, "epochs": [asdict(each) for each in self.epochs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        epochs = [EpochDone(**each) for each in state["epochs"]]
        self.losses[:], self.epochs[:] = state["losses"].tolist(), epochs

    def on_fit_begin(self, event: FitBegun) -> None:  # noqa: ARG002
        """Note whether this rank writes."""
        self._writes = self.is_writer

    def on_step_end(self, event: StepDone) -> None:
        """Keep the loss; microseconds, as nothing is written here."""
        self.losses.append(event.loss)

    def on_epoch_end(self, event: EpochDone) -> None:
        """Keep the means."""
        self.epochs.append(event)
