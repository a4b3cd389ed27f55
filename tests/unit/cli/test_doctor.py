"""`phalanx doctor`: facts and verdicts on this machine, and on machines that lack something."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import sys

import pytest
import torch

from phalanx.cli import checks
from phalanx.cli.app import main
from phalanx.errors import ConfigError


def run(capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["phalanx", "doctor"])
        with pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code, capsys.readouterr().out


def no_region(*args: object, **options: object) -> None:
    raise ConfigError("No memfd.")


@pytest.mark.parametrize(
    ("where", "name", "value", "line"),
    [
        (platform, "system", lambda: "Darwin", "error: System: Darwin .*needs Linux"),
        (torch, "__version__", "2.7.1", r"error: Versions: .*torch>=2\.8"),
        (checks, "available_memory_bytes", lambda: 99 << 20, "error: Memory: 99 MiB left"),
        (checks.Region, "create", no_region, r"error: Shared memory: No memfd\..*threads"),
        (checks, "_LEAST_SHARED_BYTES", 1 << 62, "warning: /dev/shm: .*--shm-size"),
        (resource, "getrlimit", lambda _: (100, 4096), "warning: Open files: 100, .*ulimit"),
        (checks, "cores_allowed", lambda: 0.5, r"warning: Cores: .*quota 0\.5.*replicas=1"),
        (checks, "is_compiled", lambda: False, "warning: C library: no.*C compiler"),
    ],
)
def test_a_machine_that_lacks_something_is_told_the_remedy(
    where, name, value, line, monkeypatch, capsys
):
    monkeypatch.setattr(where, name, value)
    code, said = run(capsys)
    assert re.search(line, said), said
    assert code == int(line.startswith("error"))


def test_this_machine_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys)
    assert code == 0, said
    assert f"torch {torch.__version__}" in said
    assert all(re.match(r"(ok|warning): [\w/ ]+: .+", each) for each in said.splitlines()), said


def test_without_torch_the_command_says_so() -> None:
    block = "import sys; sys.modules['torch'] = None; from phalanx.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", block, "doctor"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "cannot be imported" in done.stdout
    assert os.linesep * 2 not in done.stdout
