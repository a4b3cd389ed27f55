"""``phalanx evaluate`` and ``phalanx predict``: a run's model on other data."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.console import make_console
from phalanx.cli.output import written_output
from phalanx.cli.train import RunPath, Trust
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.cli.schema import Schema

Other = Annotated[
    str, typer.Argument(metavar="DATA", help="Data in the same form as for `phalanx train`.")
]


def evaluate(run: RunPath, data: Other, *, trust: Trust = False) -> None:
    """Print the loss, and the accuracy for classes, of a run's model on data.

    Of data that has a validation part, only this part counts.
    """
    # Late, as they need torch, which takes seconds: `--help` does without.
    from phalanx.cli.data import open_data
    from phalanx.cli.training_run import TrainingRun

    opened = TrainingRun.open(run, trust=trust)
    found = opened.evaluate(open_data(data, schema=opened.schema))
    make_console().print("  ".join(f"{name} {value:.4f}" for name, value in found.items()))


def predict(
    run: RunPath,
    data: Other,
    *,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="A CSV, written or replaced.")
    ] = Path("predictions.csv"),
    trust: Trust = False,
) -> None:
    """Write a CSV with a row for each row of data: the class and the probabilities, or numbers.

    Of data that has a validation part, the other part is taken.
    """
    from phalanx.cli.data import open_data
    from phalanx.cli.training_run import TrainingRun

    opened = TrainingRun.open(run, trust=trust)
    if opened.schema.is_text:
        raise ConfigError("`RUN` must be trained on rows, but is trained on a text.")
    rows = open_data(data, schema=opened.schema)
    outputs = opened.predict(rows)
    lines = _rows_of(outputs, opened.schema)
    if rows.names:
        lines = ([name, *row] for name, row in zip(["file", *rows.names], lines, strict=True))
    with written_output(out) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)
    make_console().print(f"{len(outputs):,} rows in {out}")
    if message := _describe_gaps(outputs, opened.module.state_dict()):
        make_console(stderr=True).print(message)


def _describe_gaps(outputs: Tensor, state: Mapping[str, Tensor]) -> str:
    """Return a warning for predictions that are no finite numbers; empty without any."""
    is_gap = ~outputs.isfinite().all(1)
    places = is_gap.nonzero().flatten().tolist()
    if not places:
        return ""
    reason = "an input of these rows may be missing, or far outside the training data's range."
    if not all(each.isfinite().all() for each in state.values()):
        reason = "the model's weights hold nan or inf. Train it again, with a smaller --lr."
    return (
        f"Warning: the model's outputs are nan or inf in {len(places):,} of {len(outputs):,} rows, "
        f"first in row {places[0] + 1}: {reason}"
    )


def _rows_of(outputs: Tensor, schema: Schema) -> Iterator[Sequence[object]]:
    width = outputs.shape[1]
    if schema.task == "classify":
        names: Sequence[str] = schema.classes
        if len(names) != width:  # a model of the user's own may have other outputs
            names = [str(place) for place in range(width)]
        yield ["prediction", *(f"p({name})" for name in names)]
        for row, place in zip(outputs.softmax(1).tolist(), outputs.argmax(1).tolist(), strict=True):
            yield [names[place], *row]
    else:
        yield ["prediction"] if width == 1 else [f"prediction_{place}" for place in range(width)]
        yield from outputs.tolist()
