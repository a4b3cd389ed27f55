"""A job on one host: nobody else reaches its ranks, and nothing of it outlives its launcher."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from phalanx.clock import pause
from phalanx.ipc import RunDirectory
from tests.multiprocess.children import Children, Parent, wait_for_exit
from tests.multiprocess.forked_scripts import Script, run_forked
from tests.multiprocess.ranks import START_S

LISTENS = "0A"  # as /proc/net/tcp says it
NOBODY = 65534

# Two ranks that say where they are, and then wait for each other until somebody ends them.
SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist
from phalanx import tables
dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else None)
world = tables.join()
table = world.matrix(10, 4, name="m")
total = torch.ones(1000)
dist.all_reduce(total)
print("READY", os.getpid(), flush=True)
if dist.get_rank() == 1:
    signal.pause()
dist.all_reduce(total)
"""


class Running:
    """A launcher and its two ranks, past the making of their group."""

    def __init__(self, launcher: Script) -> None:
        self.launcher = launcher
        self.ranks: list[int] = []
        self.output: list[str] = []
        for line in launcher.stdout:
            self.output.append(line)
            if "READY" in line:
                self.ranks.append(int(line.split()[-1]))
            if len(self.ranks) == 2:
                return
        raise AssertionError("".join(self.output))

    @property
    def pids(self) -> list[int]:
        return [self.launcher.pid, *self.ranks]


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[Callable[..., Script]]:
    """Give a function that starts launchers, which end with the block."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with contextlib.ExitStack() as stack:

        def begin(*words: str) -> Script:
            launcher = Script("phalanx", "launch", "-n", "2", str(script), *words)
            stack.callback(launcher.end)
            return launcher

        yield begin


class Job:
    """A job for several tests, started again for the one after a test that has ended it."""

    def __init__(self, begin: Callable[..., Script]) -> None:
        self._begin = begin
        self._running: Running | None = None

    def get(self) -> Running:
        if self._running is None:
            self._running = Running(self._begin())
        return self._running

    def get_to_end(self) -> Running:
        running, self._running = self.get(), None
        return running


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Job]:
    with starting(tmp_path_factory.mktemp("job")) as begin:
        yield Job(begin)


@pytest.fixture(scope="module")
def gloo(tmp_path_factory) -> Iterator[Job]:
    with starting(tmp_path_factory.mktemp("gloo")) as begin:
        yield Job(lambda: begin("gloo"))


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


GROUPS = """
import torch, torch.distributed as dist
for turn in range(3):
    dist.init_process_group("phalanx")
    total = torch.tensor([float(dist.get_rank() + turn)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    print(f"turn {turn}: {total.item()}\\n", end="")
"""


def test_ranks_make_one_group_after_another(tmp_path):
    (tmp_path / "script.py").write_text(GROUPS)
    words = ("phalanx", "launch", "-n", "3", "script.py")
    code, said = run_forked(*words, folder=tmp_path, deadline_s=START_S)
    assert code == 0, said
    assert [said.count(f"turn {turn}: {3.0 + 3 * turn}") for turn in range(3)] == [3] * 3


@pytest.mark.parametrize("backend", ["job", "gloo"])
def test_ranks_on_one_host_listen_on_the_loopback_only(request, backend):
    found = listening(request.getfixturevalue(backend).get().pids)
    assert found
    assert all(ipaddress.ip_address(address).is_loopback for address, _ in found), found


def attack(parent: Parent, folders: Sequence[str]) -> None:
    """Do what another user can try: read and write in the job's folders."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    done = []
    for folder in folders:
        with contextlib.suppress(PermissionError):
            os.listdir(folder)
            done.append(f"read {folder}")
            open(os.path.join(folder, "logs"), "ab").close()
            done.append(f"wrote to {folder}")
    parent.tell(done)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_enter_the_folders_of_a_job(job):
    running = job.get()
    folders = sorted(map(str, folders_of(running.pids)))
    assert folders
    with Children() as children:
        assert children.start(attack, folders).get() == []


def test_a_launcher_that_is_killed_takes_its_ranks_along(job):
    running = job.get_to_end()
    folders = folders_of(running.pids)
    assert any(folder.exists() for folder in folders)
    running.launcher.kill()  # from here on any process that joins a run sweeps them away
    for pid in running.pids:
        wait_for_exit(pid)
    while any(folder.exists() for folder in folders):  # threads of a killed process end one by one
        pause(0.01)
        RunDirectory.sweep(base=tempfile.gettempdir())  # as the next launcher does
        RunDirectory.sweep()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.night)]
)
def test_a_launcher_that_is_told_to_end_leaves_nothing(gloo, number):
    running = gloo.get_to_end()
    folders = folders_of(running.pids)
    os.kill(running.launcher.pid, number)
    said = running.launcher.stdout.read()
    for pid in running.ranks:
        wait_for_exit(pid)
    code = running.launcher.wait(START_S)
    assert code == (-signal.SIGTERM if number == signal.SIGTERM else 130)
    assert not any(folder.exists() for folder in folders)
    its_own = [line for line in said.splitlines() if not line.startswith("[rank ")]
    assert not any("Traceback" in line for line in its_own), said
    if number == signal.SIGINT:
        assert its_own == ["Interrupted: all ranks of this host were ended."], said
        assert "Traceback" not in said


UNDER_NOHUP = """
import os, signal
from pathlib import Path
from phalanx.launching import launch_script
signal.signal(signal.SIGHUP, signal.SIG_IGN)
Path("rank.py").write_text(f"import os, signal; os.kill({os.getpid()}, signal.SIGHUP)")
launch_script(Path("rank.py"), [], 1)
"""


def test_a_launcher_under_nohup_outlives_its_terminal(tmp_path):
    (tmp_path / "script.py").write_text(UNDER_NOHUP)
    code, said = run_forked("python", "script.py", folder=tmp_path, deadline_s=START_S)
    assert code == 0, said
