"""Ranks that Ray starts: nodes of it, played on one machine, are as many hosts."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx import PeerTimeout, Trainer, UnsupportedError, on_ray
from phalanx.files import written_whole
from phalanx.ipc import wait_until
from phalanx.launching import RankFailed

pytestmark = pytest.mark.promise("launchers")

ray = pytest.importorskip("ray", reason="needs ray, of the extra `ray`")
cluster_utils = pytest.importorskip("ray.cluster_utils")

DEADLINE_S = 150.0
CPUS = (2, 1)  # of the nodes: three ranks are spread as 2 and 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[cluster_utils.Cluster]:
    head = {"num_cpus": CPUS[0], "include_dashboard": False, "no_monitor": True}
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        for cpus in CPUS[1:]:
            nodes.add_node(num_cpus=cpus)
        ray.init(address=nodes.address)
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """See that no shared memory outlives a test."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert wait_until(lambda: ours(set(os.listdir("/dev/shm")) - before) == [], 30.0)


def ours(names: set[str]) -> list[str]:
    return sorted(name for name in names if "-ray-" in name)  # of runs that `on_ray` has named


def command(address: str, script: Path) -> list[str]:
    """Return what runs a script in three ranks."""
    call = f"lambda: runpy.run_path({str(script)!r}, run_name='__main__') and None"
    run = f"import phalanx, runpy; phalanx.on_ray({call}, 3)"
    return ["env", f"RAY_ADDRESS={address}", sys.executable, "-c", run]


# --- the same script, the same bits -------------------------------------------------------


def train(executor: str) -> list[bytes]:
    torch.manual_seed(0)
    data = [(torch.randn(12, 5), torch.randint(0, 4, (12,))) for _ in range(5)]
    net = nn.Linear(5, 4)
    with Trainer(
        net,
        nn.functional.cross_entropy,
        lambda params: torch.optim.AdamW(params, lr=1e-2),
        executor=executor,
        replicas=1,
        microbatches=6,
        seed=0,
    ) as trainer:
        trainer.fit(data, epochs=2)
    return [parameter.detach().numpy().tobytes() for parameter in net.parameters()]


def train_as_rank() -> tuple[list[bytes], str]:
    dist.init_process_group()
    weights = train("ranks")
    dist.destroy_process_group()
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    return weights, " ".join(os.environ[name] for name in names)


@pytest.mark.promise("launchers-change-no-bit")
def test_ranks_on_two_nodes_train_to_the_bits_of_one_process(cluster):
    torch.set_num_threads(1)
    weights, places = zip(*on_ray(train_as_rank, 3), strict=True)
    assert list(weights) == [train("inline")] * 3
    assert sorted(place[2:] for place in places) == ["0 1 1", "0 2 1", "1 2 1"]
    assert [place[0] for place in places] == ["0", "1", "2"]


# --- what is refused ------------------------------------------------------------------------------


def test_without_ray_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError, match=r"Say `pip install 'phalanx\[ray\]'`\."):
        on_ray(print)


@pytest.mark.night
def test_a_cluster_without_room_ends_the_wait_at_the_deadline(cluster):
    asked = "Ray did not place 9 ranks with 1 CPU each within 2 s"
    with pytest.raises(PeerTimeout, match=asked):
        on_ray(train_as_rank, 9, timeout_s=2.0)


# --- failures -------------------------------------------------------------------------------------


class Sample(Exception):
    pass


def fail_at(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        raise Sample("no sample 7")
    signal.pause()


@pytest.mark.night
def test_a_failure_names_its_rank_with_the_traceback(cluster):
    with pytest.raises(RankFailed, match="Rank 1 failed: ") as caught:
        on_ray(fail_at, 3, args=(1,))
    assert caught.value.rank == 1
    assert "in fail_at" in str(caught.value)
    assert str(caught.value).endswith("Sample: no sample 7")


def killed() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def exit_with_an_error() -> None:
    if os.environ["RANK"] == "1":
        sys.exit(3)
    signal.pause()


@pytest.mark.night
@pytest.mark.parametrize("end", [killed, exit_with_an_error])
def test_a_rank_that_ends_with_an_error_ends_the_run(cluster, end):
    with pytest.raises(RankFailed, match="Rank 1 failed: The actor ") as caught:
        on_ray(end, 3)
    assert caught.value.rank == 1


def exit_or_return() -> str:
    if os.environ["RANK"] == "0":
        sys.exit(0)
    return "returned"


@pytest.mark.night
def test_a_rank_that_exits_with_success_returns_none(cluster):
    assert on_ray(exit_or_return, 2) == [None, "returned"]


def wait_in(folder: str) -> None:
    with written_whole(Path(folder, os.environ["RANK"])) as draft:
        draft.write_text(os.environ["PHALANX_HOST"])
    signal.pause()


@pytest.mark.night
def test_a_lost_node_ends_the_run(cluster, tmp_path):
    spare = [cluster.add_node(num_cpus=1) for _ in range(2)]
    nodes = {f"ray-{node.node_id}": node for node in spare}

    def remove_a_node() -> None:
        hosts = [tmp_path / str(rank) for rank in range(4)]
        assert wait_until(lambda: all(host.exists() for host in hosts), DEADLINE_S)
        used = next(nodes[host.read_text()] for host in hosts if host.read_text() in nodes)
        cluster.remove_node(used, allow_graceful=False)

    removal = threading.Thread(target=remove_a_node)
    removal.start()
    try:
        with pytest.raises(RankFailed, match="failed: The actor "):
            on_ray(wait_in, 4, args=(str(tmp_path),))
    finally:
        removal.join()


@pytest.mark.night
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_ended_ends_its_ranks(cluster, tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, signal\n"
        f"pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.rank').touch()\n"
        "signal.pause()\n"
    )
    with subprocess.Popen(command(cluster.address, script)) as driver:
        try:
            assert wait_until(lambda: len(list(tmp_path.glob("*.rank"))) == 3, DEADLINE_S)
            driver.send_signal(number)
            assert driver.wait(DEADLINE_S) != 0
        finally:
            driver.kill()
    processes = [int(path.stem) for path in tmp_path.glob("*.rank")]
    assert wait_until(lambda: not any(map(is_there, processes)), 30.0)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


# --- the secret -----------------------------------------------------------------------------------


def forms(secret: bytes) -> list[bytes]:
    return [secret, secret.hex().encode(), base64.b64encode(secret), repr(secret)[2:-1].encode()]


def search_processes() -> tuple[bytes, list[str]]:
    """Return this rank's secret, and where among all processes it can be read."""
    secret = Path(os.environ["PHALANX_SECRET_FILE"]).read_bytes()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        for file in (path, path.with_name("cmdline")):
            try:
                content = file.read_bytes()
            except OSError:  # it has ended, or is the kernel's
                continue
            found += [str(file) for form in forms(secret) if form in content]
    return secret, found


@pytest.mark.night
def test_the_secret_is_new_for_each_run_and_in_no_environment_or_log(cluster):
    seen = []
    for _ in range(2):
        found = on_ray(search_processes, 2)
        assert [where for _, where in found] == [[], []]
        assert found[0][0] == found[1][0]
        seen.append(found[0][0])
    assert seen[0] != seen[1]
    logs = [
        path for path in Path(cluster.head_node.get_logs_dir_path()).rglob("*") if path.is_file()
    ]
    assert logs
    for path in logs:
        content = path.read_bytes()
        assert not any(form in content for secret in seen for form in forms(secret)), path
