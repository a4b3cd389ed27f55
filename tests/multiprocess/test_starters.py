"""One script, started by every launcher on two hosts in networks of their own: the same bits.

Its ranks meet in a table, too.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.cluster import make_secret
from tests.multiprocess.networks import Networks, networks_of_hosts
from tests.multiprocess.ranks import START_S

pytestmark = [
    pytest.mark.promise("launchers-change-no-bit", "launchers"),
    pytest.mark.night,
]

SCRIPT = """
import hashlib, os, sys, torch, phalanx
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
data = [(torch.randn(7, 5), torch.randint(3, (7,))) for _ in range(6)]
adamw = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
with phalanx.Trainer(
    net, nn.functional.cross_entropy, adamw,
    executor=sys.argv[1], replicas=1, microbatches=4, seed=0,
) as trainer:
    trainer.fit(data, epochs=2)
weights = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
if sys.argv[2:] == ["tables"]:
    os.environ.setdefault("PHALANX_SECRET_FILE", os.path.join(os.path.dirname(__file__), "secret"))
    with phalanx.tables.join(timeout_s=100.0) as world:
        table = world.array(5, name="t", sync=True)
        table.add(torch.ones(5))
        print(f"met {table.get().unique().tolist()}\\n", end="", flush=True)
print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}\\n", end="", flush=True)
"""
RANKS = (2, 1)  # of the hosts
SIZE = sum(RANKS)
PORT = 29500  # of a network that nobody else is in
RAY_PORT = 6379
RAY = {
    "RAY_USAGE_STATS_ENABLED": 0,
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": 0,
    "RAY_agent_register_timeout_ms": 300_000,  # on a busy machine
}

Commands = list[list[str]]
Starter = Callable[[Networks, str], Commands]


@pytest.fixture(scope="module")
def networks() -> Iterator[Networks]:
    with networks_of_hosts(len(RANKS)) as networks:
        yield networks


def python(networks: Networks, host: int, *words: str, **variables: object) -> list[str]:
    """Return what runs Python on a host, with more variables."""
    given = {"PHALANX_HOST": f"host-{host}", "OMP_NUM_THREADS": "1", **variables}
    settings = [f"{name}={value}" for name, value in given.items()]
    return [*networks.words(host), "env", *settings, sys.executable, *words]


def agents(networks: Networks, *words: str, num_ranks: str, script: str) -> Commands:
    """Return one command for each host, of a launcher with agents."""
    return [
        python(
            *(networks, host, *words, num_ranks, str(ranks), "--nnodes", "2"),
            *(script, "ranks", "tables"),
        )
        for host, ranks in enumerate(RANKS)
    ]


def phalanx_launch(networks: Networks, script: str) -> Commands:
    run = ("-c", "from phalanx.cli.app import main; main()", "launch")
    endpoint = ("--endpoint", f"{networks.addresses[0]}:{PORT}")
    return agents(networks, *run, *endpoint, num_ranks="-n", script=script)


def torchrun(networks: Networks, script: str) -> Commands:
    endpoint = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{networks.addresses[0]}:{PORT}")
    run = ("-m", "torch.distributed.run", *endpoint, "--rdzv-id", "run")
    return agents(networks, *run, num_ranks="--nproc-per-node", script=script)


def one_by_one(
    networks: Networks, script: str, variables: Callable[[int, int, int], dict[str, object]]
) -> Commands:
    """Return one command for each rank, as a starter without agents would run it."""
    commands = []
    for host, ranks in enumerate(RANKS):
        for local_rank in range(ranks):
            given = variables(len(commands), local_rank, ranks)
            given |= {"MASTER_ADDR": networks.addresses[0], "MASTER_PORT": PORT}
            commands.append(python(networks, host, script, "ranks", **given))
    return commands


def mpirun(networks: Networks, script: str) -> Commands:
    """Run Open MPI itself, which enters the other host by a program of ours in place of ssh."""
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun")
    enter = [
        shlex.join([*networks.words(host), "env", f"PHALANX_HOST=host-{host}"]) for host in (0, 1)
    ]
    first, second = networks.addresses
    agent = Path(script).with_name("enter_host")
    agent.write_text(f'#!/bin/sh\n[ $1 = {second} ] && shift && exec {enter[1]} sh -c "$*"\n')
    agent.chmod(0o755)
    given = {"MASTER_ADDR": first, "MASTER_PORT": str(PORT), "OMP_NUM_THREADS": "1"}
    words = ["mpirun", "--allow-run-as-root", "--mca", "plm_rsh_agent", str(agent)]
    words += ["-n", str(SIZE), "--host", f"{first}:{RANKS[0]},{second}:{RANKS[1]}"]
    for name, value in given.items():
        words += ["-x", f"{name}={value}"]
    return [[*shlex.split(enter[0]), *words, sys.executable, script, "ranks", "tables"]]


def open_mpi(networks: Networks, script: str) -> Commands:
    """Set what Open MPI sets."""
    return one_by_one(
        networks,
        script,
        lambda rank, local_rank, local_size: {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": SIZE,
            "OMPI_COMM_WORLD_LOCAL_RANK": local_rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": local_size,
        },
    )


def srun(networks: Networks, script: str) -> Commands:
    """Set what Slurm sets."""
    return one_by_one(
        networks,
        script,
        lambda rank, local_rank, _: {
            "SLURM_PROCID": rank,
            "SLURM_STEP_NUM_TASKS": SIZE,
            "SLURM_LOCALID": local_rank,
            "SLURM_STEP_TASKS_PER_NODE": "2,1",
            "SLURM_NODEID": int(rank >= RANKS[0]),
            "SLURM_JOB_ID": 1,
            "SLURM_STEP_ID": 0,
        },
    )


def weights(said: str) -> list[str]:
    return re.findall(r"weights (\w+)", said)


def met(said: str) -> set[str]:
    """Return how many ranks have met in a table, as each of them says."""
    return set(re.findall(r"met \[(\d)\.0\]", said))


def run_all(commands: Commands) -> str:
    """Run commands side by side; return what they say, when all have ended well."""
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        said = [each.communicate(timeout=10 * START_S)[0] for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    assert [each.returncode for each in started] == [0] * len(started), "\n".join(said)
    return "\n".join(said)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_text(SCRIPT)
    make_secret(path.with_name("secret"))
    return str(path)


@pytest.fixture(scope="module")
def expected(script: str) -> str:
    """Return the weights of one process."""
    (alone,) = weights(run_all([["env", "OMP_NUM_THREADS=1", sys.executable, script, "inline"]]))
    return alone


@pytest.mark.parametrize("starter", [phalanx_launch, torchrun, mpirun, open_mpi, srun])
def test_every_launcher_trains_to_the_bits_of_one_process(
    starter: Starter, networks: Networks, script: str, expected: str
) -> None:
    said = run_all(starter(networks, script))
    assert weights(said) == [expected] * SIZE
    # Processes that are started one by one have no /dev/shm in common here.
    assert met(said) == (set() if starter in (open_mpi, srun) else {str(SIZE)})


@contextlib.contextmanager
def ray_cluster(networks: Networks) -> Iterator[None]:
    """Run a node of Ray on each host."""
    nodes = []
    head = f"{networks.addresses[0]}:{RAY_PORT}"
    try:
        for host, address in enumerate(networks.addresses):
            place = ["--head", "--port", str(RAY_PORT)] if host == 0 else ["--address", head]
            place += ["--node-ip-address", address, "--num-cpus", str(RANKS[host])]
            words = ("-m", "ray.scripts.scripts", "start", *place, "--block")
            nodes.append(subprocess.Popen(python(networks, host, *words, **RAY)))
        yield
    finally:
        for node in nodes:
            node.terminate()
            node.wait()


def test_ray_trains_to_the_bits_of_one_process(
    networks: Networks, script: str, expected: str
) -> None:
    pytest.importorskip("ray", reason="needs ray, of the extra `ray`")
    address = f"{networks.addresses[0]}:{RAY_PORT}"
    run = (
        "import phalanx, runpy, sys\n"
        "def run():\n"
        f"    sys.argv = [{script!r}, 'ranks', 'tables']\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        f"phalanx.on_ray(run, {SIZE}, timeout_s=300)"
    )
    with ray_cluster(networks):
        said = run_all([python(networks, 0, "-c", run, RAY_ADDRESS=address, **RAY)])
        found = weights(said)
        assert met(said) == {str(SIZE)}
        # The nodes share their folder for logs, so each prints all lines.
        assert set(found) == {expected}
        assert len(found) >= SIZE
