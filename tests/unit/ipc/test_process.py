"""Who a process is: alive, a zombie, gone, or another that was given its number."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.errors import PeerLost
from phalanx.ipc import ProcessIdentity, die_with_parent, signal_main_thread


def forked(action=lambda: None) -> tuple[int, int]:
    """Fork a child that runs ``action`` and then waits until the returned descriptor is closed."""
    reader, writer = os.pipe()
    ready, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        try:
            action()
            os.write(say, b"1")
            os.read(reader, 1)
        finally:
            os._exit(0)
    os.close(reader)
    os.close(say)
    assert os.read(ready, 1) == b"1"
    os.close(ready)
    return pid, writer


def test_a_process_is_alive_then_a_zombie_then_gone():
    pid, writer = forked()
    identity = ProcessIdentity.of(pid)
    assert identity.alive()
    os.close(writer)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not reaped
    assert not identity.alive()
    with pytest.raises(PeerLost, match=f"Process {pid} has ended"):
        ProcessIdentity.of(pid)
    os.waitpid(pid, 0)
    assert not identity.alive()
    with pytest.raises(PeerLost, match=f"Process {pid} has ended"):
        ProcessIdentity.of(pid)


def test_the_same_number_at_another_time_is_another_process():
    me = ProcessIdentity.current()
    assert me.pid == os.getpid()
    assert me.alive()
    assert not ProcessIdentity(me.pid, me.start_ticks + 1).alive()
    assert ProcessIdentity.of(os.getppid()) != me


def test_a_name_with_blanks_and_parentheses_confuses_nobody():
    def rename() -> None:
        Path("/proc/self/comm").write_text("a) Z 1 (b) X")

    pid, writer = forked(rename)
    assert Path(f"/proc/{pid}/comm").read_text() == "a) Z 1 (b) X\n"
    identity = ProcessIdentity.of(pid)
    assert identity.alive()
    assert identity.start_ticks >= ProcessIdentity.current().start_ticks
    os.close(writer)
    os.waitpid(pid, 0)


def test_a_parent_that_is_not_the_expected_one_has_ended():
    def ask() -> None:
        with pytest.raises(PeerLost, match="The parent, process 1, has ended"):
            die_with_parent(1)
        die_with_parent(os.getppid())

    pid, writer = forked(ask)
    os.close(writer)
    assert os.waitpid(pid, 0)[1] == 0


_BLOCKED = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(("send", "waits"), [(signal_main_thread, "SigPnd"), (os.kill, "ShdPnd")])
def test_a_signal_for_the_main_thread_waits_for_the_main_thread(send, waits):
    """The kernel's own books: `SigPnd` waits for that thread, `ShdPnd` for any of the process."""
    with subprocess.Popen(
        [sys.executable, "-c", _BLOCKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"ready\n"
        send(child.pid, signal.SIGUSR1)
        status = Path(f"/proc/{child.pid}/status").read_text()
        child.communicate(b"\n", timeout=60)
    pending = {k: int(v, 16) for k, v in re.findall(r"^(SigPnd|ShdPnd):\s*(\w+)$", status, re.M)}
    mask = 1 << (signal.SIGUSR1 - 1)
    assert [name for name, signals in pending.items() if signals & mask] == [waits]
