"""Regions and run directories, in one process and among processes, some of which are killed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import resource
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from phalanx.errors import ConfigError, OutOfSpace, PeerLost, StateError
from phalanx.ipc import ProcessIdentity, Region, RunDirectory, die_with_parent, run_directory
from tests.multiprocess.children import Children, Parent, wait_for_exit

pytestmark = [pytest.mark.alone, pytest.mark.promise("nothing-is-left-behind")]
NUM_WORKERS = 3
SHM = Path("/dev/shm")
PREFIX = f"phalanx-run-{os.geteuid()}-"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


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


# --- regions --------------------------------------------------------------------------------------


def open_files() -> set[str]:
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def test_a_region_holds_zeros_and_every_view_shows_the_same_bytes():
    region = Region.create(1000, label="weights")
    assert region.nbytes == len(region.buffer) == 1000
    assert not any(region.buffer)
    first = region.tensor(torch.float32, 5, 64)
    first.copy_(torch.arange(5.0))
    again = region.tensor(torch.int32, 5, 64)
    assert again.tolist() == torch.arange(5.0).view(torch.int32).tolist()
    assert region.buffer[64 + 6] == 0x80  # 1.0 is 00 00 80 3f
    assert repr(region) == "Region('weights', 1000 bytes)"
    region.close()
    assert repr(region) == "Region('weights', 1000 bytes, closed)"


def test_tensors_and_buffers_outlive_close():
    region = Region.create(4096)
    tensor, buffer = region.tensor(torch.int64, 512), region.buffer
    region.close()
    region.close()
    del region
    gc.collect()
    tensor.fill_(7)
    assert buffer[0] == 7
    assert tensor.sum().item() == 7 * 512


def test_no_descriptor_is_left_behind(tmp_path):
    before = open_files()
    region = Region.create(4096)
    Region.attach(os.dup(region.fd)).close()
    tensor = region.tensor(torch.int8, 1)
    del region  # without close
    assert tensor.item() == 0
    del tensor
    with RunDirectory.join("a", base=tmp_path) as run:
        run.open_region("w", 64).close()
        with pytest.raises(ConfigError):
            run.open_region("w", 65)
    (tmp_path / (PREFIX + "b")).mkdir(mode=0o755)
    with pytest.raises(ConfigError):
        RunDirectory.join("b", base=tmp_path)
    assert open_files() == before


@pytest.mark.parametrize("nbytes", [0, 10, 1 << 20])
def test_nobody_can_pull_the_memory_away(nbytes):
    region = Region.create(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, nbytes)


# --- lack of room ---------------------------------------------------------------------------------


def test_more_memory_than_there_is_is_refused_before_it_is_taken():
    with pytest.raises(OutOfSpace, match=r"'huge' needs .* in memory, but") as e:
        Region.create(1 << 50, label="huge")
    assert e.value.needed_bytes == 1 << 50
    assert 0 < e.value.available_bytes < 1 << 50
    assert isinstance(e.value, OSError)


# --- on the way to another process ----------------------------------------------------------------


@pytest.fixture
def ends():
    ours, theirs = multiprocessing.Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_region_travels_over_a_pipe_between_other_messages(ends):
    ours, theirs = ends
    before = open_files()
    region = Region.create(100, label="a")
    other = Region.create(200)
    ours.send("first")
    region.send(ours)
    other.send(ours)
    ours.send("last")
    assert theirs.recv() == "first"
    twins = [Region.receive(theirs, label="b"), Region.receive(theirs)]
    assert theirs.recv() == "last"
    assert [twin.nbytes for twin in twins] == [100, 200]
    assert not os.get_inheritable(twins[0].fd)
    twins[0].buffer[0] = 5
    assert region.buffer[0] == 5
    assert repr(twins[0]) == "Region('b', 100 bytes)"
    del region, other, twins
    assert open_files() == before


# --- what another process says that it holds ------------------------------------------------------


def test_a_region_of_another_process_is_borrowed():
    with Region.create(4096) as region:
        region.buffer[7] = 3
        with Region.borrow(os.getpid(), region.fd) as twin:
            assert twin.buffer[7] == 3


@pytest.mark.parametrize("kind", ["closed", "file", "pipe"])
def test_what_is_no_region_is_not_borrowed(kind):
    before = open_files()
    ends = os.pipe() if kind == "pipe" else [os.open(__file__, os.O_RDONLY)]
    if kind == "closed":
        os.close(ends[0])
    with pytest.raises(PeerLost, match="Region 'x' of process"):
        Region.borrow(os.getpid(), ends[0], label="x")
    for fd in ends if kind != "closed" else ():
        os.close(fd)
    assert open_files() == before


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


# --- run directories -----------------------------------------------------------------------------


def planted(base: Path, name: str) -> Path:
    """A directory as a crash leaves it: nobody holds its lock."""
    path = base / (PREFIX + name)
    path.mkdir(mode=0o700)
    (path / "old.region").write_bytes(b"x" * 100)
    (path / "folder").mkdir()
    (path / "folder" / "file").touch()
    return path


def test_the_last_one_out_removes_the_directory(tmp_path):
    first = RunDirectory.join("a", base=tmp_path)
    second = RunDirectory.join("a", base=tmp_path)
    assert first.path == second.path == tmp_path / (PREFIX + "a")
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    first.open_region("w", 64).close()
    first.close()
    first.close()
    assert sorted(path.name for path in second.path.iterdir()) == ["w.region"]
    second.close()
    assert list(tmp_path.iterdir()) == []
    assert repr(first) == f"RunDirectory('{tmp_path}/{PREFIX}a', closed)"


def test_a_region_is_the_same_bytes_for_all_who_ask(tmp_path):
    with RunDirectory.join("a", base=tmp_path) as one, RunDirectory.join("a", base=tmp_path) as two:
        ours = one.open_region("weights", 1000)
        theirs = two.open_region("weights", 1000)
        other = two.open_region("Weights", 1000)
        assert ours.nbytes == theirs.nbytes == len(ours.buffer) == 1000
        ours.tensor(torch.float32, 250).fill_(1.0)
        assert theirs.tensor(torch.float32, 250).sum().item() == 250.0
        assert not any(other.buffer)
        assert not os.get_inheritable(theirs.fd)
        found = os.stat(one.path / "weights.region")
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_blocks * 512 >= 1000  # reserved
    ours.buffer[0] = 9  # a region outlives its name
    assert theirs.buffer[0] == 9


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".a", "-a", "_a", "a/b", "../a", "a b", "a\n", "a\0", "ä", "a" * 129, "٣"],
)
def test_a_name_that_could_lead_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="`name` must be 1 to 128 letters, digits"):
        RunDirectory.join(name, base=tmp_path)
    with RunDirectory.join("a", base=tmp_path) as run:
        with pytest.raises(ConfigError, match=re.escape(f"but is {name!r}")):
            run.open_region(name, 64)
        assert os.listdir(run.path) == []


# --- what a crash leaves --------------------------------------------------------------------------


def test_sweep_removes_what_nobody_lives_in(tmp_path):
    planted(tmp_path, "crashed")
    kept = {"phalanx-run-99999-other", "phalanx-theirs", PREFIX + "file", PREFIX + "open"}
    for name in ("phalanx-run-99999-other", "phalanx-theirs"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / (PREFIX + "file")).touch()
    (tmp_path / (PREFIX + "open")).mkdir(mode=0o755)
    with RunDirectory.join("alive", base=tmp_path) as run:
        planted(tmp_path, "later")
        assert RunDirectory.sweep(base=tmp_path) == ["later"]
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {*kept, run.path.name}
    assert RunDirectory.sweep(base=tmp_path / "absent") == []


def interrupt(monkeypatch, function: str, action, *, before: bool) -> list[str]:
    """Run ``action`` once, before or after the first call of a function of the module."""
    original = getattr(run_directory, function)
    done: list[str] = []

    def wrapped(*args, **kwargs):
        if before and not done:
            done.append(function)
            action()
        result = original(*args, **kwargs)
        if not before and not done:
            done.append(function)
            action()
        return result

    monkeypatch.setattr(run_directory, function, wrapped)
    return done


MOMENTS = [
    ("_open_directory", True),
    ("_open_directory", False),
    ("_try_lock", True),
]


@pytest.mark.parametrize(("function", "before"), MOMENTS)
def test_a_sweep_at_any_moment_of_joining_leaves_a_whole_membership(
    tmp_path, monkeypatch, function, before
):
    sweep = RunDirectory.sweep
    monkeypatch.setattr(RunDirectory, "sweep", lambda **_: [])  # the one in `join` is not meant
    done = interrupt(monkeypatch, function, lambda: sweep(base=tmp_path), before=before)
    with RunDirectory.join("a", base=tmp_path) as run:
        assert done
        assert sweep(base=tmp_path) == []
        with RunDirectory.join("a", base=tmp_path) as other:
            run.open_region("w", 64).buffer[0] = 1
            assert other.open_region("w", 64, create=False).buffer[0] == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("function", "before"), [("_open_directory", False), ("_try_lock", True)])
def test_without_the_look_at_the_path_that_fails(tmp_path, monkeypatch, function, before):
    """The planted bug: what was locked is not compared with what the path leads to."""
    sweep = RunDirectory.sweep
    monkeypatch.setattr(RunDirectory, "sweep", lambda **_: [])
    interrupt(monkeypatch, function, lambda: sweep(base=tmp_path), before=before)
    monkeypatch.setattr(run_directory, "_leads_to", lambda *_: True)
    run = RunDirectory.join("a", base=tmp_path)
    assert not run.path.exists()  # a member of nothing
    run.forget()


def test_a_forked_child_is_no_member(tmp_path):
    with RunDirectory.join("a", base=tmp_path) as run:
        pid = os.fork()
        if pid == 0:
            try:
                run.open_region("w", 64)
            except StateError:
                run.close()
                os._exit(7)
            os._exit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert run.path.exists()


# --- what is not to be trusted --------------------------------------------------------------------


def test_a_link_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (tmp_path / (PREFIX + "a")).symlink_to(target)
    with pytest.raises(NotADirectoryError):
        RunDirectory.join("a", base=tmp_path)
    assert list(target.iterdir()) == []


@needs_root
def test_another_users_directory_is_refused(tmp_path):
    path = tmp_path / (PREFIX + "a")
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match=r"but is user 12345's.*Remove it, or use another name"):
        RunDirectory.join("a", base=tmp_path)


# --- members that are killed ----------------------------------------------------------------------


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
