"""The parent is killed: no worker lives on, and nothing is left in /dev/shm."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from tests.chaos.course import DEADLINE_S
from tests.multiprocess.forked_scripts import Script

pytestmark = pytest.mark.promise("nothing-is-left-behind")

GONE_S = 60.0

SCRIPT = """
import itertools

from torch import nn

import phalanx
from tests.chaos.course import Net, adamw, batches


def main():
    def told(event):
        if isinstance(event, phalanx.StepDone) and event.step == 3:
            print(*trainer._engine.executor.worker_pids, flush=True)

    trainer = phalanx.Trainer(
        Net(), nn.functional.cross_entropy, adamw,
        executor="processes", replicas=3, microbatches=7, callbacks=[told],
    )
    trainer.fit(itertools.cycle(batches()), steps=10**9)


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    (tmp_path / "train.py").write_text(SCRIPT)
    process = Script("python", "train.py", folder=tmp_path, errors=tmp_path / "errors")
    yield process
    process.end()


def children(pid: int) -> set[int]:
    """Return the children of all threads of a process."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found.update(map(int, path.read_text().split()))
    return found


def shared_files(pids: set[int]) -> set[str]:
    """Return what the processes have mapped of /dev/shm; regions without a name are not there."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return set(re.findall(r"/dev/shm/[^\n]*?(?= \(deleted\)|\n)", maps))


def await_end(fd: int, deadline_s: float) -> bool:
    return bool(wait([fd], max(0.0, deadline_s - time.monotonic())))


def test_a_killed_parent_leaves_no_worker_and_no_shared_file(
    script: Script,
) -> None:
    """Of its workers one computes, one is stopped, and one is a replacement that starts."""
    assert wait([script.stdout], DEADLINE_S), "the script did not train"
    first, second, third = map(int, script.stdout.readline().split())
    files = shared_files({script.pid, first, second, third})
    born_before = children(script.pid)
    os.kill(first, signal.SIGKILL)  # if it was idle, the next step finds out
    watched = os.pidfd_open(script.pid)
    deadline_s = time.monotonic() + DEADLINE_S
    while not (born := children(script.pid) - born_before):
        assert not wait([watched], 0.01), "the script has ended"
        assert time.monotonic() < deadline_s, "no replacement was started"
    os.kill(second, signal.SIGSTOP)
    workers = (second, third, *born)
    fds = [os.pidfd_open(pid) for pid in workers]

    script.kill()
    deadline_s = time.monotonic() + GONE_S
    late = [pid for pid, fd in zip(workers, fds, strict=True) if not await_end(fd, deadline_s)]
    for fd in (watched, *fds):
        os.close(fd)
    assert not late, f"live {GONE_S:g} s after their parent: {late}"
    assert [path for path in files if os.path.exists(path)] == []
