"""What `phalanx plan` shows: what was measured, what is expected, and how far both agree."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from phalanx.forecast import Cluster, Faults, Prediction, StepCosts, predict_all

__all__ = ["Checked", "compare", "show"]

_TITLES = {"threads": "threads", "processes": "processes", "ranks": "ranks", "ddp": "DDP"}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A prediction for the machine on which it was made, beside what was measured there.

    Attributes:
        error: Of the prediction, over what was measured.
    """

    formation: str
    workers: int
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def compare(
    costs: StepCosts, seconds: Mapping[str, Mapping[int, Mapping[str, float]]]
) -> list[Checked]:
    """Return a row for each formation and number of workers that was measured, all on this host."""
    checked = []
    for name, by_count in seconds.items():
        cluster = Cluster(cores=costs.cores, workers_per_host=max(by_count))
        for each in predict_all(costs, [name], list(by_count), cluster=cluster):
            checked.append(
                Checked(
                    formation=name,
                    workers=each.workers,
                    predicted_s=each.step_s,
                    measured_s=by_count[each.workers]["whole"],
                )
            )
    return checked


def show(
    console: Console,
    costs: StepCosts,
    cluster: Cluster,
    faults: Faults,
    predictions: Sequence[Prediction],
    checked: Sequence[Checked],
) -> None:
    """Print all of it."""
    console.print(_describe(costs))
    console.print(_describe_cluster(costs, cluster, faults))
    console.print(_table_of(predictions), soft_wrap=False)
    if checked:
        console.print(_table_of_checks(checked), soft_wrap=False)
        errors = [abs(each.error) for each in checked]
        console.print(
            f"Errors: {statistics.mean(errors):.0%} on average, {max(errors):.0%} at most."
        )


def _describe(costs: StepCosts) -> str:
    alone = f"{_milliseconds(costs.alone_s)} for a step of one worker"
    return (
        f"{costs.model}: {alone} with {costs.rows} rows, {costs.gradient_bytes / 1e6:.3g} MB of "
        f"gradients; measured on {costs.cores} {'core' if costs.cores == 1 else 'cores'}"
    )


def _describe_cluster(costs: StepCosts, cluster: Cluster, faults: Faults) -> str:
    jitter = costs.jitter if faults.jitter is None else faults.jitter
    failures = "no failures"
    if faults.failures_per_hour:
        failures = (
            f"{faults.failures_per_hour:g} failures an hour of each process, a checkpoint every "
            f"{faults.checkpoint_s:g} s"
        )
    return (
        f"Hosts of {cluster.cores} cores with up to {cluster.workers_per_host} workers; between "
        f"them {cluster.bytes_per_s / 1e9:g} GB/s and {1e6 * cluster.latency_s:g} µs; jitter "
        f"{jitter:.2g}; {failures}"
    )


def _table_of(predictions: Sequence[Prediction]) -> Table:
    """Return a row for each number of workers: a step, and the efficiency with failures."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    names = list(dict.fromkeys(each.formation for each in predictions))
    table.add_column("workers", justify="right")
    table.add_column("hosts", justify="right")
    for name in names:
        table.add_column(_TITLES[name], justify="right", no_wrap=True)
    found = {(each.workers, each.formation): each for each in predictions}
    for count in sorted({each.workers for each in predictions}):
        row = [found.get((count, name)) for name in names]
        hosts = max(each.hosts for each in row if each)
        table.add_row(f"{count:,}", f"{hosts:,}", *(_cell(each) for each in row))
    return table


def _cell(prediction: Prediction | None) -> str:
    if prediction is None:
        return "–"
    return f"{_milliseconds(prediction.step_s)} {prediction.efficiency:4.0%}"


def _table_of_checks(checked: Sequence[Checked]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column("formation")
    for heading in ("workers", "predicted", "measured", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in checked:
        table.add_row(
            _TITLES[each.formation],
            str(each.workers),
            _milliseconds(each.predicted_s),
            _milliseconds(each.measured_s),
            f"{each.error:+.0%}",
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"
