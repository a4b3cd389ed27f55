"""How a group is made where somebody dies on the way."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.clock import now_s
from phalanx.distributed.group_rendezvous import GroupRendezvous, make_group
from phalanx.errors import PeerError
from phalanx.ipc import wait_until
from tests.multiprocess.children import DEADLINE_S, Child, Children, Parent

SIZE = 3
LATE_S = 0.5


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as children:
        yield children


def meet(store: dist.Store, rank: int, timeout_s: float) -> tuple[str, int | None, float]:
    """Make a group and use it; tell what failed, whose fault it was and how long it took."""
    started_s = now_s()
    try:
        group = make_group(store, rank, SIZE, datetime.timedelta(seconds=timeout_s))
        tensor = torch.full((5,), float(rank))
        group.allreduce([tensor]).wait()
    except PeerError as exc:
        return type(exc).__name__, exc.rank, now_s() - started_s
    group.shutdown()
    assert tensor.tolist() == [3.0] * 5
    return "met", None, now_s() - started_s


def member(parent: Parent, path: str, rank: int, dies_at: str | None) -> None:
    """Meet as often as the parent says, with so much patience; die at a place in it."""
    torch.set_num_threads(1)
    store = dist.FileStore(path, SIZE)
    if dies_at is not None:
        plant_death(dies_at)
    parent.tell("ready")
    while (timeout_s := parent.hear()) is not None:
        parent.tell(meet(store, rank, timeout_s))


def blind_member(parent: Parent, path: str, rank: int, dies_at: str | None) -> None:
    """The same with a planted bug: nobody sees that somebody is dead."""

    setattr(GroupRendezvous, "_look_for_deaths", lambda *_: None)  # noqa: B010
    member(parent, path, rank, dies_at)


def plant_death(where: str) -> None:
    """Let this process kill itself when it comes to the method ``where`` of a rendezvous."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(GroupRendezvous, where, die)


def gather(
    children: Children,
    path: Path,
    dies_at: str | None = None,
    ranks: tuple[int, ...] = (0, 1, 2),
    body: Callable[..., None] = member,
) -> list[Child]:
    """Start ranks of which the last one dies where told."""
    members = [
        children.start(body, str(path), rank, dies_at if rank == ranks[-1] else None)
        for rank in ranks
    ]
    for one in members:
        assert one.get() == "ready"
    return members


@pytest.mark.parametrize(
    ("where", "victim"),
    [("share_memory", 0), ("share_memory", 2), ("connect", 0), ("connect", 2)],
)
def test_a_death_while_a_group_is_made_is_told_at_once(children, tmp_path, where, victim):
    ranks = (0, 1, 2) if victim == 2 else (1, 2, 0)
    members = gather(children, tmp_path / "store", where, ranks)
    for one in members:
        one.put(DEADLINE_S)
    members[-1].process.join(DEADLINE_S)
    for one in members[:-1]:
        error, rank, seconds = one.get()
        assert (error, rank) == ("PeerLost", victim)
        assert seconds < DEADLINE_S / 4


def late_member(where: str, parent: Parent, path: str, rank: int, dies_at: str | None) -> None:
    """The same, but rank 1 comes to the method ``where`` when rank 0 has ended, as rank 2 died."""
    method = getattr(GroupRendezvous, where)

    # Any: what the method takes and returns.
    def run_late(rendezvous: GroupRendezvous, *args: Any) -> Any:
        assert wait_until(lambda: not rendezvous._processes[0].alive(), DEADLINE_S)
        return method(rendezvous, *args)

    if rank == 1:
        setattr(GroupRendezvous, where, run_late)
    member(parent, path, rank, dies_at)


@pytest.mark.parametrize("where", ["share_memory", "connect"])
def test_the_rank_is_named_that_died_first(children, tmp_path, where):
    body = partial(late_member, where)
    members = gather(children, tmp_path / "store", "connect", body=body)
    for one in members:
        one.put(DEADLINE_S)
    assert members[0].get()[:2] == ("PeerLost", 2)
    members[0].put(None)
    assert members[1].get()[:2] == ("PeerLost", 2)


def test_gloo_needs_no_second_client_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.PrefixStore, "clone", None)
    group = make_group(dist.HashStore(), 0, 1, datetime.timedelta(seconds=DEADLINE_S))
    group.shutdown()


def test_with_deaths_unseen_it_is_told_at_the_deadline_only(children, tmp_path):
    members = gather(children, tmp_path / "store", "connect", body=blind_member)
    for one in members:
        one.put(LATE_S)
    for one in members[:-1]:
        assert one.get()[0] == "PeerTimeout"
