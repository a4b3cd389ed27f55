"""`make bench-recovery`: nothing here depends on how fast anything is."""

from __future__ import annotations

import json
import os
import random
import sys

import pytest
from typer.testing import CliRunner

from benchmarks import recovery as recovery_module
from benchmarks.__main__ import app as bench_app
from benchmarks.machine import describe_machine
from benchmarks.recovering import Beat, RecoveryJob, command
from benchmarks.recovery import Disturbed, Kill, percentile, report_recovery
from phalanx.errors import ConfigError, PeerLost

MACHINE = describe_machine()


def kill(*, running=0.03, noticed=0.03, whole=2.0):
    return Kill(running_s=running, noticed_s=noticed, whole_s=whole)


def disturbed(name="processes", *kills, ordinary=(0.01, 0.02, 0.03), end=""):
    kills = kills or (kill(),)
    asked = len(kills) + 2 * bool(end)
    return Disturbed(name=name, ordinary_s=ordinary, kills=kills, num_asked=asked, end=end)


# --- percentiles and targets ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "percent", "value"),
    [(1, 50, 1), (1, 99, 1), (4, 50, 2), (5, 50, 3), (20, 99, 20), (100, 99, 99), (200, 99, 198)],
)
def test_a_percentile_is_one_of_the_values(count, percent, value):
    values = [float(number) for number in range(1, count + 1)]
    random.Random(0).shuffle(values)
    assert percentile(values, percent) == value


def cells_of(*results):
    report = report_recovery(results, {}, MACHINE, "", model="mlp", workers=2, seed=0)
    return {row.label: row.cells for row in report.sheets[0].rows}


def test_a_target_is_an_ordinary_step_and_so_much_more():
    met = cells_of(
        disturbed("processes", kill(running=0.119), kill(running=0.121), kill(running=0.1))
    )
    missed = cells_of(disturbed("processes", kill(running=0.121), kill(running=0.521)))
    (judged,) = met["step that was running, p50"]
    assert (judged.value, judged.limit, judged.met) == (
        pytest.approx(119),
        pytest.approx(120),
        True,
    )
    assert not missed["step that was running, p50"][0].met
    assert not missed["step that was running, p99"][0].met


def test_the_peer_stands_beside_without_a_target():
    cells = cells_of(
        disturbed("processes", kill(noticed=0.04)),
        disturbed("torchrun", kill(running=7.5), end="It ended."),
    )
    assert cells["step that was running, p50"][1] == 7500
    assert cells["step that noticed it, p99"] == (40, 30)
    assert cells["went on after a kill"] == ("1 of 1", "1 of 3")


# --- what follows a kill --------------------------------------------------------------------------


class Told:
    """A training that tells of these steps; a kill is at second 10."""

    name = "told"

    def __init__(self, *beats):
        self._beats = list(beats)

    def next(self):
        return self._beats.pop(0)

    def is_behind(self):
        return False


def beat(stop_s, *, working=2, pids=(71, 72), lost=(), life=0):
    return Beat(stop_s=stop_s, seconds=0.5, life=life, working=working, pids=pids, lost=tuple(lost))


BEFORE = beat(9.0)


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        (  # the running step notices it; the one before it ended before the kill
            [
                beat(9.5),
                beat(10.5, working=1, lost=[72], pids=(71, 73)),
                beat(11.0, working=1, pids=(71, 73)),
                beat(14.0, pids=(71, 73)),
            ],
            kill(running=0.5, noticed=0.5, whole=4.0),
        ),
        (  # the victim had done its part of the running step
            [
                beat(10.25),
                beat(11.0, working=1, lost=[72], pids=(71, 73)),
                beat(14.0, pids=(71, 73)),
            ],
            kill(running=0.25, noticed=1.0, whole=4.0),
        ),
        (  # all is started anew; the survivor may have told of the step that was running, or not
            [beat(10.25), beat(17.0, pids=(81, 82), life=1)],
            kill(running=7.0, noticed=7.0, whole=7.0),
        ),
        (
            [beat(17.0, pids=(81, 82), life=1)],
            kill(running=7.0, noticed=7.0, whole=7.0),
        ),
    ],
)
def test_what_follows_a_kill_is_told_by_the_steps_that_end_after_it(beats, expected):
    assert recovery_module._watch(Told(*beats), BEFORE, 72, 10.0) == expected


def test_nobody_is_killed_before_all_workers_have_been_at_work_for_a_while():
    settled = recovery_module._SETTLED_STEPS
    early = [beat(float(number)) for number in range(settled - 1)]
    late = [beat(100.0 + number) for number in range(settled)]
    training = Told(*early, beat(50.0, working=1), *late, beat(200.0))
    assert recovery_module._settle(training) == late[-1]


class Mortal(Told):
    """A training that does not survive its second kill."""

    name = "torchrun"

    def next(self):
        if not self._beats:
            raise PeerLost("It ended.", 0)
        return super().next()


def test_the_kills_before_the_one_that_ended_all_count(monkeypatch):
    monkeypatch.setattr(recovery_module, "_WARMUP_STEPS", 1)
    monkeypatch.setattr(recovery_module, "_ORDINARY_STEPS", 1)
    monkeypatch.setattr(recovery_module, "_SETTLED_STEPS", 1)
    monkeypatch.setattr(recovery_module.os, "kill", lambda pid, number: None)
    far = 1e12  # seconds, later than any kill
    after = [beat(far, pids=(81, 82), life=1), beat(far + 1, pids=(81, 82), life=1)]
    told = recovery_module.disturb(Mortal(*[beat(1.0)] * 3, *after), 5, random.Random(0))
    assert (len(told.kills), told.num_asked, told.end) == (1, 5, "It ended.")
    with pytest.raises(PeerLost):
        recovery_module.disturb(Mortal(*[beat(1.0)] * 3), 5, random.Random(0))


# --- the processes --------------------------------------------------------------------------------

LINE = '{"stop_s": %s, "seconds": 0.5, "life": 0, "working": 2, "pids": [1, 2], "lost": []}'
DIES = f"print('{LINE % 1.0}', flush=True)\nraise SystemExit('no such layout')\n"


def test_a_training_that_ends_by_itself_is_reported_with_its_last_words():
    with recovery_module.Training("dying", (sys.executable, "-c", DIES)) as training:
        assert training.next() == Beat(stop_s=1.0, seconds=0.5, life=0, working=2, pids=(1, 2))
        with pytest.raises(
            PeerLost, match=r"\(exit code 1\)\.\nProcess 0 said last:\nno such layout"
        ):
            training.next()


def test_a_training_goes_with_the_one_who_reads_it():
    endless = f"import itertools\nfor n in itertools.count(): print('{LINE}' % n, flush=True)\n"
    with recovery_module.Training("endless", (sys.executable, "-c", endless)) as training:
        training.next()
        pid = training.process.pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_torchrun_restarts_its_ranks_and_phalanx_needs_no_such_thing():
    words_by_name = {
        name: command(RecoveryJob(contestant=name, model="mlp", workers=3), max_restarts=4)
        for name in ("torchrun", "launch", "ranks", "processes")
    }
    assert {"--nproc-per-node=3", "--max-restarts=4"} <= set(words_by_name["torchrun"])
    assert {"-n3", "--max-restarts=4"} <= set(words_by_name["launch"])
    assert {"-n3", "--rank-restarts=4"} <= set(words_by_name["ranks"])
    assert not any("restart" in word for word in words_by_name["processes"])


def test_a_launchers_prefix_is_passed_over_and_other_lines_are_no_steps():
    line = LINE % 3
    assert Beat.from_line(f"[rank 0] {line}".encode()) == Beat.from_line(line.encode())
    assert Beat.from_line(b"[rank 1] a warning") is None


def run_recovery(*words):
    return CliRunner().invoke(bench_app, ["recovery", *words])


@pytest.mark.night
def test_real_workers_are_killed_and_the_files_written(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery_module, "_SETTLED_STEPS", 2)
    monkeypatch.setattr(recovery_module, "_ORDINARY_STEPS", 5)
    out = tmp_path / "a" / "b"
    result = run_recovery(
        "--model=tiny", "--kills=2", "--rank-kills=0", "--restarts=0", f"--out={out}"
    )
    assert result.exit_code == 0, result.output
    report = json.loads((out / "recovery.json").read_text())
    (ours,) = report["measured"]["contestants"]
    kills = ours["kills"]
    assert len(kills) == 2
    assert all(0 <= each["running_s"] <= each["noticed_s"] <= each["whole_s"] for each in kills)
    assert (out / "recovery.png").exists()


def test_a_failed_contestant_is_shown_and_the_command_says_so_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery_module, "command", lambda *_, **__: (sys.executable, "-c", DIES))
    monkeypatch.setattr(recovery_module, "is_available", lambda name: True)
    result = run_recovery(
        "--model=tiny", "--kills=1", "--rank-kills=1", "--restarts=1", f"--out={tmp_path}"
    )
    assert result.exit_code == 1
    assert "processes failed." in result.output
    assert "torchrun failed." in result.output
    assert "no such layout" in result.output
    assert set(json.loads((tmp_path / "recovery.json").read_text())["failures"]) == {
        "processes",
        "torchrun",
        "launch",
        "ranks",
        "ray",
    }


def test_a_peer_that_does_not_go_on_is_a_result(tmp_path, monkeypatch):
    def disturb(training, *_):
        if training.name == "torchrun":
            raise PeerLost("It did not go on after the first kill.")
        return disturbed(training.name, kill())

    monkeypatch.setattr(recovery_module, "command", lambda *_, **__: (sys.executable, "-c", ""))
    monkeypatch.setattr(recovery_module, "is_available", lambda name: False)
    monkeypatch.setattr(recovery_module, "disturb", disturb)
    result = run_recovery(f"--out={tmp_path}")
    assert result.exit_code == 0, result.output
    assert "torchrun failed." in result.output


def test_an_unknown_model_is_refused_before_anything_runs(tmp_path):
    result = run_recovery("--model=bert", f"--out={tmp_path / 'out'}")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("`--model` must be of mlp, cnn, gpt, but has 'bert'")
    assert not (tmp_path / "out").exists()
