"""When a host's server ends, and when it takes a worker for lost, by a clock of the test's."""

from __future__ import annotations

import os
import subprocess

import pytest

from phalanx.cluster import Head, Link, Request
from phalanx.errors import StateError
from phalanx.ipc import ProcessIdentity
from phalanx.tables import host_server, host_service
from phalanx.tables.host_operations import Operation
from phalanx.tables.host_service import HostService
from phalanx.tables.run_context import RunContext


@pytest.fixture
def context():
    context = RunContext(f"test-server-{os.getpid()}", create=True)
    yield context
    context.close(1.0)


def test_workers_that_never_come_are_not_waited_for_longer_than_two_minutes(context, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(host_server, "now_s", lambda: now_s)
    membership = context.membership
    go_on = host_server._until_all_have_left(HostService(context), ProcessIdentity.current())
    membership.enter(worker=0, num_expected=2, timeout_s=1.0)
    now_s = 1000.0
    assert go_on()
    membership.leave(0, membership.incarnation(0), 1.0)
    now_s += 119.0
    assert go_on()
    now_s += 2.0
    assert not go_on()


def test_before_the_first_worker_a_server_waits_for_as_long_as_the_one_that_wants_it(
    context, monkeypatch
):
    now_s = 0.0
    monkeypatch.setattr(host_server, "now_s", lambda: now_s)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as starter:
        identity = ProcessIdentity.of(starter.pid)
        go_on = host_server._until_all_have_left(HostService(context), identity)
        now_s = 1000.0
        assert go_on()
    assert not go_on()


def enter(service: HostService, worker: int, incarnation: int) -> tuple[Link, int, int]:
    """Open the session of one client; return it, and the worker that the client is."""
    args = (worker if incarnation else -1, 7, 8, 0)
    head = Head(0, Operation.ENTER, worker, incarnation, 0, 1000, args, 0)
    link = Link()
    found = service.answer(Request(head, memoryview(b""), link)).args
    return link, found[0], found[1]


def test_a_worker_is_lost_whose_session_does_not_come_back_within_two_seconds(context, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(host_service, "now_s", lambda: now_s)
    service = HostService(context)

    def is_here_after(seconds: float) -> bool:
        nonlocal now_s
        now_s += seconds
        service.lose_those_without_session()
        return service.is_anybody_here()

    first, worker, incarnation = enter(service, 0, 0)
    assert is_here_after(100.0)  # it says nothing, but lives
    service.ended(first)
    assert is_here_after(1.9)
    _, *again = enter(service, worker, incarnation)
    assert again == [worker, incarnation]
    service.ended(first)  # said late
    assert is_here_after(100.0)
    service = HostService(context)  # the next server
    assert is_here_after(9.0)
    third, *again = enter(service, worker, incarnation)
    assert again == [worker, incarnation]
    assert is_here_after(100.0)
    service.ended(third)
    assert not is_here_after(2.1)
    with pytest.raises(StateError, match="was taken for lost on this host"):
        enter(service, worker, incarnation)


def test_after_a_servers_death_workers_have_ten_seconds_to_come_back(context, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(host_service, "now_s", lambda: now_s)
    enter(HostService(context), 0, 0)
    service = HostService(context)
    now_s = 10.1
    service.lose_those_without_session()
    assert not service.is_anybody_here()
