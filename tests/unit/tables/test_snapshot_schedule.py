"""Snapshots that are written every so many seconds, in one process."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from phalanx import tables
from phalanx.clock import now_s
from phalanx.errors import CheckpointError, PeerTimeout
from phalanx.ipc import wait_until
from phalanx.tables import snapshot_schedule, snapshots
from phalanx.tables.sharded import Storage
from phalanx.tables.snapshot_schedule import RoundGate

DEADLINE_S = 30.0
OFTEN_S = 0.01


def until(ready) -> None:
    assert wait_until(ready, DEADLINE_S)


def value_in(folder: Path, name: str = "t") -> float | None:
    """Return the first value of a snapshot, as another world restores it; None if there is none."""
    if not (folder / f"{name}.json").exists():
        return None
    with tables.join() as world:
        table = world.matrix(7, 3, name=name)
        table.restore(folder)
        return table.get([6])[0, 2].item()


def ones() -> torch.Tensor:
    return torch.ones(7, 3)


# --- what is written, and when --------------------------------------------------------------------


def test_snapshots_follow_what_is_added(tmp_path):
    with tables.join() as world:
        table = world.matrix(7, 3, name="t")
        told = table.snapshot(tmp_path / "new" / "folder", every_s=OFTEN_S)
        assert told == tmp_path / "new" / "folder" / "t.json"
        for count in (1.0, 2.0):
            table.add(ones())
            until(lambda count=count: value_in(told.parent) == count)
        until(lambda: table.stats().snapshots >= 2)
        assert table.stats().snapshots_failed == 0
    assert len(list(told.parent.iterdir())) == 2


def test_the_first_comes_after_the_interval_and_the_last_asked_counts(tmp_path):
    # A run that is to be restored must not be overwritten by its first values.
    with tables.join() as world:
        table = world.matrix(7, 3, name="t", init=1.0)
        table.snapshot(tmp_path)
        table.add(ones())
        table.snapshot(tmp_path, every_s=1000)
        assert value_in(tmp_path) == 1.0
        table.snapshot(tmp_path / "other", every_s=OFTEN_S)
        until(lambda: table.stats().snapshots > 1)
    assert value_in(tmp_path) == 1.0
    assert value_in(tmp_path / "other") == 2.0


def test_a_snapshot_that_is_replaced_while_it_is_read_is_read_anew(tmp_path, monkeypatch):
    read_parts = snapshots._read_parts

    def replaced_once(spec, data, digest):
        monkeypatch.setattr(snapshots, "_read_parts", read_parts)
        table.add(ones())
        table.snapshot(tmp_path)
        return read_parts(spec, data, digest)

    with tables.join() as world:
        table = world.matrix(7, 3, name="t")
        table.snapshot(tmp_path)
        monkeypatch.setattr(snapshots, "_read_parts", replaced_once)
        assert value_in(tmp_path) == 1.0


def test_it_ends_with_the_world(tmp_path):
    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("phalanx snapshots")]

    with tables.join() as world:
        world.matrix(7, 3, name="t").snapshot(tmp_path, every_s=1000)
        assert threads() == ["phalanx snapshots of worker 0"]
    assert threads() == []
    assert list(tmp_path.iterdir()) == []


def test_the_next_master_writes_where_one_leaves(tmp_path):
    with tables.join(num_workers=2) as world, world.thread_worker() as other:
        mine, others = (each.matrix(7, 3, name="t") for each in (world, other))
        for table in (mine, others):
            table.snapshot(tmp_path, every_s=OFTEN_S)
        until(lambda: mine.stats().snapshots)
        assert others.stats().snapshots == 0
        world.leave()
        others.add(ones())
        until(lambda: others.stats().snapshots)
        until(lambda: value_in(tmp_path) == 1.0)  # one may have come before the add


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_full_disk_is_said_once_and_tried_again(tmp_path, monkeypatch, caplog):
    pieces, full = snapshots._pieces, threading.Event()

    def fill_up(parts):
        yield next(pieces(parts))
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield from list(pieces(parts))[1:]

    monkeypatch.setattr(snapshots, "_pieces", fill_up)
    with tables.join() as world:
        table = world.matrix(7, 3, name="t")
        table.snapshot(tmp_path, every_s=OFTEN_S)
        until(lambda: table.stats().snapshots)
        full.set()
        table.add(ones())
        until(lambda: table.stats().snapshots_failed > 2)
        assert value_in(tmp_path) == 0.0
        full.clear()
        until(lambda: value_in(tmp_path) == 1.0)
    (told,) = caplog.messages
    assert told.startswith("A snapshot of table 't' could not be written: `directory` must be")
    assert told.endswith(
        "(No space left on device). What was written before counts. It is tried again every 0.01 s."
    )
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("every_s", [None, 1000])
@pytest.mark.parametrize(
    "text", ["precious", "[1, 2]", json.dumps({"version": 1, "file": "x"}), "", "{" * 9999]
)
def test_a_file_of_the_users_with_the_name_of_a_snapshot_is_left_alone(tmp_path, text, every_s):
    theirs = tmp_path / "t.json"
    theirs.write_text(text)
    with tables.join() as world:
        table = world.matrix(7, 3, name="t")
        with pytest.raises(CheckpointError) as caught:
            table.snapshot(tmp_path, every_s=every_s)
    assert str(caught.value) == (
        f"{str(theirs)!r} must be a snapshot of table 't' where one is written, but is another "
        "file, and is left as it is. Name another `directory`, or move the file away."
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json"]
    assert theirs.read_text() == text


def test_a_file_that_comes_while_a_snapshot_is_written_is_left_alone(tmp_path, monkeypatch):
    write = snapshots._write

    def write_slowly(file, parts):
        (tmp_path / "t.json").write_text("precious")
        return write(file, parts)

    monkeypatch.setattr(snapshots, "_write", write_slowly)
    with tables.join() as world, pytest.raises(CheckpointError, match="but is another file"):
        world.matrix(7, 3, name="t").snapshot(tmp_path)
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["precious"]


def test_what_a_dead_writer_has_left_goes_and_a_living_ones_stays(tmp_path):
    names = [".t.12.34.tmp", ".t.56.78.tmp", ".t.notes.tmp", ".other.1.2.tmp"]
    for name in names:
        (tmp_path / name).write_text("half")
    with (tmp_path / names[1]).open("r+") as living, tables.join() as world:
        fcntl.flock(living, fcntl.LOCK_EX)
        world.matrix(7, 3, name="t").snapshot(tmp_path)
    left = {entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")}
    assert left == set(names[1:])


def test_a_worker_that_sees_nothing_new_says_so_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(snapshot_schedule, "_UNSEEN_S", 0.0)
    with tables.join(num_workers=2) as world, world.thread_worker() as other:
        world.matrix(7, 3, name="t")
        other.matrix(7, 3, name="t").snapshot(tmp_path, every_s=OFTEN_S)  # the master is not asked
        until(lambda: caplog.messages)
        task = next(iter(other.snapshots._tasks.values()))
        due_s = task.due_s
        until(lambda: task.due_s > due_s)
    assert caplog.messages == [
        f"Worker 1 sees no new snapshot of table 't' in {str(tmp_path)!r}. All hosts must share "
        "that folder, and the master must ask for snapshots, too."
    ]
    assert caplog.records[0].levelno == logging.WARNING


# --- rounds ---------------------------------------------------------------------------------------


class Came(NamedTuple):
    number: int


@contextmanager
def thread_of(function, *args) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_a_copy_waits_for_gets_that_are_open():
    gate, copied = RoundGate(), threading.Event()

    def copy() -> None:
        with gate.between_rounds(["a", "b"], DEADLINE_S):
            copied.set()

    gate.arrive("a", lambda: Came(1))
    with thread_of(copy):
        until(lambda: gate._wanted)
        gate.arrive("b", lambda: Came(1))  # beside one that is open it is let in
        gate.arrive("other", lambda: Came(1))
        gate.finish("a", 1)
        assert not copied.is_set()
        gate.finish("b", 1)
        assert copied.wait(DEADLINE_S)


def test_a_get_waits_for_a_copy_and_does_not_overtake_one():
    gate, arrived = RoundGate(), []
    gate.arrive("a", lambda: Came(1))
    copying, go_on = threading.Event(), threading.Event()

    def copy() -> None:
        with gate.between_rounds(["a", "b"], DEADLINE_S):
            arrived.append("copy")
            copying.set()
            assert go_on.wait(DEADLINE_S)

    with thread_of(copy):
        until(lambda: gate._wanted)
        gate.finish("a", 1)
        with thread_of(gate.arrive, "a", lambda: Came(arrived.append("get") or 2)):
            assert copying.wait(DEADLINE_S)
            assert arrived == ["copy"]
            go_on.set()
    assert arrived == ["copy", "get"]


def test_an_abandoned_get_is_named_and_the_next_one_ends_it():
    gate = RoundGate()
    gate.arrive("a", lambda: Came(1))
    with (
        pytest.raises(PeerTimeout, match="A get of table 'a' was under way for"),
        gate.between_rounds(["a"], 0.01),
    ):
        pass
    gate.arrive("a", lambda: Came(2))
    gate.finish("a", 1)  # late: another is open
    assert gate._open
    gate.finish("a", 2)
    with gate.between_rounds(["a"], 0.01):
        pass


class Pair(nn.Module):
    """Parameters of two dtypes, so in two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.zeros(3))
        self.wide = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def train(world: tables.TableGroup, folder: Path, ended: Callable[[], bool]) -> None:
    """Add 1 to all parameters of a module, sync, and so on; end as a worker."""
    net = Pair()
    shared = tables.SharedModule(net, world, merge="sum", sync=True, name="net")
    told = shared.snapshot(folder, every_s=OFTEN_S)
    assert [path.name for path in told] == [
        "net.parameters.float32.json",
        "net.parameters.float64.json",
    ]
    while not ended():
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += 1
        shared.sync()
    world.leave()


@pytest.mark.parametrize("bug", [None, "copied within a round"])
def test_a_synchronous_module_is_written_between_two_syncs(tmp_path, monkeypatch, bug):
    copy_all, copied = Storage.copy_all, []

    def copy_slowly(self: Storage, timeout_s: float):
        before = self.rounds.clock_of(1)
        # The other worker comes to its next get, and can only pass it where nobody holds it up.
        wait_until(lambda: self.rounds.clock_of(1) > before + 2, 0.05)
        parts = copy_all(self, timeout_s)
        copied.append(parts[0].unique().tolist())
        return parts

    monkeypatch.setattr(Storage, "copy_all", copy_slowly)
    if bug is not None:
        monkeypatch.setattr(RoundGate, "between_rounds", lambda *_: nullcontext())
    deadline_s = now_s() + DEADLINE_S

    def ended() -> bool:
        return len(copied) > 5 or now_s() > deadline_s

    with (
        tables.join(num_workers=2) as one,
        one.thread_worker() as two,
        thread_of(train, two, tmp_path, ended),
    ):
        train(one, tmp_path, ended)
    narrow, wide = copied[2:6:2], copied[3:6:2]  # of the one tensor, and of the other
    assert len(wide) == 2
    assert (narrow == wide) == (bug is None), "of two syncs"
    with tables.join(sync=True) as world:
        net = Pair()
        tables.SharedModule(net, world, merge="sum", name="net").restore(tmp_path)
        assert net.narrow.unique().numel() == net.wide.unique().numel() == 1
        assert net.narrow[0] > 0
