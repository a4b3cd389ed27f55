"""The start of a rank: our backend as the default, then the user's script or function.

    phalanx launch    ──> python -u -c '…main()' launcher script.py args…
    an actor of Ray's ──> python -u -c '…call()' launcher descriptor < function, arguments

Where the script fails, the moment and the traceback go into the file that the launcher has named,
so that the first failure can be told from those that it caused. `call` leaves the same, or what the
function has returned, in a file without a name.
"""

from __future__ import annotations

import json
import os
import pickle
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from phalanx.distributed import RunEnded
from phalanx.environment import error_file
from phalanx.errors import ConfigError
from phalanx.files import written_whole
from phalanx.ipc import die_with_parent
from phalanx.launching.rank_failures import failure_note, users_traceback

__all__ = ["call", "main", "prepare", "record_failures", "run_script"]

T = TypeVar("T")


def prepare(launcher: int) -> None:
    """Make this process a rank, before it runs any code of the user's.

    It ends with its launcher. And ``init_process_group()`` without a backend means ours for the
    CPU, unless there is a CUDA device.

    Args:
        launcher: The process that has started this one.
    """
    die_with_parent(launcher)
    if not torch.cuda.is_available():
        dist.Backend.default_device_backend_map["cpu"] = "phalanx"


def record_failures(
    run: Callable[[], T], record: Callable[[BaseException], None] | None = None
) -> T:
    """Call ``run``; if it fails, write down how and when, and raise the error again."""
    record = record or _record
    try:
        return run()
    except RunEnded as exc:  # nothing is left to be done: no failure
        sys.stderr.write(f"{exc}\n")
        sys.exit(0)
    except SystemExit as exc:
        if exc.code:
            record(exc)
        raise
    except BaseException as exc:
        record(exc)
        raise


def _record(exc: BaseException) -> None:
    path = error_file()
    if path is not None:
        # Whole or not at all: the launcher may end this rank at any moment, and reads the file.
        with written_whole(path) as draft:
            draft.write_text(json.dumps(failure_note(exc)), encoding="utf-8")


def run_script(script: str, args: Sequence[str]) -> None:
    """Run a script as Python itself would.

    Raises:
        ConfigError: This host has no such file.
    """
    if not Path(script).is_file():
        raise ConfigError(
            f"`script` must be a Python file on every host, but {os.uname().nodename} has no file "
            f"{script!r}. Put it at the same path on all, or on a disk that they share."
        )
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Run the script that the command line names."""
    _, launcher, script, *args = sys.argv
    prepare(int(launcher))
    try:
        record_failures(lambda: run_script(script, args))
    except (Exception, KeyboardInterrupt) as exc:
        _end_by(exc)


def call() -> None:
    """Call the function that stands on stdin, and leave its result.

    The file of the descriptor on the command line gets, pickled, what was returned or how it
    failed; nothing where the function has ended the process without a failure.
    """
    _, launcher, descriptor = sys.argv
    prepare(int(launcher))

    def run() -> bytes:
        # From the driver of the same user, over a connection of Ray's.
        function, args = pickle.load(sys.stdin.buffer)
        return pickle.dumps(function(*args))

    with os.fdopen(int(descriptor), "wb") as outcome:
        try:
            value = record_failures(run, lambda exc: pickle.dump(failure_note(exc), outcome))
            outcome.write(value)
        except Exception as exc:
            _end_by(exc)


def _end_by(exc: BaseException) -> NoReturn:
    exc.__traceback__ = users_traceback(exc)
    sys.excepthook(type(exc), exc, exc.__traceback__)
    sys.exit(1)
