"""The table at the end of a training."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from phalanx.callbacks import EpochMeans, Totals, format_mean


def draw_summary(
    last: EpochMeans | None,
    totals: Totals,
    *,
    seconds: float,
    devices: Sequence[str],
    is_text: bool,
) -> RenderableType:
    """Draw what the training came to.

    Args:
        last: The last finished epoch, or None if there is none yet.
        totals: Of this process.
        seconds: What this process spent on training and testing.
        devices: Where each replica was.
        is_text: Show the perplexity, e to the loss.
    """
    table = Table()
    for heading in ("", "train", "validation"):
        table.add_column(heading, justify="left" if not heading else "right", min_width=10)
    for name, train, test in _mean_rows(last, is_text=is_text):
        table.add_row(name, train, test)
    table.add_section()
    table.add_row("samples/s", f"{totals.samples_per_s():,.0f}", "")
    table.add_row("seconds", f"{seconds:.1f}", "")
    for replica, (device, busy) in enumerate(zip(devices, totals.busy(), strict=False)):
        table.add_row(f"replica {replica} on {device} busy", f"{busy:.0%}", "")
    return table


def _mean_rows(last: EpochMeans | None, *, is_text: bool) -> list[tuple[str, str, str]]:
    if last is None:
        return [("loss", "no epoch yet", "")]
    train, test = dict(last.train), dict(last.validation or {})
    if is_text:
        for means in (train, test):
            if "loss" in means:
                means["perplexity"] = math.exp(min(means["loss"], 700.0))
    names = dict.fromkeys([*train, *test])
    return [
        (name, _format_cell(name, train.get(name)), _format_cell(name, test.get(name)))
        for name in names
    ]


def _format_cell(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if name == "perplexity" else format_mean(name, value)
