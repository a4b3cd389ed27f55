"""Launchers and ranks of jobs, forked from a process that has imported torch.

A program imports torch before it does anything; what it does afterwards is the same. That both
start as users' do is shown by test_launch.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig

from phalanx.cli.app import main
from phalanx.distributed import launcher, rank_start
from phalanx.ipc import die_with_parent
from tests.multiprocess.fork_server import context

__all__ = ["Launcher", "fork_ranks"]


class Launcher:
    """A process that runs `phalanx launch` with ``words``; the ranks are programs.

    Args:
        words: The command's options, the script and its arguments.
        folder: Where it runs.
        errors: The file for stderr; none for that of stdout.
        environment: All of its variables.

    Attributes:
        stdout: What it and its ranks say.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        folder: Path = Path(),
        errors: Path | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        ours, theirs = context.Pipe(duplex=False)
        self.stdout = open(os.dup(ours.fileno()), encoding="utf-8")  # noqa: SIM115 - closed by `end`
        ours.close()
        args = (words, str(folder.absolute()), errors, dict(environment), theirs)
        self._process = context.Process(target=_launch, args=args)
        self._process.start()
        theirs.close()  # else its end would not be seen as the end of the pipe

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, or minus the signal that killed it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        """Return its exit code when it has ended."""
        self._process.join(timeout_s)
        code = self.exit_code
        if code is None:
            self.kill()
            said = self.stdout.read()
            raise AssertionError(f"the launcher runs after {timeout_s:g} s, and has said:\n{said}")
        return code

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Kill it, if it runs, and close what it says."""
        self._process.kill()
        self._process.join()
        self.stdout.close()


def _launch(
    words: Sequence[str],
    folder: str,
    errors: Path | None,
    environment: Mapping[str, str],
    output: Connection,
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    if errors is not None:
        with errors.open("w") as file:
            os.dup2(file.fileno(), 2)
    # The server's are at positions of its own output. Into a pipe, lines are kept back.
    sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115
    sys.argv = ["phalanx", "launch", *words]
    main()


def fork_ranks(patch: pytest.MonkeyPatch) -> None:
    """Let `phalanx.launch` fork its ranks; they have the variables of the fork server's start."""

    def config(**how: Any) -> LaunchConfig:
        return LaunchConfig(**how | {"start_method": "forkserver"})

    patch.setattr(launcher, "LaunchConfig", config)
    patch.setattr(launcher, "_run_function", _run_function)


_run_function_of_ours = launcher._run_function


def _run_function(
    pid: str, folder: str, function: Callable[..., Any], args: tuple[object, ...]
) -> Any:
    # Its parent is the server, which ends with the process that tests.
    rank_start.die_with_parent = lambda _: die_with_parent(os.getppid())
    return _run_function_of_ours(pid, folder, function, args)
