"""Worker processes in bad places: deaths without end, forks, few descriptors, Ctrl-C in a hang."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import PeerLost, StateError
from tests.zoo import adamw, assert_same_bits, state_of

PATIENCE_S = 60.0

Batch = tuple[Tensor, Tensor]


def batch(seed: int = 0, rows: int = 7) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, n, generator=draw, dtype=torch.float32) for n in (5, 3))
    return x, y


def make(module: nn.Module | None = None, executor: Any = "processes", **options: Any) -> Any:
    torch.manual_seed(0)
    return phalanx.Trainer(
        nn.Linear(5, 3) if module is None else module,
        nn.functional.mse_loss,
        adamw,
        **{"replicas": 1, "executor": executor, "microbatches": 3, **options},
    )


# -- many deaths --------------------------------------------------------


def test_deaths_leave_neither_memory_nor_descriptors_behind() -> None:
    """A replacement takes over where rows for the dead one were written."""
    x, y = torch.randn(7, 4000), torch.randn(7, 3)  # rows that travel through shared memory
    with make(nn.Linear(4000, 3), phalanx.Processes(max_failures=None), replicas=2) as trainer:
        for _ in range(2):
            trainer.step((x, y))
        held = []
        for _ in range(2):
            for pid in trainer.worker_pids:
                os.kill(pid, signal.SIGRTMIN + 3)  # a signal without a name
            for _ in range(3):
                trainer.step((x, y))
            held.append((shared_memory(), descriptors()))
        assert held[1] == held[0]


def shared_memory() -> int:
    """Return how many pieces of memory this process shares with others."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[1].endswith("s") for line in maps)


def descriptors() -> int:
    gc.collect()  # dead workers' pipes go with them
    return len(os.listdir("/proc/self/fd"))


class Deadly(nn.Linear):
    """Kills the process that runs it."""

    def forward(self, rows: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(rows)


def test_too_many_losses_end_the_run() -> None:
    executor = phalanx.Processes(max_failures=2)
    with make(Deadly(5, 3), executor) as trainer, pytest.raises(PeerLost, match="max_failures"):
        trainer.step(batch())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_cannot_use_the_workers() -> None:
    with make() as trainer:
        trainer.step(batch())
        child = os.fork()
        if child == 0:
            code = 1
            try:
                trainer.step(batch())
            except StateError:
                code = 0
            trainer.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        trainer.step(batch())
        assert trainer.steps == 2


# -- a system that gives no more -------------------------------------


@contextlib.contextmanager
def open_files_left(count: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    with contextlib.ExitStack() as gaps:
        while (last := os.open(os.devnull, os.O_RDONLY)) <= highest:
            gaps.callback(os.close, last)
        os.close(last)
        resource.setrlimit(resource.RLIMIT_NOFILE, (last + count, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_too_few_open_files_are_told_and_may_become_more() -> None:
    told = pytest.raises(OSError, match="Too many open files")
    with make(replicas=2) as trainer:
        with open_files_left(5), told:
            trainer.step(batch())
        trainer.step(batch())
        assert trainer.steps == 1


# -- Ctrl-C in a hang ---------------------------------------------------


class Hangs(nn.Module):
    """Hangs in worker processes where a row says so, and leaves a file for each time."""

    MARK = 1e3

    def __init__(self, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)
        self.folder = str(folder)
        self.home = os.getpid()

    def forward(self, rows: Tensor) -> Tensor:
        if os.getpid() != self.home and bool((rows == self.MARK).any()):
            Path(self.folder, str(os.getpid())).touch()
            threading.Event().wait()
        scores: Tensor = self.layer(rows)
        return scores


@contextlib.contextmanager
def interrupted_when(folder: Path, files: int, times: int) -> Iterator[None]:
    """Send Ctrl-C ``times`` times, once there are so many ``files``."""

    def watch() -> None:
        while len(list(folder.iterdir())) < files and not over.wait(0.01):
            pass
        for _ in range(times):
            heard.clear()
            os.kill(os.getpid(), signal.SIGINT)
            heard.wait(PATIENCE_S)

    def hear(*_: object) -> None:
        heard.set()
        raise KeyboardInterrupt

    over, heard = threading.Event(), threading.Event()
    before = signal.signal(signal.SIGINT, hear)
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_step_whose_workers_hang_with_their_microbatches(tmp_path: Path) -> None:
    """Nobody else is given them, to hang as long, and nobody the third one."""
    bad = torch.full((7, 5), Hangs.MARK), torch.zeros(7, 3)
    executor = phalanx.Processes(timeout_s=3.0)
    with make(Hangs(tmp_path), executor, replicas=2) as trainer, make(executor="threads") as judge:
        trainer.step(batch())
        before = state_of(trainer.module)
        with interrupted_when(tmp_path, files=2, times=1), pytest.raises(KeyboardInterrupt):
            trainer.step(bad)
        assert len(list(tmp_path.iterdir())) == 2
        assert_same_bits(state_of(trainer.module), before)
        trainer.step(batch(1))
        judge.step(batch())
        judge.step(batch(1))
        assert_same_bits(state_of(trainer.module.layer), state_of(judge.module))


def test_closing_after_a_second_ctrl_c_does_not_wait_for_workers_that_hang(tmp_path: Path) -> None:
    bad = torch.full((7, 5), Hangs.MARK), torch.zeros(7, 3)
    others = set(threading.enumerate())
    trainer = make(Hangs(tmp_path), phalanx.Processes(timeout_s=10 * PATIENCE_S), replicas=2)
    trainer.step(batch())
    pids = trainer.worker_pids
    with interrupted_when(tmp_path, files=2, times=2), pytest.raises(KeyboardInterrupt):
        trainer.step(bad)
    start_s = time.monotonic()
    trainer.close()
    assert time.monotonic() - start_s < PATIENCE_S
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    for thread in set(threading.enumerate()) - others:  # they hear of their workers' end
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
