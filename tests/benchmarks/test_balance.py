"""`make bench-balance`: contestants and report; nothing depends on how fast anything is."""

from __future__ import annotations

import copy
import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import benchmarks.balance as balance_module
from benchmarks import slowed
from benchmarks.__main__ import app as bench_app
from benchmarks.balance import Contest, ratio, report_balance
from benchmarks.contestants import build, loss_of
from benchmarks.machine import Machine
from benchmarks.slowed import BalanceJob, Slowdown, open_job, read_account
from benchmarks.turns import Outcome, Pace
from phalanx.errors import ConfigError

MACHINE = Machine(
    cpu="Abacus", cores=2, load=0.1, system="Linux", python="3", torch="2", phalanx="0",
    commit=None, date="today",
)  # fmt: skip
CONTESTANTS = [
    f"{container}-{case}"
    for container in ("trainer", "dataparallel")
    for case in ("slowed-even", "slowed-auto", "slowed-ideal", "equal-even", "equal-auto")
]
DECISION = {
    "step": 1, "seconds_per_row": [0.5, None], "proposed": [0.5, 0.5], "chosen": [0.75, 0.25],
    "reason": "moves",
}  # fmt: skip


def job_of(folder: Path, **changes: object) -> BalanceJob:
    told = {"container": "trainer", "workloads": None, "model": "tiny", "slow_s": 0.0}
    return BalanceJob(**{**told, **changes}, account=str(folder / "account"))


# --- contestants ----------------------------------------------------------------------------------


@pytest.mark.parametrize("container", ["trainer", "dataparallel"])
@pytest.mark.parametrize("workloads", [None, "auto", (3.0, 1.0)])
def test_a_contestant_trains_as_plain_pytorch_and_tells_its_shares(
    tmp_path, monkeypatch, container, workloads
):
    module, batch = build("tiny")
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(plain(batch[0]), batch[1]).backward()
        optimizer.step()
    monkeypatch.setattr(slowed, "build", lambda _: (module, batch))
    with open_job(job_of(tmp_path, container=container, workloads=workloads)) as step:
        for _ in range(3):
            step()
    for theirs, ours in zip(plain.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    told = read_account(tmp_path / "account")
    if workloads != "auto":
        assert told["shares"] == [[12, 4] if workloads else [8, 8]] * 3
    assert [len(told["shares"]), len(told["decisions"])] == [3, 3 if workloads == "auto" else 0]
    assert all(set(each) == set(DECISION) for each in told["decisions"])


def test_only_the_slow_replica_waits_and_for_each_of_its_rows(tmp_path, monkeypatch):
    waits = []

    class Watched(Slowdown):
        def __init__(self, seconds_per_row: float) -> None:
            super().__init__(seconds_per_row)
            self._never = self

        def wait(self, seconds: float) -> None:
            waits.append((threading.current_thread().name, seconds))

    monkeypatch.setattr(slowed, "Slowdown", Watched)
    for container in ("trainer", "dataparallel"):
        job = job_of(tmp_path, container=container, workloads=(3.0, 1.0), slow_s=0.5)
        with open_job(job) as step:
            step()
        assert set(waits) == {("phalanx-replica-1", 2.0)}


def test_a_contestant_that_did_not_end_has_told_nothing(tmp_path):
    assert read_account(tmp_path / "account") == {"shares": [], "decisions": []}


def test_every_container_runs_with_and_without_a_slow_replica(tmp_path):
    jobs = balance_module._jobs("mlp", 3.0, 0.25, tmp_path)
    assert list(jobs) == CONTESTANTS
    assert {name: job.slow_s for name, job in jobs.items()} == {
        name: 0.5 if "slowed" in name else 0.0 for name in CONTESTANTS
    }
    assert jobs["trainer-slowed-ideal"].workloads == (3.0, 1.0)
    assert jobs["dataparallel-slowed-auto"].workloads == "auto"
    assert jobs["dataparallel-equal-even"].workloads is None
    assert len({job.account for job in jobs.values()}) == len(jobs)


# --- the report -----------------------------------------------------------------------------------


def contest(**seconds: list[list[float]]) -> Contest:
    named = {name.replace("_", "-"): turns for name, turns in seconds.items()}
    return Contest(
        model="mlp",
        slowdown=3.0,
        seconds_per_row=1e-4,
        outcome=Outcome(seconds=named, failures={}),
        accounts={
            name: {"shares": [[64, 64], [96, 32]], "decisions": [DECISION]} for name in named
        },
    )


ALL = contest(
    trainer_slowed_even=[[0.3, 0.3], [0.3]],
    trainer_slowed_auto=[[0.16, 0.2], [0.16]],
    trainer_slowed_ideal=[[0.15], [0.16]],
    trainer_equal_even=[[0.1], [0.1]],
    trainer_equal_auto=[[0.11], [0.11]],
)


def test_a_ratio_is_the_median_over_rounds_of_which_each_is_compared_with_itself():
    slower_later = contest(
        trainer_equal_even=[[0.1], [0.2], [0.4]], trainer_equal_auto=[[0.2], [0.4], [0.8]]
    )
    assert ratio(slower_later, "trainer-equal-auto", "trainer-equal-even") == pytest.approx(2.0)
    assert ratio(slower_later, "trainer-equal-auto", "trainer-slowed-even") is None


def cells_of(shown: Contest) -> list[tuple]:
    report = report_balance(shown, MACHINE, Pace(), "")
    return [row.cells for row in report.sheets[0].rows if row.cells]


def test_balanced_shares_are_judged_and_others_are_not():
    slow_even, slow, ideal, even, equal = cells_of(ALL)
    assert slow[0] == pytest.approx(160)
    assert slow[1].met
    assert slow[1].limit == pytest.approx(1 / 1.4)
    assert (slow[2].value, slow[2].limit) == (pytest.approx((1.2 + 1.0) / 2), 1.1)
    assert slow[3] == "96:32"
    assert (equal[1].value, equal[1].limit, equal[1].met) == (pytest.approx(1.1), 1.02, False)
    assert (slow_even[1], ideal[2], even[1], equal[2]) == (None,) * 4
    assert ideal[1] == pytest.approx((0.5 + 0.16 / 0.3) / 2)


def test_the_record_holds_every_step_and_decision():
    measured = json.loads(report_balance(ALL, MACHINE, Pace(), "").as_json())["measured"]
    auto = measured["contestants"]["trainer-slowed-auto"]
    assert auto["shares"] == [[64, 64], [96, 32]]
    assert auto["decisions"][0]["seconds_per_row"] == [0.5, None]
    assert auto["seconds_by_round"] == [[0.16, 0.2], [0.16]]


@pytest.mark.parametrize("shown", [ALL, contest()])
def test_a_figure_is_drawn_whoever_fell_out(tmp_path, shown):
    report_balance(shown, MACHINE, Pace(), "").draw(tmp_path / "balance.png")
    assert (tmp_path / "balance.png").read_bytes().startswith(b"\x89PNG")


# --- the command ----------------------------------------------------------------------------------

# Asked for n steps, its times are 1, 2, …, n seconds; at its end it writes its account.
TELLS = """
import json, pathlib, sys
print([], flush=True)
for line in sys.stdin:
    print(json.dumps([float(n + 1) for n in range(int(line))]), flush=True)
decision = {"step": 1, "seconds_per_row": [2e-4, 4e-4], "proposed": [1, 1], "chosen": [1, 1],
            "reason": "stub"}
account = {"shares": [[8, 8]] * 10, "decisions": [decision] * 24}
pathlib.Path(sys.argv[1]).write_text(json.dumps(account))
"""
DIES = "import sys\nprint('no such layout', file=sys.stderr)\nsys.exit(3)\n"


def run_balance(*words: str):
    return CliRunner().invoke(bench_app, ["balance", *words])


def test_the_command_prints_a_table_and_writes_its_files(tmp_path, monkeypatch):
    def stub(job: BalanceJob) -> tuple[str, ...]:
        return (sys.executable, "-c", TELLS, job.account)

    monkeypatch.setattr(balance_module, "command_of", stub)
    result = run_balance("--steps=4", "--slowdown=5", f"--out={tmp_path / 'a' / 'b'}")
    assert result.exit_code == 0, result.output
    assert "a row takes a replica 300 µs; the slow one waits 1200 µs more" in result.output
    assert "replica 1 5× slower" in result.output
    report = json.loads((tmp_path / "a" / "b" / "balance.json").read_text())["measured"]
    assert list(report["contestants"]) == CONTESTANTS
    assert all(each["shares"] == [[8, 8]] * 10 for each in report["contestants"].values())
    assert (tmp_path / "a" / "b" / "balance.png").exists()


def test_a_failed_contestant_is_shown_and_the_command_says_so_at_the_end(tmp_path, monkeypatch):
    def stub(job: BalanceJob) -> tuple[str, ...]:
        program = DIES if job.account.endswith("trainer-slowed-auto") else TELLS
        return (sys.executable, "-c", program, job.account)

    monkeypatch.setattr(balance_module, "command_of", stub)
    result = run_balance("--steps=1", f"--out={tmp_path}")
    assert result.exit_code == 1
    assert "trainer-slowed-auto failed." in result.output
    assert "no such layout" in result.output
    report = json.loads((tmp_path / "balance.json").read_text())["measured"]
    assert "trainer-slowed-auto" not in report["contestants"]


@pytest.mark.night
def test_real_contestants_are_measured(tmp_path, monkeypatch):
    jobs = balance_module._jobs

    def few(*args: object) -> dict[str, BalanceJob]:
        wanted = ("trainer-slowed-auto", "dataparallel-slowed-auto")
        return {name: job for name, job in jobs(*args).items() if name in wanted}

    monkeypatch.setattr(balance_module, "_jobs", few)
    result = run_balance("--model=tiny", "--steps=4", f"--out={tmp_path}")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "balance.json").read_text())["measured"]
    for told in report["contestants"].values():
        assert len(told["shares"]) == len(told["decisions"]) == 10 + 2 * 5
        assert all(sum(rows) == 16 for rows in told["shares"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--model=bert", "`--model` must be of mlp, cnn, gpt, but has 'bert'"),
        ("--slowdown=1", "`--slowdown` must be above 1, but is 1.0"),
        ("--slowdown=nan", "`--slowdown` must be above 1, but is nan"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(word, message, tmp_path):
    result = run_balance(word, f"--out={tmp_path / 'out'}")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(message)
    assert not (tmp_path / "out").exists()
