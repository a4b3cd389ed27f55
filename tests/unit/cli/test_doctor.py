"""`phalanx doctor`: from facts to findings as a table, and the command with real facts."""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
import subprocess
import sys
from dataclasses import asdict, fields, replace

import pytest

from phalanx.cli.app import main
from phalanx.cli.diagnosis import Choice, choose, describe_machine, examine, is_well
from phalanx.cli.machine import Machine, read_machine
from tests.multiprocess.children import Children, Parent

GIB = 1 << 30
WELL = Machine(
    phalanx="0.1.0",
    python="3.11.7",
    torch="2.13.0+cpu",
    system="Linux 6.1",
    processor="x86_64",
    keeps_order=True,
    cpu_capability="AVX2",
    cores=3,
    machine_cores=4,
    quota_cores=None,
    available_bytes=9 * GIB,
    limit_bytes=None,
    shared_bytes=8 * GIB,
    shared_free_bytes=7 * GIB,
    shared_is_writable=True,
    region_error=None,
    threads=3,
    omp_num_threads=None,
    devices=(),
    cuda=None,
    nvidia_driver=False,
    nccl=False,
    interfaces=("eth0", "lo"),
    named_interfaces=(),
    host_address="10.0.0.7",
    ray="2.60.0",
    zmq="27.3.0",
    zmq_encrypts=True,
    compiler="/usr/bin/cc",
    compiled=True,
    open_files=1024,
    most_open_files=4096,
)
GPUS = {"devices": ("cuda:0 H100", "cuda:1 H100", "cuda:2 H100"), "cuda": "12.8", "nccl": True}


def test_of_a_machine_that_has_all_nothing_is_said():
    assert examine(WELL) == []
    assert examine(replace(WELL, **GPUS)) == []


@pytest.mark.parametrize(
    ("facts", "severity", "topic", "said"),
    [
        ({"system": "Darwin 23.1"}, "error", "System", "this is Darwin 23.1"),
        ({"torch": "2.7.1"}, "error", "torch", "must be 2.8 or newer, but is 2.7.1"),
        ({"available_bytes": 99 << 20}, "error", "Memory", "Only 99 MiB.*End other"),
        (
            {"available_bytes": 99 << 20, "limit_bytes": GIB},
            "error",
            "Memory",
            "limit of 1.0 GiB",
        ),
        ({"region_error": "No memfd."}, "error", "Shared memory", "processes: No memfd"),
        ({"shared_free_bytes": 64 << 20}, "warning", "/dev/shm", "64 MiB free of 8.0.*--shm-size"),
        ({"shared_bytes": None, "shared_free_bytes": None}, "warning", "/dev/shm", "not there"),
        ({"shared_is_writable": False}, "warning", "/dev/shm", "not writable"),
        ({"open_files": 100}, "warning", "Open files", "100 files.*ulimit -n 4096"),
        ({"open_files": 100, "most_open_files": 100}, "warning", "Open files", "administrator"),
        ({"quota_cores": 1.5}, "warning", "Cores", r"1\.5 cores, but .* count 3.*-n 1"),
        ({"quota_cores": 0.5}, "warning", "Cores", r"taskset -c 0-0 .*replicas=1"),
        ({"omp_num_threads": "abc"}, "warning", "Threads", "positive number, but is 'abc'.*unset"),
        ({"omp_num_threads": "0"}, "warning", "Threads", "each rank takes 3 threads"),
        ({"cores": 1}, "note", "Cores", "one core"),
        ({"processor": "aarch64", "keeps_order": False}, "warning", "Processor", "On aarch64"),
        ({"cpu_capability": "DEFAULT"}, "warning", "Processor", "no AVX2"),
        (GPUS | {"nccl": False}, "warning", "NCCL", "no NCCL"),
        ({"nvidia_driver": True}, "warning", "GPU", "without CUDA"),
        ({"nvidia_driver": True, "cuda": "12.8"}, "warning", "GPU", "too old for CUDA 12.8"),
        ({"host_address": None}, "warning", "Network", "no address.*IFNAME=eth0"),
        ({"host_address": "127.0.1.1"}, "warning", "Network", "127.0.1.1.*IFNAME=eth0"),
        ({"named_interfaces": ("ib0",)}, "warning", "Network", "names ib0.*IFNAME=eth0"),
        ({"zmq": None, "zmq_encrypts": False}, "note", "ZeroMQ", r"phalanx\[cluster\]"),
        ({"zmq_encrypts": False}, "warning", "ZeroMQ", "without CURVE"),
        ({"ray": None}, "note", "Ray", r"phalanx\[ray\]"),
        ({"compiled": False}, "warning", "Compiled rows", "operators.*Install phalanx again"),
        ({"compiled": False, "compiler": None}, "warning", "Compiled rows", "Install a compiler"),
    ],
)
def test_what_a_machine_lacks_is_found_with_the_way_out(facts, severity, topic, said):
    (finding,) = examine(replace(WELL, **facts))
    assert (finding.severity, finding.topic) == (severity, topic)
    assert finding.way_out or finding.severity == "note"
    whole = f"{finding.text} {finding.way_out}"
    assert re.search(said, whole)
    assert is_well([finding]) == (severity != "error")


@pytest.mark.parametrize(
    "facts",
    [
        {"interfaces": ("lo",), "host_address": "127.0.0.1"},  # there is nobody to be reached
        {"named_interfaces": ("eth0",), "host_address": "127.0.0.1"},
        {"quota_cores": 3.0},
        {"host_address": "fe80::1"},
        {"torch": "3.0.0a0+git123"},
    ],
)
def test_what_is_as_it_should_be_is_not_told(facts):
    assert examine(replace(WELL, **facts)) == []


def test_the_worst_comes_first():
    poor = replace(WELL, ray=None, host_address=None, torch="2.6", cores=1, region_error="No.")
    assert [each.severity for each in examine(poor)] == [
        *("error", "error", "warning", "note", "note")
    ]


def choice(machine: Machine, topic: str) -> Choice:
    (found,) = (each for each in choose(machine) if each.topic.startswith(topic))
    return found


def test_the_trainer_is_said_to_try_what_it_tries():
    assert choice(WELL, "Trainer").choice == (
        "threads, the fastest of 1 replica × 3 threads, 2 replicas × 1 thread, "
        "3 replicas × 1 thread"
    )
    assert choice(replace(WELL, cores=1), "Trainer").choice == "threads, 1 replica × 1 thread"


@pytest.mark.parametrize(
    ("facts", "topic", "chosen", "why"),
    [
        ({}, "phalanx launch", "3 ranks × 1 thread", "one for each core"),
        ({"omp_num_threads": "2"}, "phalanx launch", "3 ranks × 2 threads", "OMP_NUM_THREADS=2"),
        ({"omp_num_threads": "2,1"}, "phalanx launch", "3 ranks × 2 threads", "NUM_THREADS=2,1"),
        ({"omp_num_threads": "0"}, "phalanx launch", "3 ranks × 3 threads", "OMP_NUM_THREADS=0"),
        ({}, "init_process_group", "phalanx", "shared memory"),
        (GPUS, "init_process_group", "torch's own choice", "NCCL"),
        (GPUS, "DataParallel", "3 replicas", "replicas=['cuda:0', 'cuda:1', '…']"),
        ({}, "Between hosts", "10.0.0.7", "name"),
        ({"named_interfaces": ("ib0", "eth0")}, "Between hosts", "ib0, eth0", "GLOO_SOCKET_IFNAME"),
        ({"host_address": None}, "Between hosts", "lo", "no address"),
    ],
)
def test_what_phalanx_takes_follows_from_the_facts(facts, topic, chosen, why):
    found = choice(replace(WELL, **facts), topic)
    assert found.choice == chosen
    assert why in found.why


def test_every_machine_can_be_described():
    bare = replace(
        WELL,
        **dict.fromkeys(("quota_cores", "available_bytes", "shared_bytes", "ray", "zmq")),
        limit_bytes=GIB,
        omp_num_threads="1",
        interfaces=(),
    )
    rows = dict(describe_machine(bare))
    assert rows["Memory"] == "unknown left, limit 1.0 GiB"
    assert rows["/dev/shm"] == "not there"
    assert rows["Ray"] == rows["ZeroMQ"] == "not installed"
    assert "OMP_NUM_THREADS=1" in rows["torch"]


def doctor(parent: Parent, *arguments: str) -> None:
    """Run the command where no file may grow: then no memory can be shared, as that is a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    sys.argv = ["phalanx", "doctor", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit) as ended:
        main()
    parent.tell((ended.value.code, said.getvalue()))


def run_doctor(*arguments: str, limits: str = "") -> subprocess.CompletedProcess[str]:
    line = f'{limits} exec "$0" -m phalanx doctor "$@"'
    return subprocess.run(
        ["sh", "-c", line, sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_tells_the_facts_of_this_machine_as_json_and_as_lines(monkeypatch, capsys):
    ran = run_doctor("--json")
    told = json.loads(ran.stdout)
    assert ran.returncode == (0 if told["well"] else 1)
    here = asdict(read_machine())
    assert told["machine"].keys() == {field.name for field in fields(Machine)}
    for name in ("torch", "cores", "compiled", "processor", "open_files", "zmq", "ray"):
        assert told["machine"][name] == here[name]
    monkeypatch.setattr(sys, "argv", ["phalanx", "doctor"])
    with pytest.raises(SystemExit):
        main()
    lines = capsys.readouterr().out.splitlines()
    assert f"Cores: {here['cores']} of {here['machine_cores']}" in lines[2]
    for finding in told["findings"]:
        start = f"{finding['severity']}: {finding['topic']}: "
        assert any(line.startswith(start) for line in lines)


def test_what_is_needed_and_will_not_work_is_an_exit_code():
    with Children() as children:
        code, said = children.start(doctor, "--json").get()
    told = json.loads(said)
    assert code == 1
    assert not told["well"]
    found = {(each["severity"], each["topic"]) for each in told["findings"]}
    assert {("error", "Shared memory"), ("warning", "Open files")} <= found


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_without_torch_that_is_what_it_says(tmp_path, arguments):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    line = f'export PYTHONPATH="{tmp_path}:$PYTHONPATH";'
    ran = run_doctor(*arguments, limits=line)
    assert ran.returncode == 1
    assert "libcudart.so.12: no such file" in ran.stdout
    assert "Traceback" not in ran.stderr
    if arguments:
        assert json.loads(ran.stdout)["well"] is False
