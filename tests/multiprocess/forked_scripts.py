"""Scripts and commands in forks of a process that has imported torch, which run as users run them.

A program imports torch before it does anything; what it does afterwards is the same. The Pythons
that it starts are forks too. That all start as users' do is shown by `test_launch.py` and at night.
"""

from __future__ import annotations

import atexit
import inspect
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed.run
import torch.multiprocessing
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from phalanx.cli import app
from tests.multiprocess.fork_server import context

__all__ = ["Script", "run_forked"]

COMMANDS = {"phalanx": app.main, "torchrun": torch.distributed.run.main}


class Script:
    """A process that runs ``python script …`` or one of `COMMANDS`.

    Args:
        words: What a user types.
        folder: Where it runs.
        output: The file for what it says; none for `stdout`.
        errors: The file for stderr; none for that of stdout.
        environment: All of its variables.

    Attributes:
        stdout: What it and those that it starts say.
    """

    def __init__(
        self,
        *words: str,
        folder: Path = Path(),
        output: Path | None = None,
        errors: Path | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        ours, theirs = context.Pipe(duplex=False)
        self.stdout = open(os.dup(ours.fileno()), encoding="utf-8")  # noqa: SIM115 - closed by `end`
        ours.close()
        self._output = output
        args = (words, str(folder.absolute()), output, errors, dict(environment), theirs)
        self._process = context.Process(target=_be, args=args)
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
            said = self.stdout.read() if self._output is None else self._output.read_text()
            raise AssertionError(f"{self.pid} runs after {timeout_s:g} s, and has said:\n{said}")
        return code

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Kill it, if it runs, and close what it says."""
        self._process.kill()
        self._process.join()
        self.stdout.close()


def run_forked(*words: str, folder: Path, deadline_s: float) -> tuple[int, str]:
    """Run a `Script` to its end; return its exit code and all that was printed."""
    output = folder / "output"  # a pipe would end with the last process that has it
    output.unlink(missing_ok=True)
    script = Script(*words, folder=folder, output=output)
    try:
        return script.wait(deadline_s), output.read_text()
    finally:
        script.end()


def _be(
    words: Sequence[str],
    folder: str,
    output: Path | None,
    errors: Path | None,
    environment: Mapping[str, str],
    stdout: Any,
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for file in (stdout, output and output.open("ab")):
        if file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            file.close()
    if errors is not None:
        with errors.open("w") as file:
            os.dup2(file.fileno(), 2)
    # The server's are at positions of its own output. Into a pipe, lines are kept back.
    sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115
    torch.multiprocessing.spawn = partial(
        torch.multiprocessing.start_processes, start_method="fork"
    )
    subprocess.Popen = subprocess_handler.Popen = ForkedPython  # type: ignore[misc]
    if words[0] in COMMANDS:
        sys.argv = list(words)
        COMMANDS[words[0]]()
    else:
        _, *sys.argv = words
        runpy.run_path(sys.argv[0], run_name="__main__")


_ARGUMENTS = inspect.getfullargspec(subprocess.Popen._execute_child).args[2:]  # type: ignore[attr-defined]


class ForkedPython(subprocess.Popen):  # type: ignore[type-arg]
    """A child process that is a fork of this one, where it would be a Python of its own.

    It gets what a started one does: variables, output, session and signals, and no other file.
    """

    def _execute_child(self, args: Any, *how: Any) -> None:
        if list(args[:2]) != [sys.executable, "-u"]:
            super()._execute_child(args, *how)  # type: ignore[misc]
            return
        given = dict(zip(_ARGUMENTS, how, strict=True))
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_python(args[2:], given)
        self._child_created = True


def _be_python(words: Sequence[str], given: Mapping[str, Any]) -> NoReturn:
    """Be ``python -u`` with these words, as what `Popen._execute_child` is given says."""
    code = 1
    try:
        atexit._clear()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if given["start_new_session"]:
            os.setsid()
        for fd, ours in ((given["c2pwrite"], 1), (given["errwrite"], 2)):
            if fd != -1:
                os.dup2(fd, ours)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), write_through=True) for fd in (1, 2)
        )
        os.environ.clear()
        os.environ.update(given["env"])
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
        threading._shutdown()  # type: ignore[attr-defined]
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException as exc:
        sys.excepthook(type(exc), exc, exc.__traceback__)
    finally:
        atexit._run_exitfuncs()
        os._exit(code)
