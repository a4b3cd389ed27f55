"""`phalanx launch` and `phalanx.launch` with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.forked_scripts import Script

pytestmark = pytest.mark.promise("launchers")

DEADLINE_S = 120.0


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def launched(*words: str, folder: Path) -> tuple[int, list[str], list[str]]:
    """Run `phalanx launch` in forks; return its exit code and the lines of stdout and stderr."""
    errors = folder / "errors"
    script = Script(
        *("phalanx", "launch", *words), folder=folder, errors=errors, environment=environment()
    )
    try:
        code = script.wait(DEADLINE_S)
        return code, script.stdout.read().splitlines(), errors.read_text().splitlines()
    finally:
        script.end()


def write(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_ranks_share_a_group_and_say_who_speaks(tmp_path):
    """The launcher and its ranks start as users' do."""
    script = write(
        tmp_path,
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "total = torch.tensor(dist.get_rank() + 1)\n"
        "dist.all_reduce(total)\n"
        "print(dist.group.WORLD, int(total), sys.argv[1:], torch.get_num_threads())\n",
    )
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "launch", "-n", "2", str(script), "--epochs", "2"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}] SharedGroup('0', rank {rank} of 2) 3 ['--epochs', '2'] {threads}"
        for rank in range(2)
    ]


def test_ranks_start_again_and_the_first_cause_is_told_last(tmp_path):
    """In the first attempt rank 0 is killed, and in the second one rank 1 ends while 0 waits."""
    script = write(
        tmp_path,
        "import os, signal, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "dist.barrier()\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if attempt == 0 and dist.get_rank() == 0:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "total = torch.tensor(dist.get_rank() + 1)\n"
        "dist.all_reduce(total)\n"
        "print('attempt', attempt, int(total))\n"
        "if dist.get_rank() == 1:\n"
        "    sys.exit(7)\n"
        "dist.all_reduce(total)\n",
    )
    options = ("-n", "2", "--max-restarts", "1", str(script))
    code, said, errors = launched(*options, folder=tmp_path)
    assert code == 7, errors
    assert sorted(said) == [f"[rank {rank}] attempt 1 3" for rank in range(2)]
    told = next(place for place, line in enumerate(errors) if line.startswith("Rank 1 ended"))
    assert "ended with exit code 7." in errors[told]
    assert not any("[rank" in line for line in errors[told:])


def test_a_traceback_begins_in_the_script_and_says_things_once(tmp_path):
    script = write(
        tmp_path,
        "import signal, torch, torch.distributed as dist\n"
        "dist.init_process_group('phalanx')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1:\n"
        "    dist.destroy_process_group()\n"
        "    signal.pause()\n"
        "dist.all_reduce(torch.ones(3))\n",
    )
    code, _, lines = launched("-n", "2", str(script), folder=tmp_path)
    assert code == 1, lines
    prefix = "[rank 0] [rank0]: "  # ours, and torch's
    its_own = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    first = its_own.index("Traceback (most recent call last):")
    assert f'File "{script}", line 7' in its_own[first + 1]
    assert sum("Rank 1 of 2 has destroyed its group" in line for line in its_own) == 1
    assert sum("Traceback" in line for line in lines) == 1
    last = " ".join(line for line in lines if not line.startswith("[rank"))
    assert "Rank 0 ended with exit code 1. phalanx.errors.PeerLost: Rank 1 of 2 has" in last


LINGERING = """
import atexit, os, sys, threading
from phalanx.errors import PeerError

def linger():
    open(sys.argv[1], "w").close()
    threading.Event().wait()

if os.environ["RANK"] == "2":
    atexit.register(linger)
    raise ValueError("no such sample")
if os.environ["RANK"] == "0":
    open(sys.argv[1]).close()
    raise PeerError("Rank 2 has failed.", 2)
threading.Event().wait()
"""


def test_the_rank_whose_error_was_first_is_named_though_it_ends_last(tmp_path):
    """Rank 2 fails and stays; rank 0 fails for that, and ends at once."""
    os.mkfifo(tmp_path / "noted")
    script = write(tmp_path, LINGERING)
    code, _, lines = launched("-n", "3", str(script), str(tmp_path / "noted"), folder=tmp_path)
    assert code == 1, lines
    told = next(place for place, line in enumerate(lines) if line.startswith("Rank 2 ended"))
    text = " ".join(" ".join(lines[told:]).split())
    assert "Rank 0 failed as well." in text
    assert "ValueError: no such sample" in text
