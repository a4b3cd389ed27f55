"""Two launchers make one job of two hosts: played, and in two namespaces of the network."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.forked_scripts import Script
from tests.multiprocess.hosts import free_port
from tests.multiprocess.ranks import START_S

pytestmark = pytest.mark.promise("launchers")

MEET = """
import torch, torch.distributed as dist
dist.init_process_group()
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
words = [*repr(dist.group.WORLD).split()[-2:], str(total.item())]
print(" ".join(words) + "\\n", end="")  # one write: the launcher shows what it finds
dist.destroy_process_group()
"""
TRAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(5, 3).double())
inputs = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
model(inputs[dist.get_rank()]).square().mean().backward()
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
words = [*repr(dist.group.WORLD).split()[-2:], str(total.item())]
print(" ".join([*words, str(model.module.weight.grad.sum().item())]) + "\\n", end="")
dist.destroy_process_group()
"""
NAMES = ("phxa", "phxb")


def words(folder: Path, ranks: int, endpoint: str) -> list[str]:
    return ["-n", str(ranks), "--nnodes", "2", "--endpoint", endpoint, str(folder / "script.py")]


def launch(folder: Path, ranks: int, endpoint: str, **variables: str) -> Script:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return Script("phalanx", "launch", *words(folder, ranks, endpoint), environment=environment)


def check(said: list[str], codes: list[int]) -> None:
    """Three ranks in all, each with the same numbers, over a group of several hosts."""
    assert codes == [0, 0], "\n".join(said)
    lines = [line.partition("] ")[2] for text in said for line in text.splitlines()]
    found = [line for line in lines if line.startswith("2 hosts) 6.0")]
    assert len(found) == 3, "\n".join(said)
    assert len(set(found)) == 1


def test_two_launchers_make_one_job_of_two_hosts(tmp_path):
    (tmp_path / "script.py").write_text(MEET)
    endpoint = f"localhost:{free_port()}"
    variables = {"GLOO_SOCKET_IFNAME": "lo"}
    started = [
        launch(tmp_path, 2, endpoint, PHALANX_HOST="a", **variables),
        launch(tmp_path, 1, endpoint, PHALANX_HOST="b", **variables),
    ]
    try:
        codes = [one.wait(START_S) for one in started]
        check([one.stdout.read() for one in started], codes)
    finally:
        for one in started:
            one.end()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def two_networks() -> Iterator[tuple[str, str]]:
    """Make two namespaces of the network with a cable between them: 10.213.7.1 and .2."""
    one, other = (f"{name}{os.getpid()}" for name in NAMES)
    with contextlib.ExitStack() as stack:
        try:
            for name in (one, other):
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("link", "add", "phx0", "netns", one, "type", "veth", "peer", "phx0", "netns", other)
            for number, name in enumerate((one, other), start=1):
                ip("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", "phx0")
                ip("-n", name, "link", "set", "phx0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs the right to make namespaces of the network: {error}")
        yield one, other


@pytest.mark.night
def test_a_job_of_two_networks_trains(two_networks, tmp_path):
    (tmp_path / "script.py").write_text(TRAIN)
    one, other = two_networks
    # Who opens the store at the endpoint is decided by a host's name, so theirs are addresses.
    name = ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"')
    endpoint = "10.213.7.1:29500"
    command = (sys.executable, "-c", "from phalanx.cli.app import main; main()", "launch")
    variables = {"GLOO_SOCKET_IFNAME": "phx0", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", network, *name, address, *command, *words(tmp_path, *where)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PHALANX_HOST": host, **variables},
        )
        for network, address, host, *where in (
            (one, "10.213.7.1", "a", 2, endpoint),
            (other, "10.213.7.2", "b", 1, endpoint),
        )
    ]
    try:
        said = [each.communicate(timeout=START_S)[0] for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    check(said, [each.returncode for each in started])
