"""The report of all benchmarks: targets, tables, JSON, figure, and the exit code."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import typer
from rich.console import Console

from benchmarks.machine import describe_machine
from benchmarks.panels import Bar, Bars, Line, Lines, draw
from benchmarks.report import Column, Judged, Report, Row, Sheet, publish

SHEET = Sheet(
    "Steps",
    (Column("median", "ms"), Column("÷ DDP")),
    (
        Row("on two cores"),
        Row("Trainer", (12.34, Judged(0.5, 0.45)), ours=True),
        Row("tables", (5.0, Judged(7.0, 6.0, at_least=True))),
        Row("nobody", (None, Judged(None, 1.0))),
        Row("DDP", (123.4, "–")),
    ),
)
PANELS = (
    Bars(title="one step", note="ms", bars=(Bar(label="x", parts=(1.0, 2.0)),), parts=("a", "b")),
    Bars(title="kills", note="ms", bars=(Bar(label="x", parts=(3.0,), dots=(2.0, 40.0)),),
         guides={"at most": 5.0}, log=True),
    Lines(title="sizes", note="s", lines=(Line(label="x", points=((1, 2.0), (4, 3.0))),),
          levels={"even": 2.5}, ticks={1: "1", 4: "4"}, log_x=True, log_y=True),
)  # fmt: skip


def report(**failures):
    return Report(
        name="step",
        title="One step",
        command="python -m benchmarks step",
        machine=describe_machine(),
        sheets=(SHEET,),
        panels=PANELS,
        measured={"seconds": [0.01]},
        failures=failures,
    )


@pytest.mark.parametrize(
    ("judged", "met"),
    [
        (Judged(1.0, 1.0), True),
        (Judged(1.01, 1.0), False),
        (Judged(1.0, 1.0, at_least=True), True),
        (Judged(0.99, 1.0, at_least=True), False),
        (Judged(None, 1.0), None),
    ],
)
def test_a_target_is_met_at_its_limit(judged, met):
    assert judged.met is met


def test_the_table_marks_for_developers_what_is_met_and_what_is_missed():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(SHEET.as_table(aims=True))
    rows = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "Trainer 12.3 0.50 ≤0.45 ✗" in rows
    assert "tables 5.00 7.00 ≥6.00 ✓" in rows
    assert "nobody – –" in rows
    assert "DDP 123 –" in rows


def test_targets_are_shown_to_nobody_who_did_not_ask_for_them(tmp_path):
    with_aims = replace(report(), aims=Sheet("Targets", (Column("measured"),), (Row("y", (1.0,)),)))
    shown = {}
    for aims in (False, True):
        console = Console(width=80, record=True, file=io.StringIO())
        publish(with_aims, console, tmp_path, aims=aims)
        shown[aims] = " ".join(console.export_text().split())
    assert "0.50" in shown[False]
    assert not any(mark in shown[False] for mark in ("≤", "✗", "✓", "Targets"))
    assert all(mark in shown[True] for mark in ("≤0.45 ✗", "✓", "Targets"))
    record = json.loads(with_aims.as_json())
    assert [table["title"] for table in record["tables"]] == ["Steps"]
    assert len(record["targets"]) == 3


def test_the_record_says_what_was_measured_where_and_how():
    record = json.loads(
        report(x="It fell.\nProcess 0 said last:\nTraceback, /somebody/s/path").as_json()
    )
    assert record["command"] == "python -m benchmarks step"
    assert record["machine"]["commit"] == describe_machine().commit
    assert record["measured"] == {"seconds": [0.01]}
    assert record["failures"] == {"x": "It fell."}
    assert record["tables"][0]["rows"][1] == {"label": "Trainer", "cells": [12.34, 0.5]}
    assert [each["met"] for each in record["targets"]] == [False, True, None]
    assert record["targets"][0] == {
        "table": "Steps", "row": "Trainer", "column": "÷ DDP",
        "value": 0.5, "limit": 0.45, "at_least": False, "met": False,
    }  # fmt: skip


@pytest.mark.parametrize("panels", [PANELS, PANELS[:1], ()])
def test_a_figure_is_drawn_whoever_fell_out(tmp_path, panels):
    draw(panels, "title", "footnote", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_failure_is_shown_and_is_an_error_unless_excused(tmp_path):
    console = Console(record=True, file=io.StringIO())
    publish(report(torchrun="It ended."), console, tmp_path / "a" / "b", excused=["torchrun"])
    assert "torchrun failed." in console.export_text()
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == {"step.json", "step.png"}
    with pytest.raises(typer.Exit):
        publish(report(torchrun="It ended."), console, tmp_path)
