"""Workers that Ray starts: nodes of it, played on one machine, are as many hosts."""

from __future__ import annotations

import base64
import os
import re
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

from phalanx import PeerTimeout, Trainer
from phalanx.cluster import on_ray, ray_launcher
from phalanx.distributed import RankFailed
from phalanx.files import written_whole
from phalanx.ipc import wait_until
from tests.multiprocess.test_tables_hosts import DEADLINE_S, SCRIPT, expected_lines

pytestmark = pytest.mark.promise("launchers")

ray = pytest.importorskip("ray", reason="needs ray, of the extra `ray`")
cluster_utils = pytest.importorskip("ray.cluster_utils")

CPUS = (2, 1)  # of the nodes: three workers are spread as 2 and 1


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[cluster_utils.Cluster]:
    nodes = cluster_utils.Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": CPUS[0],
            "include_dashboard": False,
            "no_monitor": True,
            "include_log_monitor": False,
        },
    )
    try:
        for cpus in CPUS[1:]:
            nodes.add_node(num_cpus=cpus, include_log_monitor=False)
        yield nodes
    finally:
        nodes.shutdown()


@pytest.fixture(scope="module")
def cluster(two_nodes) -> cluster_utils.Cluster:
    """Add a third node: four workers are spread as 2, 1 and 1."""
    two_nodes.add_node(num_cpus=1)
    return two_nodes


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """See that no shared memory outlives a test."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert wait_until(lambda: ours(set(os.listdir("/dev/shm")) - before) == [], 30.0)


def ours(names: set[str]) -> list[str]:
    return sorted(name for name in names if "-ray-" in name)  # of runs that `on_ray` has named


def command(address: str, *words: str) -> list[str]:
    run = "from phalanx.cli.app import main; main()"
    return [sys.executable, "-c", run, "launch", "--ray", "--address", address, *words]


def test_the_script_of_other_launchers_gives_the_same_on_two_nodes(two_nodes, tmp_path):
    script = tmp_path / "script.py"
    lines = SCRIPT.splitlines(keepends=True)
    script.write_text("".join(line for line in lines if "PHALANX_HOST" not in line))
    done = subprocess.run(
        command(two_nodes.address, "-n", "3", str(script)),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "its run is" not in line]
    assert {line.partition("] ")[2] for line in said} == expected_lines(3), done.stdout
    for line in said:  # who speaks is named
        assert re.match(r"\[rank (\d)\] worker \1 ", line), line


# --- functions ------------------------------------------------------------------------------------


def place() -> tuple[int, ...]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return tuple(int(os.environ[name]) for name in names)


@pytest.mark.night
def test_a_functions_values_come_by_rank_and_ranks_are_numbered_by_node(cluster):
    places = on_ray(place, 4, address=cluster.address)
    assert [rank for rank, *_ in places] == [0, 1, 2, 3]
    assert {size for _, size, *_ in places} == {4}
    assert [node for *_, node in places] == sorted(node for *_, node in places)
    by_node = [[each[2:4] for each in places if each[4] == node] for node in range(3)]
    assert sorted(map(len, by_node)) == [1, 1, 2]
    for found in by_node:
        assert found == [(local, len(found)) for local in range(len(found))]


class NoSuchSample(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(f"no sample {number}")
        self.number = number

    def __reduce__(self) -> tuple:
        return type(self), (self.number,)


def fail_at(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        raise NoSuchSample(7)
    signal.pause()


@pytest.mark.night
def test_a_failure_has_its_own_type_and_traceback_and_names_its_worker(cluster):
    with pytest.raises(NoSuchSample, match="no sample 7") as caught:
        on_ray(fail_at, 3, args=(1,), address=cluster.address)
    assert caught.value.number == 7
    (note,) = caught.value.__notes__
    assert note.startswith("Raised by worker 1 of 3, on Ray's node ")
    cause = caught.value.__cause__
    assert isinstance(cause, RankFailed)
    assert cause.rank == 1
    assert "in fail_at" in str(cause)


def killed_once(actor: bool) -> tuple[int, int]:
    """In the first attempt rank 1 is killed, or its actor is."""
    dist.init_process_group("gloo")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0 and dist.get_rank() == 1:
        os.kill(os.getppid() if actor else os.getpid(), signal.SIGKILL)
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return attempt, int(total)


@pytest.mark.night
@pytest.mark.parametrize("actor", [False, True], ids=["process", "actor"])
def test_a_kill_ends_the_run_or_starts_all_workers_again(cluster, actor):
    with pytest.raises(RankFailed, match=r"Rank 1 \(process \d+\) was killed by SIGKILL") as caught:
        on_ray(killed_once, 3, args=(actor,), address=cluster.address)
    assert caught.value.exit_code == 128 + signal.SIGKILL
    (note,) = caught.value.__notes__
    assert ("is lost: " if actor else "It ran on Ray's node ") in note
    found = on_ray(killed_once, 3, args=(actor,), address=cluster.address, max_restarts=1)
    assert found == [(1, 6)] * 3


def wait_in_the_first_attempt(folder: str) -> str:
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    if attempt == "0":
        with written_whole(Path(folder, rank)) as draft:
            draft.write_text(os.environ["PHALANX_HOST"])
        signal.pause()
    return attempt


@pytest.mark.night
def test_workers_of_a_lost_node_start_again_on_the_others(cluster, tmp_path):
    cluster.add_node(num_cpus=1)  # what is lost is as much
    nodes = {f"ray-{node.node_id}": node for node in cluster.worker_nodes}

    def remove_a_node() -> None:
        hosts = [tmp_path / str(rank) for rank in range(4)]
        assert wait_until(lambda: all(host.exists() for host in hosts), DEADLINE_S)
        used = next(nodes[host.read_text()] for host in hosts if host.read_text() in nodes)
        cluster.remove_node(used, allow_graceful=False)

    removal = threading.Thread(target=remove_a_node)
    removal.start()
    try:
        started = on_ray(
            wait_in_the_first_attempt,
            4,
            args=(str(tmp_path),),
            address=cluster.address,
            max_restarts=1,
        )
    finally:
        removal.join()
    assert started == ["1"] * 4


# --- training -------------------------------------------------------------------------------------


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


def train_as_rank() -> list[bytes]:
    dist.init_process_group("gloo")
    weights = train("ranks")
    dist.destroy_process_group()
    return weights


@pytest.mark.night
def test_ranks_on_ray_train_to_the_bits_of_one_process(cluster):
    torch.set_num_threads(1)
    assert on_ray(train_as_rank, 3, address=cluster.address) == [train("inline")] * 3


# --- the secret -----------------------------------------------------------------------------------


def forms(secret: bytes) -> list[bytes]:
    return [secret, secret.hex().encode(), base64.b64encode(secret), repr(secret)[2:-1].encode()]


def search_processes() -> tuple[bytes, list[str]]:
    """Return this worker's secret, and where among all processes it can be read."""
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
        found = on_ray(search_processes, 2, address=cluster.address)
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


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.night
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_ended_ends_its_workers(cluster, tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nprint('process', os.getpid())\nsignal.pause()\n")
    with subprocess.Popen(
        command(cluster.address, "-n", "3", str(script)), stdout=subprocess.PIPE, text=True
    ) as driver:
        try:
            processes = [int(driver.stdout.readline().rpartition(" ")[2]) for _ in range(3)]
            driver.send_signal(number)
            code = driver.wait(DEADLINE_S)
        finally:
            driver.kill()
    assert code == (130 if number == signal.SIGINT else -number)
    assert wait_until(lambda: not any(map(is_there, processes)), 30.0)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.night
def test_a_cluster_without_room_is_told_early_and_at_the_deadline(cluster, monkeypatch, capsys):
    monkeypatch.setattr(ray_launcher, "_NO_ROOM_S", 1.0)
    asked = "Ray did not place 9 workers with 1 CPU each within {} s; the cluster has 4 CPUs, of "
    with pytest.raises(PeerTimeout) as late:
        on_ray(place, 9, address=cluster.address, timeout_s=2.0)
    assert str(late.value).startswith(asked.format("2"))
    (early,) = [line for line in capsys.readouterr().err.splitlines() if "did not place" in line]
    assert early.startswith(asked.format("1"))
    assert early.endswith(" are free. Waiting for room, 2 s in all.")
