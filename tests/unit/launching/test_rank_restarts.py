"""The process above a rank: its message as it restarts the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from phalanx.launching import rank_restarts


@pytest.mark.parametrize(
    ("end", "how", "status"),
    [
        ("sys.exit(7)", "ended with exit code 7", 7),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL", -signal.SIGKILL),
    ],
)
def test_a_restart_names_the_rank_and_how_it_ended(end, how, status, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(rank_restarts, "_RANK", f"import os, sys; {end}")
    monkeypatch.setattr(sys, "argv", ["rank_restarts.py", "1", str(os.getppid())])
    (tmp_path / "2").mkdir()
    for name, value in {
        "RANK": "2",
        "LOCAL_WORLD_SIZE": "3",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "2" / "error.json"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert rank_restarts._main() == status
    said = capsys.readouterr().err
    assert said.startswith("Rank 2 (process ")
    assert said.endswith(
        f") {how}. It is restarted (1 of 1); elastic ranks (`Ranks()`) continue meanwhile.\n"
    )


def test_a_signal_that_comes_before_the_rank_has_started_ends_it(monkeypatch):
    def start(*words, **how):
        signal.raise_signal(signal.SIGTERM)
        return popen(*words, **how)

    popen, earlier = subprocess.Popen, {number: signal.getsignal(number) for number in (1, 2, 15)}
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(rank_restarts, "_RANK", "import signal; signal.pause()")
    monkeypatch.setattr(sys, "argv", ["rank_restarts.py", "1", str(os.getppid())])
    assert rank_restarts._main() == -signal.SIGTERM
    for number, handler in earlier.items():
        signal.signal(number, handler)
