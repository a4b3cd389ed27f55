"""Two launchers make one job of two simulated hosts. In two networks: `test_starters.py`."""

from __future__ import annotations

import os
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
