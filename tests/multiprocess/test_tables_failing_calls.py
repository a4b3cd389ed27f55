"""Adds and gets between hosts that fail or are interrupted in a place that only a test reaches."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from phalanx import tables
from phalanx.cluster import RemoteCall, connection
from phalanx.errors import ConfigError, OutOfSpace, PeerTimeout, PhalanxError, UnsupportedError
from phalanx.ipc import inject, wait_until
from phalanx.tables import host_rendezvous
from phalanx.tables.remote_host import RemoteHost
from phalanx.tables.router import Operation
from tests import worlds
from tests.multiprocess.children import Parent
from tests.multiprocess.hosts import become_worker, run_hosts
from tests.worlds import DEADLINE_S, HOSTS

pytestmark = pytest.mark.promise("adds-between-hosts-are-kept")


@pytest.fixture(scope="module", autouse=True)
def worlds_end() -> Iterator[None]:
    yield
    worlds.close()


def refuse_once(remote: RemoteHost, error: type[PhalanxError]) -> None:
    """Let the next message to a host end in an error."""
    connection, begin = remote, remote.begin

    def begin_none(operation: object, title: str, timeout_s: float, **_: object) -> None:
        connection.begin = begin  # type: ignore[method-assign]
        raise error(f"refused within {timeout_s:.0f} s")

    connection.begin = begin_none  # type: ignore[assignment, method-assign]


def add_while_this_host_refuses(world: tables.TableGroup) -> list:
    def refuse(point: str, worker: int) -> None:
        if point == "before lock":
            raise OutOfSpace("full")

    table = world.array(9, torch.int64, name="t")
    world.barrier()
    if world.worker_id == 0:
        remotes = world.remotes
        many = [3, *[6] * 29]  # more for host 2 than for host 1
        with patch.object(connection, "MAX_BYTES", 99), pytest.raises(ConfigError, match="parts"):
            table.add([1] * 30, rows=many)
        with patch.object(connection, "MAX_BYTES", 99), pytest.raises(ConfigError, match="parts"):
            world.array(99, init=torch.ones(99), name="u")
        assert not world.array(99, name="u").get().any()
        refuse_once(remotes[1], OutOfSpace)
        with pytest.raises(OutOfSpace, match="refused"):
            table.add(torch.ones(9, dtype=torch.int64))
        inject(refuse)
        with pytest.raises(OutOfSpace, match="full"):
            table.add(torch.ones(9, dtype=torch.int64))
        inject(None)
        assert not table._storage._turn.owner
    world.barrier()
    return table.get().tolist()


def test_an_add_that_fails_on_a_host_is_whole_on_the_others(run):
    here = [0, 0, 0, 2, 2, 2, 1, 1, 1]
    assert HOSTS.run(add_while_this_host_refuses, run=run) == [here] * 3


def end_a_round_that_a_host_does_not_hear_of(world: tables.TableGroup) -> list:
    table = world.array(9, torch.int64, name="t", sync=True)
    table.add(torch.ones(9, dtype=torch.int64))
    if world.worker_id == 0:
        world.timeout_s = 7.0
        refuse_once(world.remotes[1], PeerTimeout)
        with pytest.raises(PeerTimeout, match="refused within 7 s"):
            table.get()
        world.timeout_s = DEADLINE_S
    return [table.get().unique().tolist() for _ in range(2)]


def test_a_get_after_one_that_a_host_did_not_hear_of_is_of_the_same_round(run):
    found = HOSTS.run(end_a_round_that_a_host_does_not_hear_of, run=run)
    assert found == [[[3], [3]]] * 3


def come_back(parent: Parent, given: dict[str, str], _: object, how: dict[str, Path]) -> None:
    """Worker 2 leaves and comes back, while its host lags behind by a round."""
    become_worker(given)
    in_elsewhere, added = (how["folder"] / name for name in ("in elsewhere", "added"))
    with tables.join(timeout_s=DEADLINE_S) as world:
        table = world.array(6, name="t", sync=True)
        world.barrier()
        if world.worker_id == 1:
            remote, begin = world.remotes[1], world.remotes[1].begin

            def begin_late(operation: object, *asked: Any, **more: Any) -> RemoteCall:
                if operation == Operation.END_ROUND and not in_elsewhere.exists():
                    table._storage.here.finish(1, DEADLINE_S)
                    in_elsewhere.touch()
                    assert wait_until(added.exists, DEADLINE_S)
                return begin(operation, *asked, **more)

            remote.begin = begin_late  # type: ignore[method-assign]
        if world.worker_id < 2:
            assert wait_until(lambda: world.workers == [0, 1], DEADLINE_S)
            table.get()
            parent.tell((world.worker_id, table.get().unique().tolist()))
            return
    assert wait_until(in_elsewhere.exists, DEADLINE_S)
    host_rendezvous._met.clear()  # as a process that was started again
    with tables.join(timeout_s=DEADLINE_S) as world:
        table = world.array(6, name="t", sync=True)
        table.add(torch.ones(6))
        added.touch()
        parent.tell((world.worker_id, table.get().unique().tolist()))


def test_who_comes_back_adds_to_a_round_that_is_in_on_no_host(run, tmp_path):
    assert run_hosts(3, run, 3, bool, worker=come_back, folder=tmp_path) == [[1.0]] * 3


def come_again_at_once(world: tables.TableGroup) -> None:
    if world.worker_id == 0:
        assert wait_until(lambda: world.membership.incarnation(1) == 2, DEADLINE_S)
        return
    for remote in world.remotes:
        remote.close()  # as where the worker is killed
    world.close()
    host_rendezvous._met.clear()
    tables.join(timeout_s=DEADLINE_S).close()


def test_who_is_started_again_at_once_has_its_number(run):
    assert run_hosts(2, run, 2, come_again_at_once) == [None] * 2


def left_behind() -> tuple[int, int]:
    """Return the number of our threads, and of this process's descriptors."""
    threads = [each for each in threading.enumerate() if each.name.startswith("phalanx")]
    return len(threads), len(os.listdir("/proc/self/fd"))


def join_again_and_again(parent: Parent, given: dict[str, str], *_: object) -> None:
    become_worker(given)
    counts = []
    for _ in range(4):
        with tables.join(timeout_s=DEADLINE_S) as world:
            table = world.array(6, name="t")
            table.add(torch.ones(6))
            world.barrier()
            assert table.get().tolist() == [3.0] * 6
            world.barrier()
        counts.append(left_behind())
    # The thread of the job's store, on rank 0, closes a connection once it sees the other end gone.
    assert wait_until(lambda: left_behind() <= counts[0], DEADLINE_S), (counts, left_behind())
    parent.tell((int(given["RANK"]), None))


def test_who_joins_and_closes_again_and_again_leaves_no_thread_and_no_descriptor(run):
    run_hosts(3, run, 3, bool, worker=join_again_and_again)


class Own(tables.Updater):
    name = "own"

    def apply(self, rows: torch.Tensor, delta: torch.Tensor, states: list[torch.Tensor]) -> None:
        rows.add_(delta)


def ask_for_what_hosts_have_not(world: tables.TableGroup) -> list:
    with pytest.raises(UnsupportedError, match="Start more processes"):
        world.thread_worker()
    with pytest.raises(UnsupportedError, match="must be a built-in one for tables on several"):
        world.array(3, name="t", updater=Own())
    return world.array(3, name="t", init=1.0).get().tolist()


def test_hosts_refuse_a_thread_and_an_updater_of_the_users_and_the_name_stays_free(run):
    assert HOSTS.run(ask_for_what_hosts_have_not, run=run) == [[1.0] * 3] * 3
