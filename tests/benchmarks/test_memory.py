"""`make bench-memory`: what is weighed, and what is made of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from benchmarks import memory as memory_module
from benchmarks.__main__ import app as bench_app
from benchmarks.holding import CASES, MemoryJob, build, commands_of
from benchmarks.machine import describe_machine
from benchmarks.memory import Weight, descendants, growth, held_bytes, report_memory

MACHINE = describe_machine()
MIB = 1 << 20

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="reads /proc")


def weight(formation, workers, *, parameters, optimizer, gradients=50, rest=200):
    sizes = [rest, rest + parameters, rest + parameters + gradients]
    sizes.append(sizes[-1] + optimizer)
    return Weight(
        formation=formation,
        workers=workers,
        bytes_by_case=dict(zip(CASES, [size * MIB for size in sizes], strict=True)),
    )


ALL = [
    weight("processes", 1, parameters=64, optimizer=128),
    weight("processes", 2, parameters=64, optimizer=136),
    weight("processes", 3, parameters=64, optimizer=150),
    weight("ddp", 1, parameters=64, optimizer=128),
    weight("ddp", 2, parameters=128, optimizer=256),
]


# --- parts ----------------------------------------------------------------------------------------


def test_a_part_is_what_one_case_holds_more_than_another():
    one = weight("ddp", 1, parameters=64, optimizer=128, gradients=70, rest=210)
    names = ("parameters", "gradients", "optimizer state", "rest")
    assert [one.part(name) // MIB for name in names] == [64, 70, 128, 210]
    assert one.state == 192 * MIB


def test_growth_is_over_the_fewest_workers_of_the_same_formation():
    factors = [growth(each, ALL) for each in ALL]
    assert factors == [None, pytest.approx(200 / 192), pytest.approx(214 / 192), None, 2.0]


def test_growth_of_worker_processes_is_judged():
    rows = report_memory(ALL, {}, MACHINE, 64).sheets[0].rows
    judged = [row.cells[0] for row in rows if row.cells]
    assert [cell.met for cell in judged[1:3]] == [True, False]
    assert (judged[0], judged[3], judged[4]) == (None, None, 2.0)
    assert rows[2].cells[1:] == (64, 136, 50, 200, 450)


# --- weighing -------------------------------------------------------------------------------------


@needs_proc
def test_touched_pages_count_and_shared_ones_count_once():
    """A child that touches 32 MiB of its own and 16 MiB that it shares with its own child."""
    program = (
        "import mmap, os, sys\n"
        "own, shared = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE), mmap.mmap(-1, 16 << 20)\n"
        "for each in (own, shared):\n"
        "    for at in range(0, len(each), mmap.PAGESIZE): each[at] = 1\n"
        "read, write = os.pipe()\n"
        "if not os.fork():\n"
        "    own.close()\n"
        "    for at in range(0, len(shared), mmap.PAGESIZE): shared[at] = 2\n"
        "    os.write(write, b'x')\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "os.read(read, 1)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline()
        pids = descendants([process.pid])
        assert len(pids) == 2
        held = sum(held_bytes(pid) for pid in pids)
        process.stdin.close()
    assert 48 * MIB <= held <= 48 * MIB + 24 * MIB  # and two interpreters


@pytest.mark.parametrize("case", CASES)
def test_a_case_holds_what_it_says(case):
    module, (inputs, targets) = build(
        MemoryJob(formation="ddp", case=case, workers=2, width=8, layers=3)
    )
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad)
    last = 8 * 8 + 8
    held = {"nothing": (last, 0), "parameters": (last, 3 * 64)}
    assert (trained, frozen) == held.get(case, (3 * 64 + last, 0))
    assert module(inputs).shape == targets.shape


def test_a_formation_of_ranks_has_one_command_each():
    job = MemoryJob(formation="ddp", case="nothing", workers=3, width=8, layers=1)
    ranks = [json.loads(words[-1])["rank"] for words in commands_of(job)]
    assert ranks == [0, 1, 2]


def run_memory(*words):
    return CliRunner().invoke(bench_app, ["memory", *words])


@needs_proc
@pytest.mark.night
def test_two_worker_processes_hold_parameters_once():
    """Two copies of the 64 MiB would be 64 MiB more."""
    held = {}
    for case in ("nothing", "parameters"):
        job = MemoryJob(formation="processes", case=case, workers=2, width=1024, layers=16)
        held[case] = memory_module.weigh(job)
    assert 60 * MIB <= held["parameters"] - held["nothing"] <= 96 * MIB


@needs_proc
def test_a_failed_formation_is_shown_and_the_command_says_so_at_the_end(tmp_path, monkeypatch):
    def weigh(job):
        if job.formation == "ddp":
            raise memory_module.PeerError("It fell.", 0)
        return MIB * (1 + CASES.index(job.case))

    monkeypatch.setattr(memory_module, "weigh", weigh)
    result = run_memory("--workers=2,1,2", f"--out={tmp_path}")
    assert result.exit_code == 1
    assert "ddp, 2 workers failed." in result.output
    report = json.loads((tmp_path / "memory.json").read_text())
    assert [each["workers"] for each in report["measured"]["formations"]] == [1, 2]
    assert set(report["failures"]) == {"ddp, 1 workers", "ddp, 2 workers"}
    assert (tmp_path / "memory.png").exists()
