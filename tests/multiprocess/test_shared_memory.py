"""Regions and run directories, in one process and among processes, some of which are killed."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.errors import ConfigError, OutOfSpace, PeerLost
from phalanx.ipc import Region, RunDirectory, run_directory
from tests.multiprocess.children import Children, Parent, wait_for_exit

pytestmark = pytest.mark.promise("nothing-is-left-behind")
PREFIX = f"phalanx-run-{os.geteuid()}-"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def start() -> Iterator[Children]:
    with Children() as children:
        yield children


# --- regions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 10, 1 << 20])
def test_nobody_can_pull_the_memory_away(nbytes):
    region = Region.create(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, nbytes)


def test_more_memory_than_there_is_is_refused_before_it_is_taken():
    with pytest.raises(OutOfSpace, match=r"'huge' needs .* in memory, but") as e:
        Region.create(1 << 50, label="huge")
    assert e.value.needed_bytes == 1 << 50
    assert 0 < e.value.available_bytes < 1 << 50
    assert isinstance(e.value, OSError)


@pytest.mark.parametrize("kind", ["closed", "file", "pipe"])
def test_what_is_no_region_is_not_borrowed(kind):
    ends = os.pipe() if kind == "pipe" else [os.open(__file__, os.O_RDONLY)]
    if kind == "closed":
        os.close(ends[0])
    with pytest.raises(PeerLost, match="Region 'x' of process"):
        Region.borrow(os.getpid(), ends[0], label="x")
    for fd in ends if kind != "closed" else ():
        os.close(fd)


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
    first.open_region("w", 64)
    first.close()
    first.close()
    assert sorted(path.name for path in second.path.iterdir()) == ["w.region"]
    second.close()
    assert list(tmp_path.iterdir()) == []


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
    ("try_lock", True),
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


@pytest.mark.parametrize(("function", "before"), [("_open_directory", False), ("try_lock", True)])
def test_without_the_look_at_the_path_that_fails(tmp_path, monkeypatch, function, before):
    """The planted bug: what was locked is not compared with what the path leads to."""
    sweep = RunDirectory.sweep
    monkeypatch.setattr(RunDirectory, "sweep", lambda **_: [])
    interrupt(monkeypatch, function, lambda: sweep(base=tmp_path), before=before)
    monkeypatch.setattr(run_directory, "_leads_to", lambda *_: True)
    run = RunDirectory.join("a", base=tmp_path)
    assert not run.path.exists()  # a member of nothing
    run.forget()


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


def leave_to_a_forked_child(parent: Parent, name: str, base: Path, buggy: bool) -> None:
    if buggy:
        RunDirectory.forget = lambda self: None  # the planted bug: the child keeps the open file
    _ = RunDirectory.join(name, base=base)
    if os.fork() == 0:
        parent.tell(os.getpid())
        parent.hear()  # only the death of the other end ends this
        os._exit(0)
    signal.pause()


@pytest.mark.parametrize("buggy", [False, True])
def test_a_forked_child_does_not_keep_a_dead_members_place(start, tmp_path, buggy):
    member = start.start(leave_to_a_forked_child, "run", tmp_path, buggy)
    forked = member.get()
    member.kill()
    try:
        assert RunDirectory.sweep(base=tmp_path) == ([] if buggy else ["run"])
    finally:
        os.kill(forked, signal.SIGKILL)
        wait_for_exit(forked)
