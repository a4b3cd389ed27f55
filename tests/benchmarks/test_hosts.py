"""`make bench-hosts`: what is timed, how it is judged, and the command with real servers."""

from __future__ import annotations

import json
import socket
import threading

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import host_contestants, host_tasks
from benchmarks.__main__ import app as bench_app
from benchmarks.host_contestants import CONTESTANTS, HostsJob, commands_of
from benchmarks.host_report import TITLES, judge, report_hosts
from benchmarks.host_tasks import TASKS, TASKS_OF_ALL, take_turn
from benchmarks.machine import describe_machine
from benchmarks.report import Judged
from benchmarks.table_tasks import Steps, TableTask

FLOOD, STREAM = TASKS_OF_ALL


def judged(medians, label):
    [row] = [row for row in judge(medians) if row.label == label]
    return row.cells[0]


# --- judging --------------------------------------------------------------------------------------


def test_a_thousand_rows_are_judged_by_microseconds_and_beside_torch_rpc():
    task = TableTask(kind="get", rows=1_000)
    medians = {"phalanx": {task: 4e-4}, "rpc": {task: 1e-3}}
    assert judged(medians, "get 1,000 rows").met
    assert judged(medians, "the same, torch RPC over ours").met is False


@pytest.mark.parametrize(("name", "met"), [("phalanx", False), ("encrypted", True)])
def test_encryption_may_cost_half_of_the_bandwidth(name, met):
    task = TableTask(kind="get", rows=100_000)
    medians = {name: {task: 3e-2}, "socket": {task: 1e-2}}
    label = f"get 100,000 rows, {TITLES[name]}: of the socket's bandwidth"
    assert judged(medians, label).met is met


@pytest.mark.parametrize(
    ("task", "how"), [(FLOOD, "each waited for"), (STREAM, "waited for at the end")]
)
def test_small_adds_are_counted_per_second_of_all_clients(task, how):
    cell = judged({"phalanx": {task: 8e-5}}, f"adds of 10 rows, all clients, {how}")
    assert cell == Judged(pytest.approx(12_500), 10_000.0, at_least=True)
    assert cell.met


def test_own_rows_are_judged_beside_a_table_of_one_host():
    task = TableTask(kind="local add", rows=10)
    medians = {"phalanx": {task: 1.1e-5}, "one-host": {task: 1e-5}}
    assert judged(medians, "add 10 of its own host, over one host's table").met is False


def test_the_report_has_a_column_for_each_that_ran_and_a_figure(tmp_path):
    seconds = {name: {task: [[1e-4]] for task in TASKS} for name in ("phalanx", "socket")}
    report = report_hosts(seconds, {}, describe_machine(), "", rows=9, clients=3)
    latencies, rates = report.sheets
    assert [column.heading for column in latencies.columns] == ["Phalanx", "TCP socket"]
    assert rates.rows[1].cells == (pytest.approx(10_000), pytest.approx(10_000))
    report.draw(tmp_path / "hosts.png")
    assert (tmp_path / "hosts.png").read_bytes().startswith(b"\x89PNG")


# --- a turn ---------------------------------------------------------------------------------------


def test_a_flood_is_counted_in_adds_of_all_clients(monkeypatch):
    ticks = iter([0.0, 6.0])
    monkeypatch.setattr(host_tasks, "now_s", lambda: next(ticks))
    added = []
    steps = Steps(makers={"flood": lambda task: lambda: added.append(task.rows)})
    assert take_turn(FLOOD, steps, 3, is_client=True, turn_s=0.002) == [6.0 / (2 * 3)]
    assert len(added) == host_tasks._WARM_UP + 2


def test_a_stream_ends_when_all_adds_have_been_taken(monkeypatch):
    monkeypatch.setattr(host_tasks, "now_s", iter([0.0, 6.0]).__next__)
    done = []
    steps = Steps(
        makers={"stream": lambda _: lambda: done.append("add")},
        meet=lambda: done.append("meet"),
        finish=lambda: done.append("finish"),
    )
    assert take_turn(STREAM, steps, 3, is_client=True, turn_s=0.0007) == [6.0 / (3 * 3)]
    warm_up = ["add"] * host_tasks._WARM_UP
    assert done == [*warm_up, "finish", "meet", *["add"] * 3, "finish", "meet"]


def test_who_owns_the_rows_only_meets_the_clients():
    met = []
    steps = Steps(makers={"flood": lambda _: pytest.fail("it adds")}, meet=lambda: met.append(1))
    assert take_turn(FLOOD, steps, 3, is_client=False, turn_s=0.0) == []
    assert len(met) == 2


def test_the_socket_sends_as_many_bytes_as_the_rows_have():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=host_contestants._send_bytes, args=(listening,))
        server.start()
        with socket.create_connection(listening.getsockname()) as connection:
            for num_rows in (3, 5):
                ids, out = torch.zeros(num_rows, dtype=torch.int64), torch.ones(num_rows, 64)
                host_contestants._ask_for_bytes(connection, ids, out)
                assert not out.any()
        server.join(20)
        assert not server.is_alive()


# --- the command ----------------------------------------------------------------------------------


def job(name):
    return HostsJob(contestant=name, rows=9, num_clients=3, folder="x", turn_s=0.0, port=1)


def test_who_owns_the_rows_is_a_process_of_its_own_but_of_ray_and_of_one_host():
    assert {name: len(commands_of(job(name))) for name in CONTESTANTS} == {
        "phalanx": 4, "encrypted": 4, "one-host": 3, "rpc": 4, "ray": 3, "socket": 4,
    }  # fmt: skip


def run_hosts(*words):
    return CliRunner().invoke(bench_app, ["hosts", *words])


@pytest.mark.night
def test_it_runs_with_servers_of_their_own_and_writes_what_it_found(tmp_path, monkeypatch):
    """Real processes, small: two workers, and the servers of two hosts."""
    monkeypatch.setattr("benchmarks.hosts._TURN_S", 0.01)
    result = run_hosts(
        "--contestants=phalanx", "--rounds=1", "--rows=900", "--clients=1", f"--out={tmp_path}"
    )
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "hosts.json").read_text())
    assert len(report["measured"]["contestants"]["phalanx"]) == len(TASKS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts.json", "hosts.png"]


@pytest.mark.night
def test_every_contestant_that_is_installed_with_torch_answers_every_task(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.hosts._TURN_S", 0.01)
    names = [name for name in CONTESTANTS if name != "ray"]
    result = run_hosts(
        f"--contestants={','.join(names)}", "--rounds=1", "--rows=900", "--clients=2",
        f"--out={tmp_path}",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    contestants = json.loads((tmp_path / "hosts.json").read_text())["measured"]["contestants"]
    counts = {name: len(tasks) for name, tasks in contestants.items()}
    assert counts == {"phalanx": 14, "encrypted": 14, "one-host": 6, "rpc": 8, "socket": 3}


def test_a_contestant_that_is_not_installed_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.hosts.is_there", lambda name: name != "ray")
    monkeypatch.setattr("benchmarks.hosts.compete_at", lambda *_: None)
    result = run_hosts(f"--out={tmp_path}")
    assert result.exit_code == 0, result.output
    assert "Ray is not installed, so it is left out" in result.output
