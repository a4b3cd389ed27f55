"""`make bench-tables`: what is timed, how it is judged, and what is made of it."""

from __future__ import annotations

import json
import threading

import pytest
from typer.testing import CliRunner

from benchmarks import table_tasks
from benchmarks.__main__ import app as bench_app
from benchmarks.machine import describe_machine
from benchmarks.report import Judged
from benchmarks.table_contestants import TablesJob, commands_of
from benchmarks.table_report import TITLES, Summary, judge, report_tables, summarize
from benchmarks.table_tasks import TASKS, TASKS_OF_DISK, Draws, Steps, TableTask, take_turn

MACHINE = describe_machine()
GB = 10**9


def report(names=("phalanx", "torch", "rpc", "ray", "snapshot"), seconds=2e-5):
    found = {
        name: {
            task: [[seconds, 3 * seconds], [2 * seconds]]
            for task in TASKS
            if (task in TASKS_OF_DISK) == (name == "snapshot")
        }
        for name in names
    }
    return report_tables(found, {}, MACHINE, "", rows=999, snapshot_bytes=GB)


def measured(rows):
    """Return what was measured of a target, as label, judgement and unit."""
    return [(row.label, *row.cells) for row in rows if row.cells[0].value is not None]


# --- judging --------------------------------------------------------------------------------------


def medians(**by_name):
    return {name: {task: median} for name, (task, median) in by_name.items()}


@pytest.mark.parametrize(
    ("kind", "rows", "seconds", "met"),
    [("get", 10, 15e-6, True), ("get", 10, 16e-6, False), ("add", 10, 25e-6, True)],
)
def test_a_few_rows_are_judged_by_microseconds(kind, rows, seconds, met):
    task = TableTask(kind=kind, rows=rows)
    [(what, judged, unit)] = measured(judge(medians(phalanx=(task, seconds)), GB))
    assert (what, unit, judged.met) == (f"{kind} {rows} rows", "µs", met)


@pytest.mark.parametrize(
    ("kind", "rows", "peer", "times", "met"),
    [
        ("get", 1_000, "torch", 1 / 3.1, False),
        ("add", 1_000, "torch", 1 / 2.9, True),
        ("get", 100_000, "torch", 1 / 1.6, False),
        ("add", 100_000, "torch", 1 / 1.7, True),
        ("get", 1_000, "rpc", 39, False),
        ("get", 100_000, "rpc", 11, True),
        ("add", 1_000, "rpc", 16, True),
        ("add", 100_000, "rpc", 1.4, False),
    ],
)
def test_more_rows_are_judged_beside_peers(kind, rows, peer, times, met):
    task = TableTask(kind=kind, rows=rows)
    found = judge({"phalanx": {task: 1e-3}, peer: {task: times * 1e-3}}, GB)
    [judged] = [judged for _, judged, unit in measured(found) if unit == "×"]
    assert judged.met is met
    assert judged.value == pytest.approx(times if peer == "rpc" else 1 / times)


def test_what_the_other_worker_does_meanwhile_is_no_target():
    for task in (
        TableTask(kind="get", rows=10, both=True),
        TableTask(kind="get", rows=10, fresh=True),
    ):
        assert not measured(judge(medians(phalanx=(task, 1e-6)), GB))


@pytest.mark.parametrize(
    ("snapshot_s", "disk_s", "met"), [(1.9, 0.1, True), (2.1, 0.1, False), (9.0, 9.1, True)]
)
def test_a_snapshot_is_judged_by_the_disk_where_that_is_slow(snapshot_s, disk_s, met):
    snapshot, disk = TASKS_OF_DISK
    judged, _ = judge({"snapshot": {snapshot: snapshot_s, disk: disk_s}}, GB)[-1].cells
    assert judged.met is met
    assert judged.value == pytest.approx(1 / snapshot_s)


def test_two_workers_are_judged_by_the_rows_of_both():
    """Seconds of a flood are per row of all workers: half of them is twice as fast."""
    one, two = (
        TableTask(kind="flood", rows=1_000, both=both, fresh=True) for both in (False, True)
    )
    found = judge({"phalanx": {one: 4e-7, two: 2e-7}}, GB)
    [(_, judged, _)] = measured(found)
    assert judged == Judged(2.0, 1.6, at_least=True)


# --- showing --------------------------------------------------------------------------------------


def test_sheets_show_medians_rates_and_targets():
    found = report(seconds=2e-5)
    latencies, rates, targets = *found.sheets, found.aims
    assert len(latencies.columns) == 4
    assert next(row.cells for row in latencies.rows if row.label == "  add 1,000") == (
        pytest.approx((40.0,) * 4)
    )
    assert rates.rows[-2].cells == (None, None, pytest.approx(25_000))
    assert {len(row.cells) for row in rates.rows} == {3}
    assert targets.rows[0].cells == (Judged(pytest.approx(40.0), 15.0), "µs")


def test_who_did_not_run_is_not_shown_and_its_targets_are_open():
    found = report(names=("phalanx",))
    latencies, rates, targets = *found.sheets, found.aims
    assert (len(latencies.columns), len(rates.columns)) == (1, 1)
    [row] = [row for row in targets.rows if row.label == "get 1,000 rows, torch RPC over ours"]
    assert row.cells[0].met is None


def test_a_summary_holds_every_turn():
    task = TASKS[0]
    assert summarize({"torch": {task: [[1.0, 3.0], [], [2.0]], TASKS[1]: []}}) == {
        "torch": {task: Summary(median_s=2.0, min_s=1.0, num=3, median_s_by_turn=[2.0, 2.0])}
    }


@pytest.mark.parametrize("names", [("phalanx", "torch", "rpc"), ("snapshot",), ()])
def test_a_figure_is_drawn_whoever_fell_out(tmp_path, names):
    report(names=names).draw(tmp_path / "tables.png")
    assert (tmp_path / "tables.png").read_bytes().startswith(b"\x89PNG")


# --- a turn ---------------------------------------------------------------------------------------


def test_all_contestants_draw_the_same_rows_and_each_worker_others():
    def drawn(rank, fresh=False):
        lists = []
        make = Draws(rank=rank, num_rows=500).adding(lambda rows, _: lists.append(rows.tolist()))
        step = make(TableTask(kind="add", rows=7, fresh=fresh))
        for _ in range(3):
            step()
        return lists

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    assert len({tuple(each) for each in drawn(0)}) == 1
    assert len({tuple(each) for each in drawn(0, fresh=True)}) == 3


def test_the_first_operations_of_a_turn_do_not_count():
    done = []
    steps = Steps(makers={"get": lambda task: lambda: done.append(task.rows)})
    assert len(take_turn(TableTask(kind="get", rows=10), 0, steps, 0.0)) == 3
    assert done == [10] * 5


def test_the_other_worker_is_idle_unless_both_work():
    steps = Steps(makers={"get": lambda _: lambda: None})
    assert take_turn(TableTask(kind="get", rows=10), 1, steps, 0.0) == []
    assert len(take_turn(TableTask(kind="get", rows=10, both=True), 1, steps, 0.0)) == 3
    assert take_turn(TableTask(kind="flood", rows=10), 0, steps, 0.0) == []  # it cannot


def test_a_flood_is_counted_in_rows_of_both(monkeypatch):
    ticks = iter([0.0, 6.0])
    monkeypatch.setattr(table_tasks, "now_s", lambda: next(ticks))
    added = []
    steps = Steps(makers={"flood": lambda task: lambda: added.append(task.rows)})
    task = TableTask(kind="flood", rows=10, both=True, fresh=True)
    assert take_turn(task, 0, steps, 30 / 4e6) == [6.0 / 60]
    assert added == [10] * 4  # one to warm up


def test_the_other_worker_trains_until_the_snapshot_is_done(tmp_path):
    meeting, trained, written = threading.Barrier(2), threading.Event(), []

    def snapshot():
        assert trained.wait(20)
        written.append(True)

    steps = Steps(
        makers={"add": lambda _: trained.set, "snapshot": lambda _: snapshot},
        meet=lambda: meeting.wait(20),
        until=tmp_path / "over",
    )
    task = TASKS_OF_DISK[0]
    other = threading.Thread(target=take_turn, args=(task, 1, steps, 0.0))
    other.start()
    assert len(take_turn(task, 0, steps, 0.0)) == 1
    other.join(20)
    assert written == [True]
    assert not other.is_alive()


# --- the command ----------------------------------------------------------------------------------


def run_tables(*words):
    return CliRunner().invoke(bench_app, ["tables", *words])


@pytest.mark.night
def test_it_runs_beside_its_peers_and_writes_what_it_found(tmp_path, monkeypatch):
    """Real processes, small: every contestant that is installed with torch answers every task."""
    monkeypatch.setattr("benchmarks.tables._DISK_ROUNDS", 1)
    monkeypatch.setattr("benchmarks.tables._TURN_S", 0.0)
    result = run_tables(
        "--contestants=phalanx,torch,rpc,snapshot", "--rounds=1", "--rows=900", "--snapshot-mb=1",
        f"--out={tmp_path}",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "tables.json").read_text())
    contestants = report["measured"]["contestants"]
    counts = {name: len(tasks) for name, tasks in contestants.items()}
    assert counts == {"phalanx": 30, "torch": 24, "rpc": 18, "snapshot": 2}
    assert all(target["met"] is not None for target in report["targets"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tables.json", "tables.png"]


def test_a_contestant_that_fails_is_shown_and_the_command_says_so_at_the_end(tmp_path):
    too_large = run_tables("--contestants=phalanx", f"--rows={1 << 45}", f"--out={tmp_path}")
    assert too_large.exit_code == 1
    assert "phalanx failed." in too_large.output


def test_a_contestant_that_is_not_installed_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.tables.is_there", lambda name: name != "ray")
    monkeypatch.setattr("benchmarks.tables.compete_at", lambda *_: None)
    result = run_tables(f"--out={tmp_path}")
    assert result.exit_code == 0
    assert "Ray is not installed, so it is left out" in result.output


def test_only_rpc_has_a_server():
    ranks = {
        name: len(commands_of(TablesJob(contestant=name, rows=9, folder="x", turn_s=0.0)))
        for name in TITLES
    }
    assert ranks == {"phalanx": 2, "torch": 2, "rpc": 3, "ray": 2}
