"""Say on what the numbers were measured."""

from __future__ import annotations

import email.utils
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

import phalanx


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What must be known to compare numbers with somebody else's.

    Args:
        cores: Those that this process may use.
        load: Of the last minute, when the run began; None where the system does not tell.
        commit: Of Phalanx's own source, with ``+`` when changed since; None when installed.
    """

    cpu: str
    cores: int
    load: float | None
    system: str
    python: str
    torch: str
    phalanx: str
    commit: str | None
    date: str

    def in_words(self) -> str:
        """Return a line for the head of a run and the foot of a figure."""
        commit = f" · commit {self.commit}" if self.commit else ""
        return (
            f"{self.cpu}, {self.cores} cores, {self.system} · Python {self.python} · torch "
            f"{self.torch} · phalanx {self.phalanx}{commit} · {self.date}"
        )


def describe_machine() -> Machine:
    """Look at this machine."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    return Machine(
        cpu=_cpu_model(),
        cores=len(usable) if usable else os.cpu_count() or 1,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        phalanx=phalanx.__version__,
        commit=_commit(),
        date=email.utils.formatdate(),
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _commit() -> str | None:
    source = Path(phalanx.__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *words], cwd=source, capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed package may lie inside somebody else's repository; its commit is not ours.
    root = git("rev-parse", "--show-toplevel")
    if root is None or Path(root) != source.parents[1]:
        return None
    commit = git("rev-parse", "--short", "HEAD")
    return f"{commit}+" if commit and git("status", "--porcelain", "--", ".") else commit
