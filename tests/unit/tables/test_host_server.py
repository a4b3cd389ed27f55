"""When a host's server ends, by a clock of the test's."""

from __future__ import annotations

import os
import subprocess

import pytest

from phalanx.ipc import ProcessIdentity
from phalanx.tables import host_server
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
