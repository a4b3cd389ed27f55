"""A job on one host: nobody else reaches its ranks, and nothing of it outlives its launcher."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx import launch
from phalanx.clock import pause
from phalanx.ipc import ProcessIdentity, RunDirectory
from tests.multiprocess.ranks import START_S

LISTENS = "0A"  # as /proc/net/tcp says it
NOBODY = 65534

# Two ranks that say where they are, and then train until somebody ends them.
SCRIPT = """
import os, sys, torch, torch.distributed as dist
from phalanx import tables
dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else None)
world = tables.join()
table = world.matrix(10, 4, name="m")
total = torch.ones(1000)
dist.all_reduce(total)
print("READY", os.getpid(), os.environ["MASTER_PORT"], flush=True)
while True:
    dist.all_reduce(total.fill_(1.0))
    table.add(torch.ones(1, 4), rows=[1])
"""


class Running:
    """A launcher and its two ranks, past the making of their group."""

    def __init__(self, launcher: subprocess.Popen[str]) -> None:
        self.launcher = launcher
        self.ranks: list[int] = []
        self.output: list[str] = []
        assert launcher.stdout is not None
        for line in launcher.stdout:
            self.output.append(line)
            if "READY" in line:
                *_, pid, port = line.split()
                self.ranks.append(int(pid))
                self.master_port = int(port)
            if len(self.ranks) == 2:
                return
        raise AssertionError("".join(self.output))

    def rest(self) -> str:
        assert self.launcher.stdout is not None
        return self.launcher.stdout.read()

    @property
    def pids(self) -> list[int]:
        return [self.launcher.pid, *self.ranks]


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[Callable[..., Running]]:
    """Give a function that starts jobs, which end with the block."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with contextlib.ExitStack() as stack:

        def begin(*words: str, options: Sequence[str] = ()) -> Running:
            command = "from phalanx.cli.app import main; main()"
            launcher = subprocess.Popen(
                [sys.executable, "-c", command, "launch", "-n", "2", *options, str(script), *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            stack.callback(launcher.wait)
            stack.callback(launcher.kill)
            return Running(launcher)

        yield begin


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Running]]:
    with starting(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Running]:
    """A job to look at, for several tests."""
    with starting(tmp_path_factory.mktemp("job")) as begin:
        yield begin()


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """Return the addresses at which these processes take connections."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                inodes.add(os.readlink(fd))
    found = []
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in inodes:
                address, port = words[1].split(":")
                found.append((read_address(address), int(port, 16)))
    return found


def read_address(text: str) -> str:
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words)))


def folders_of(pids: list[int]) -> set[Path]:
    """Return the folders of ours that these processes have open, or files in them."""
    found = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                path = Path(os.readlink(fd))
                found.update(at for at in [path, *path.parents] if at.name.startswith("phalanx-"))
    return found


def wait_until_gone(pids: list[int]) -> None:
    """Return when none of these processes runs; pytest's own limit ends a wait that is in vain."""
    for pid in pids:
        while ProcessIdentity(pid, start_ticks(pid)).alive():
            pause(0.01)


def start_ticks(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        line = Path(f"/proc/{pid}/stat").read_text()
        return int(line[line.rindex(")") + 2 :].split()[19])
    return -1


def group_again(backend: str) -> list[float]:
    totals = []
    for turn in range(3):
        dist.init_process_group(backend)
        total = torch.tensor([float(dist.get_rank() + turn)])
        dist.all_reduce(total)
        dist.destroy_process_group()
        totals.append(total.item())
    return totals


def group_of_its_own() -> list[int]:
    """Make a group of this rank alone, as a script does that sets torch's variables itself."""
    launched = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    sizes = [dist.get_world_size()]
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1)
    sizes.append(dist.get_world_size())
    dist.destroy_process_group()
    os.environ |= launched
    return sizes


def groups_of_all_kinds() -> dict[str, Any]:
    return {
        "interface": os.getenv("GLOO_SOCKET_IFNAME"),
        "phalanx": group_again("phalanx"),
        "gloo": group_again("gloo"),
        "alone": group_of_its_own(),
    }


def test_ranks_make_one_group_after_another_or_their_own_and_are_told_of_the_loopback(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    again = [3.0, 6.0, 9.0]
    found = {"interface": "lo", "phalanx": again, "gloo": again, "alone": [1, 1]}
    assert launch(groups_of_all_kinds, 3) == [found] * 3


def test_ranks_are_told_of_the_interface_that_the_user_names(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert launch(os.getenv, 1, args=("GLOO_SOCKET_IFNAME",)) == ["eth7"]


def test_ranks_on_one_host_take_no_connections(job):
    assert listening(job.pids) == []


def test_gloo_between_ranks_on_one_host_listens_on_the_loopback_only(start):
    job = start("gloo")
    found = listening(job.pids)
    assert found
    assert all(ipaddress.ip_address(address).is_loopback for address, _ in found), found


def test_the_store_of_several_launchers_listens_at_the_address_that_was_named(start):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = start(options=("--endpoint", f"127.0.0.1:{port}"))
    assert listening([job.launcher.pid]) == [("127.0.0.1", port)]


# What another user can try: to write into a store that listens, or into one that is a file.
ATTACK = """
import datetime, os, sys
from torch.distributed import TCPStore
os.setgroups([])
os.setgid({nobody})
os.setuid({nobody})
for port in {ports}:
    try:
        store = TCPStore("localhost", port, timeout=datetime.timedelta(seconds=2))
        store.set("torch.rendezvous.phalanx", "a pickle")
        print("wrote to port", port)
    except Exception as error:
        print("failed", file=sys.stderr)
for folder in {folders}:
    try:
        os.listdir(folder)
        print("read", folder)
        open(os.path.join(folder, "store-0-0"), "ab")
        print("wrote to", folder)
    except PermissionError:
        pass
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_write_to_what_the_ranks_read(job):
    folders = sorted(map(str, folders_of(job.pids)))
    ports = sorted({job.master_port, *(port for _, port in listening(job.pids))})
    done = subprocess.run(
        [sys.executable, "-c", ATTACK.format(nobody=NOBODY, ports=ports, folders=folders)],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert folders
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_launcher_that_is_killed_takes_its_ranks_along(start):
    job = start()
    folders = folders_of(job.pids)
    assert any(folder.exists() for folder in folders)
    job.launcher.kill()  # from here on any process that joins a run sweeps them away
    wait_until_gone(job.pids)
    job.launcher.wait()
    while any(folder.exists() for folder in folders):  # threads of a killed process end one by one
        pause(0.01)
        RunDirectory.sweep(base=tempfile.gettempdir())  # as the next launcher does
        RunDirectory.sweep()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.night)]
)
def test_a_launcher_that_is_told_to_end_leaves_nothing(start, number):
    job = start()
    folders = folders_of(job.pids)
    os.kill(job.launcher.pid, number)
    said = job.rest()
    wait_until_gone(job.ranks)
    code = job.launcher.wait()
    assert code == (-signal.SIGTERM if number == signal.SIGTERM else 130)
    assert not any(folder.exists() for folder in folders)
    its_own = [line for line in said.splitlines() if not line.startswith("[rank ")]
    assert not any("Traceback" in line for line in its_own), said
