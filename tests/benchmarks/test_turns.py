"""Contestants take turns, one at work at a time, and none outlives the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from benchmarks import processes
from benchmarks.turns import Pace, Runner, compete
from phalanx.clock import now_s
from phalanx.errors import PeerLost
from phalanx.ipc import ProcessIdentity

# --- stand-ins for contestants: the protocol in a few lines, without torch ------------------------

# Asked for n steps, its times are 0, 1, …, n-1 seconds.
STEADY = """
import json, sys
print([], flush=True)
for line in sys.stdin:
    print(json.dumps(list(range(int(line)))), flush=True)
"""
DEAF = "import sys\nprint([], flush=True)\nsys.stdin.read()\n"
DIES_AT_SETUP = "import sys\nprint('no such layout', file=sys.stderr)\nsys.exit(3)\n"
DIES_AT_WORK = (
    "import os, sys\nprint([], flush=True)\nsys.stdin.readline()\n"
    "print('out of cheese', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 9)\n"
)
STAYS = "import signal\nprint([], flush=True)\nwhile True: signal.pause()\n"

PACE = Pace(rounds=3, kept=2, dropped=1, warmup=1)


def stub(*programs):
    return [(sys.executable, "-c", text) for text in programs]


def run(show=lambda *_: None, pace=PACE, **commands):
    return compete(commands, pace, show)


def is_alive(pid):
    """Say whether a process runs; one that has ended and waits for its parent does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")


# --- turns ----------------------------------------------------------------------------------------


def test_each_turn_keeps_its_last_steps():
    outcome = run(a=stub(STEADY), b=stub(STEADY, STEADY))
    assert outcome.failures == {}
    assert outcome.seconds == {"a": [[1.0, 2.0]] * 3, "b": [[1.0, 2.0]] * 3}


@pytest.mark.parametrize(("num_steps", "rounds"), [(1, 1), (3, 1), (4, 2), (30, 10), (31, 11)])
def test_a_pace_keeps_at_least_the_steps_asked_for(num_steps, rounds):
    pace = Pace.for_steps(num_steps)
    assert pace.rounds == rounds
    assert pace.rounds * pace.kept >= num_steps


@pytest.mark.parametrize(
    ("warm", "dropped"),
    [([], 2), ([0.0], 2), ([9.0, 0.01, 0.011], 14), ([0.2], 2), ([1e-6], 100)],
)
def test_steps_are_dropped_until_the_cores_have_settled(warm, dropped):
    assert Pace(rounds=1, settle_s=0.15).num_dropped(warm) == dropped


def test_every_round_has_everybody_once_and_rounds_differ_in_order():
    shown = []
    run(lambda *turn: shown.append(turn), **{name: stub(STEADY) for name in "abcde"})
    stages = [shown[i : i + 5] for i in range(0, len(shown), 5)]
    assert [stage[0][1] for stage in stages] == [
        "setting up",
        "warming up",
        "round 1 of 3",
        "round 2 of 3",
        "round 3 of 3",
    ]
    orders = {tuple(name for name, _ in stage) for stage in stages}
    assert {tuple(sorted(order)) for order in orders} == {tuple("abcde")}
    assert len(orders) > 1


def test_only_one_contestant_is_at_work_at_a_time(tmp_path):
    log = tmp_path / "log"
    working = f"""
import json, os, sys
log = os.open({str(log)!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
print([], flush=True)
for line in sys.stdin:
    os.write(log, b"NAME begins\\n")
    times = [float(sum(range(20000))) for _ in range(int(line))]
    os.write(log, b"NAME ends\\n")
    print(json.dumps(times), flush=True)
"""
    programs = {name: working.replace("NAME", name) for name in "abc"}
    run(**{name: stub(text, text) for name, text in programs.items()})
    lines = log.read_text().splitlines()
    taken = [lines[i : i + 4] for i in range(0, len(lines), 4)]  # two processes, two lines each
    assert len(taken) == 3 * (PACE.rounds + 1)
    assert all(len({line.split()[0] for line in turn}) == 1 for turn in taken)


@pytest.mark.parametrize(
    ("program", "end", "words"),
    [(DIES_AT_SETUP, "exit code 3", "no such layout"), (DIES_AT_WORK, "signal 9", "out of cheese")],
)
def test_a_dead_contestant_is_out_with_its_last_words_and_the_others_go_on(program, end, words):
    outcome = run(a=stub(STEADY), dying=stub(program), z=stub(STEADY))
    assert outcome.seconds == {"a": [[1.0, 2.0]] * 3, "z": [[1.0, 2.0]] * 3}
    assert set(outcome.failures) == {"dying"}
    assert end in outcome.failures["dying"]
    assert words in outcome.failures["dying"]


def test_the_process_that_died_is_named_and_not_the_one_that_waits_for_it():
    with Runner({"pair": stub(DEAF, DIES_AT_WORK)}) as runner:
        runner.start("pair")
        assert runner.run("pair", 1) == runner.run("pair", 1) == []
        assert runner.pids == []
    error = runner.failures["pair"]
    assert isinstance(error, PeerLost)
    assert error.rank == 1
    assert "process 1 of 2 ended (killed by signal 9)" in str(error)


def test_a_silent_contestant_is_out_when_patience_ends():
    outcome = run(pace=Pace(rounds=1, patience_s=2.0), deaf=stub(STEADY, DEAF))
    assert outcome.seconds == {}
    assert "process 1 of 2 did not answer within 2 s" in outcome.failures["deaf"]


@needs_proc
def test_no_child_is_left_when_all_is_done():
    with Runner({"a": stub(STEADY), "b": stub(STEADY, STEADY)}) as runner:
        pids = runner.pids
        assert len(pids) == 3
        assert all(is_alive(pid) for pid in pids)
    assert not any(is_alive(pid) for pid in pids)
    runner.close()  # again


@needs_proc
def test_no_child_is_left_after_an_interrupt():
    pids = []
    commands = {"a": stub(STEADY), "b": stub(STEADY)}
    with contextlib.suppress(KeyboardInterrupt), Runner(commands) as runner:
        pids += runner.pids
        raise KeyboardInterrupt
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)


@needs_proc
def test_a_child_that_does_not_heed_the_end_of_its_input_is_killed(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.1)
    with Runner({"stays": stub(STAYS)}) as runner:
        runner.start("stays")
        pids = runner.pids
    assert not any(is_alive(pid) for pid in pids)


@needs_proc
def test_who_is_not_at_work_is_stopped():
    """A contestant whose threads go on by themselves takes nothing from the others."""
    with Runner({"pair": stub(STEADY, STEADY), "other": stub(STEADY)}) as runner:
        for name in ("pair", "other"):
            runner.start(name)
        for name in ("other", "pair", "other"):
            assert runner.run(name, 2) == [0.0, 1.0]
            until_s = now_s() + 30
            while not all(ProcessIdentity.of(pid).stopped() for pid in runner.pids):
                assert now_s() < until_s


@needs_proc
def test_children_end_with_a_controller_that_is_killed():
    serves = """
from contextlib import nullcontext
from benchmarks.turns import serve_turns
serve_turns(nullcontext(lambda number: [1.0] * number))
"""
    controller = f"""
from benchmarks.turns import Runner
import sys
with Runner({{"a": [(sys.executable, "-c", {serves!r})] * 2}}) as runner:
    runner.start("a")
    print(*runner.pids, flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", controller],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        watched = [os.pidfd_open(pid) for pid in pids]
        process.send_signal(signal.SIGKILL)
        process.wait()
    ended = [processes.selectors.DefaultSelector() for _ in pids]
    for selector, file in zip(ended, watched, strict=True):
        selector.register(file, processes.selectors.EVENT_READ)
        assert selector.select(timeout=30), "a child outlived its controller"
        selector.close()
        os.close(file)


def test_children_do_not_inherit_the_callers_number_of_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    asks = "import os\nprint('OMP_NUM_THREADS' in os.environ, flush=True)\n"
    with processes.Child(*stub(asks)) as child:
        assert processes.hear("asks", [child], 60.0) == [b"False"]


def test_what_a_contestant_prints_is_not_taken_for_an_answer():
    chatty = """
import contextlib, os
from benchmarks.turns import serve
@contextlib.contextmanager
def open_step():
    print("hello")
    yield lambda: os.write(1, b"step\\n")
serve(open_step())
"""
    outcome = run(chatty=stub(chatty))
    assert outcome.failures == {}
    assert [len(turn) for turn in outcome.seconds["chatty"]] == [2, 2, 2]
    assert all(second >= 0 for turn in outcome.seconds["chatty"] for second in turn)
