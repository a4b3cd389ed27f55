"""What an actor of Ray's does for its worker, without Ray."""

from __future__ import annotations

import operator
import os
import pickle
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.cluster import ray_worker
from phalanx.cluster.ray_launcher import _Attempt
from phalanx.cluster.ray_worker import Ended, Lines, RayWorker
from phalanx.distributed import RankFailed
from phalanx.ipc import wait_until

SECRET = bytes(range(32))


@pytest.fixture
def worker() -> Iterator[RayWorker]:
    worker = RayWorker()
    yield worker
    worker.end(0.0)


# Calls a function as a worker does, without torch: for what the actor alone does.
PLAIN = "import pickle, sys; function, args = pickle.load(sys.stdin.buffer); function(*args)"


@pytest.fixture
def plain_worker(worker: RayWorker, monkeypatch: pytest.MonkeyPatch) -> RayWorker:
    monkeypatch.setattr(ray_worker, "_PROGRAM", PLAIN)
    return worker


def start(worker: RayWorker, function: Callable, *args: object) -> None:
    call = pickle.dumps((function, args))
    assert worker.start(call, os.getcwd(), {"RANK": "3"}, SECRET) > 0


def follow(worker: RayWorker) -> tuple[list[Lines], Ended]:
    """Read until the end."""
    found: list[Lines] = []
    while not isinstance(told := worker.read(), Ended):
        found += told
    return found, told


def speak() -> list[object]:
    """Write whole lines and one without an end; return what is known of the secret."""
    os.write(1, "one\ntwö\nthree".encode())
    os.write(2, b"four\n")
    path = os.environ["PHALANX_SECRET_FILE"]
    return [os.environ["RANK"], Path(path).read_bytes(), stat.S_IMODE(os.stat(path).st_mode)]


def test_a_worker_is_heard_and_its_value_comes_last(worker):
    start(worker, speak)
    heard, ended = follow(worker)
    lines = {stream: [] for stream in (1, 2)}
    for stream, some in heard:
        lines[stream] += some
    assert lines == {1: ["one", "twö", "three"], 2: ["four"]}
    assert ended.exit_code == 0
    note, value = pickle.loads(ended.outcome)
    assert note is None
    assert pickle.loads(value) == ["3", SECRET, 0o600]


def test_an_error_comes_as_it_was_raised_with_the_way_to_it(worker):
    start(worker, operator.truediv, 1, 0)
    heard, ended = follow(worker)
    assert ended.exit_code == 1
    note, error = pickle.loads(ended.outcome)
    assert isinstance(pickle.loads(error), ZeroDivisionError)
    assert "ZeroDivisionError: division by zero" in note["message"]["extraInfo"]["py_callstack"]
    assert heard[-1].lines[-1] == "ZeroDivisionError: division by zero"


def test_an_exit_code_is_the_processs_own(plain_worker):
    start(plain_worker, sys.exit, 7)
    assert follow(plain_worker)[1].exit_code == 7


WAIT = "import os, signal; os.write(1, b'%d\\n' % os.getpid()); signal.pause()"


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.night)]
)
def test_a_signal_that_ends_a_worker_is_told(plain_worker, number):
    start(plain_worker, exec, WAIT)
    ((_, (pid,)),) = plain_worker.read()
    if number == signal.SIGTERM:
        plain_worker.end(30.0)
    else:
        os.kill(int(pid), number)
    assert follow(plain_worker) == ([], Ended(int(pid), -number, b""))


WAIT_IN_A_CHILD = """
import os, signal
child = os.fork()
if child == 0:
    signal.pause()
os.write(1, b"%d\\n" % child)
"""


def test_the_end_does_not_wait_for_others_that_hold_the_pipes(plain_worker):
    start(plain_worker, exec, WAIT_IN_A_CHILD)
    heard, ended = follow(plain_worker)
    assert ended.exit_code == 0
    child = int(heard[0].lines[0])
    os.kill(child, signal.SIGKILL)
    assert wait_until(lambda: not Path(f"/proc/{child}/exe").exists(), 30.0)


def test_a_run_whose_workers_never_began_has_failed():
    attempt = _Attempt.__new__(_Attempt)
    attempt._ended = {}  # all were to start again when the last of them was given up
    with pytest.raises(RankFailed, match="Ray found no place for any"):
        attempt.values()
