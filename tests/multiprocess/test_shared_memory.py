"""Regions, run directories and identities among real processes, some of which are killed."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from phalanx.errors import OutOfSpace
from phalanx.ipc import ProcessIdentity, Region, RunDirectory, die_with_parent
from tests.multiprocess.children import Children, Parent, wait_for_exit

pytestmark = [pytest.mark.alone, pytest.mark.promise("nothing-is-left-behind")]
NUM_WORKERS = 3
SHM = Path("/dev/shm")


def shared_files() -> set[str]:
    """What has a name in /dev/shm, but for run directories, which others make there meanwhile."""
    return {path.name for path in SHM.glob("phalanx*") if not path.is_dir()}


@pytest.fixture
def start() -> Iterator[Children]:
    before = shared_files()
    with Children() as children:
        yield children
    assert shared_files() == before


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let root mount a file system")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


# --- memory that is full --------------------------------------------------------------------------


def test_without_the_reservation_the_first_touch_kills(small):
    """The planted bug: a file that is only given its size."""
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        fd = os.open(small / "x", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 2 << 20)
        buffer = Region.attach(fd).buffer
        for place in range(0, 2 << 20, 4096):
            buffer[place] = 1
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGBUS


def test_a_full_run_directory_is_an_error_with_a_way_out(small):
    with RunDirectory.join("a", base=small) as run:
        with pytest.raises(OutOfSpace, match="name a folder on another disk") as caught:
            run.open_region("w", 2 << 20)
        assert caught.value.available_bytes == 1 << 20
        assert os.listdir(run.path) == []
        run.open_region("w", 1 << 19).tensor(torch.uint8, 1 << 19).fill_(1)
    assert os.listdir(small) == []


# --- run directories ------------------------------------------------------------------------------


def be_a_member(parent: Parent, name: str, base: Path) -> None:
    with RunDirectory.join(name, base=base) as run:
        region = run.open_region("counts", 64)
        parent.tell()
        region.buffer[parent.hear()] = 1
        parent.tell()
        parent.hear()


@pytest.mark.parametrize("base", ["shm", "disk"])
def test_members_that_are_killed_leave_nothing_once_the_last_is_gone(start, tmp_path, base):
    if base == "shm":  # a folder of our own there: a test beside this one sweeps, too
        tmp_path = Path(tempfile.mkdtemp(prefix="test-phalanx-", dir=SHM))
    kill_all_members(start, tmp_path)
    tmp_path.rmdir()


def kill_all_members(start: Children, base: Path) -> None:
    name = "run"
    members = [start.start(be_a_member, name, base) for _ in range(NUM_WORKERS)]
    for place, member in enumerate(members):
        member.get()
        member.put(place)
        member.get()
    path = base / f"phalanx-run-{os.geteuid()}-{name}"
    for member in members:
        assert RunDirectory.sweep(base=base) == []
        assert (path / "counts.region").exists()
        member.kill()
    assert path.exists()  # nobody was left to remove it
    assert RunDirectory.sweep(base=base) == [name]
    assert not path.exists()


def leave_to_a_forked_child(parent: Parent, name: str, base: Path, buggy: bool) -> None:
    if buggy:
        RunDirectory.forget = lambda self: None  # the planted bug: the child keeps the open file
    run = RunDirectory.join(name, base=base)
    pid = os.fork()
    if pid == 0:
        parent.hear()  # only the death of the other end ends this
        os._exit(0)
    parent.tell((pid, run.path.exists()))
    signal.pause()


@pytest.mark.parametrize("buggy", [False, True])
def test_a_forked_child_does_not_keep_a_dead_members_place(start, tmp_path, buggy):
    member = start.start(leave_to_a_forked_child, "run", tmp_path, buggy)
    forked, _ = member.get()
    member.kill()
    try:
        assert RunDirectory.sweep(base=tmp_path) == ([] if buggy else ["run"])
    finally:
        os.kill(forked, signal.SIGKILL)
        wait_for_exit(forked)


def come_and_go(parent: Parent, base: Path, rank: int, times: int) -> None:
    for number in range(times):
        with RunDirectory.join("run", base=base) as run:
            region = run.open_region("rows", 64 * NUM_WORKERS)
            region.buffer[64 * rank] = number % 251
            again = run.open_region("rows", 64 * NUM_WORKERS, create=False)
            assert again.buffer[64 * rank] == number % 251
            RunDirectory.sweep(base=base)
            assert os.path.samestat(os.stat(run.path / "rows.region"), os.fstat(region.fd))
    parent.tell("done")


def test_three_that_come_and_go_never_lose_what_a_living_one_has(start, tmp_path):
    workers = [start.start(come_and_go, tmp_path, rank, 150) for rank in range(NUM_WORKERS)]
    assert [worker.get() for worker in workers] == ["done"] * NUM_WORKERS
    assert os.listdir(tmp_path) == []


# --- identities -----------------------------------------------------------------------------------


def have_a_child(parent: Parent, obedient: bool) -> None:
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        if obedient:
            die_with_parent(me)
        parent.tell(tuple(ProcessIdentity.current()))
        signal.pause()
    signal.pause()


@pytest.mark.parametrize("obedient", [True, False])
def test_a_child_dies_with_its_parent_if_it_asked_to(start, obedient):
    member = start.start(have_a_child, obedient)
    grandchild = ProcessIdentity(*member.get())
    assert grandchild.alive()
    member.kill()
    if obedient:
        wait_for_exit(grandchild.pid)
    assert grandchild.alive() is not obedient
    if grandchild.alive():
        os.kill(grandchild.pid, signal.SIGKILL)
        wait_for_exit(grandchild.pid)
    assert not grandchild.alive()
