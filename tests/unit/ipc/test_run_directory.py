"""Run directories in one process: joining, leaving, sweeping, and what is not to be trusted."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
import torch

from phalanx.errors import ConfigError, StateError
from phalanx.ipc import RunDirectory, run_directory

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
PREFIX = f"phalanx-run-{os.geteuid()}-"


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


def test_no_descriptor_is_left_behind(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    with RunDirectory.join("a", base=tmp_path) as run:
        run.open_region("w", 64).close()
        with pytest.raises(ConfigError):
            run.open_region("w", 65)
    (tmp_path / (PREFIX + "b")).mkdir(mode=0o755)
    with pytest.raises(ConfigError):
        RunDirectory.join("b", base=tmp_path)
    assert set(os.listdir("/proc/self/fd")) == before


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
