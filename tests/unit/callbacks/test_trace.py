"""Traces: each step, microbatch and loss in its row at its time, and valid JSON of that format."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from torch import nn

import phalanx
from phalanx.callbacks import Trace, WorkerLost
from phalanx.callbacks.trace import lay_out_trace
from phalanx.errors import ConfigError
from tests.unit.callbacks.events import fit_begun, fit_ended, step_done

STEPS, LOST, REPLICA_0, REPLICA_1 = range(4)


def lost(step, seconds):
    return WorkerLost(
        step=step, worker=1, pid=7, reason="died", microbatch=3, dump="", seconds=seconds
    )


def slices(events, row):
    return [
        (each["name"], pytest.approx(each["ts"]), pytest.approx(each["dur"]))
        for each in events
        if each["ph"] == "X" and each["tid"] == row
    ]


def test_steps_and_spans_are_slices_of_their_rows():
    events = lay_out_trace([step_done(1), step_done(2)], [])
    assert slices(events, STEPS) == [("step 1", 100_000, 90_000), ("step 2", 200_000, 90_000)]
    assert slices(events, REPLICA_1) == [
        *(("microbatch 1", 100_000, 60_000), ("merging and optimizer", 170_000, 20_000)),
        *(("microbatch 1", 200_000, 60_000), ("merging and optimizer", 270_000, 20_000)),
    ]
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert names == {0: "steps", 1: "lost workers", 2: "replica 0", 3: "replica 1"}


def test_a_lost_worker_is_a_slice_from_its_notice_on():
    events = lay_out_trace([step_done(1)], [(0.4, lost(3, 0.1))])
    assert slices(events, LOST) == [("worker 1 lost", 300_000, 100_000)]
    found = next(each for each in events if each["name"] == "worker 1 lost")
    assert found["args"] == {"reason": "died", "microbatch": 3, "step": 3}


def test_the_file_is_written_with_each_fit_and_holds_the_last_steps(tmp_path):
    path = tmp_path / "new" / "trace.json"
    trace = Trace(path, most_steps=3)
    for last in (2, 5):
        trace(fit_begun())
        for step in range(1, last + 1):
            trace(step_done(step, loss=math.inf, learning_rates=(math.nan, 0.1)))
        trace(fit_ended())
    told = json.loads(path.read_text(), parse_constant=pytest.fail)  # no NaN, no Infinity
    names = [each["name"] for each in told["traceEvents"] if each.get("tid") == STEPS]
    assert names == ["thread_name", "thread_sort_index", "step 3", "step 4", "step 5"]


def test_what_is_no_place_for_a_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="`path` must be a file, but"):
        Trace(tmp_path)
    with pytest.raises(ConfigError, match="`most_steps` must be at least 1"):
        Trace(tmp_path / "trace.json", most_steps=0)


def test_without_a_step_nothing_is_written(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    trace(fit_begun())
    trace(fit_ended())
    assert not (tmp_path / "trace.json").exists()


def test_what_a_training_did_lies_in_rows_without_overlaps(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    batches = [(torch.randn(7, 5), torch.randint(0, 3, (7,))) for _ in range(4)]
    with phalanx.Trainer(
        net,
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        replicas=3,
        microbatches=5,
        callbacks=(Trace(tmp_path / "trace.json"),),
    ) as trainer:
        trainer.fit(batches, epochs=2)
    told = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {}
    for each in told:
        if each["ph"] == "X":
            rows.setdefault(each["tid"], []).append(each)
    assert rows.keys() == {STEPS, REPLICA_0, REPLICA_0 + 1, REPLICA_0 + 2}
    for row in rows.values():
        row.sort(key=lambda each: each["ts"])
        for one, following in itertools.pairwise(row):
            assert one["ts"] + one["dur"] <= following["ts"] + 0.002  # they are rounded
    steps = {each["name"]: each for each in rows.pop(STEPS)}
    assert [*steps] == [f"step {number}" for number in range(1, 9)]
    computed = {}
    for row in rows.values():
        for each in row:
            step = steps[f"step {each['args']['step']}"]
            assert step["ts"] - 0.002 <= each["ts"]
            assert each["ts"] + each["dur"] <= step["ts"] + step["dur"] + 0.002
            if each["name"].startswith("microbatch"):
                computed.setdefault(each["args"]["step"], []).append(each["name"])
    five = [f"microbatch {number}" for number in range(5)]
    assert {step: sorted(names) for step, names in computed.items()} == dict.fromkeys(
        range(1, 9), five
    )
