"""The process above a rank: what it says as it starts the rank again."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from phalanx.distributed import rank_restarts
from phalanx.distributed.launcher import signals_put_back


@pytest.mark.parametrize(
    ("end", "how", "status"),
    [
        ("sys.exit(7)", "ended with exit code 7", 7),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL", -signal.SIGKILL),
    ],
)
def test_who_goes_on_is_said_of_ranks_that_survive_only(end, how, status, monkeypatch, capsys):
    monkeypatch.setattr(rank_restarts, "_RANK", ("-c", f"import os, sys; {end}"))
    monkeypatch.setattr(sys, "argv", ["rank_restarts.py", "1", str(os.getppid()), "folder"])
    monkeypatch.setenv("RANK", "2")
    with signals_put_back():
        assert rank_restarts._main() == status
    said = capsys.readouterr().err
    assert said.startswith("Rank 2 (process ")
    assert said.endswith(
        f") {how}. It is started again (1 of 1); ranks that survive its loss go on (`Ranks()`).\n"
    )
