"""The start of a rank: our backend as the default, then the user's script or function.

    phalanx launch    ──> python -u -c '…main()' launcher folder script.py args…
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
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from phalanx.clock import wall_clock_s
from phalanx.distributed.backend import NAME
from phalanx.distributed.elastic_membership import RunEnded
from phalanx.distributed.launch_rendezvous import meet_in_folder
from phalanx.errors import ConfigError, PeerError, PhalanxError
from phalanx.files import written_whole
from phalanx.ipc import die_with_parent

__all__ = ["call", "main", "prepare", "record_failures", "run_script"]

T = TypeVar("T")
_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_LEADING = (_OURS, runpy.__file__, "<string>", "<frozen runpy>")
"""Where frames lie that come before the user's own, in a rank's traceback."""


def prepare(launcher: int, folder: str) -> None:
    """Make this process a rank, before it runs any code of the user's.

    It ends with its launcher. On one host it meets the others through files in a folder. And
    ``init_process_group()`` without a backend means ours for the CPU, unless there is a CUDA
    device: that ours hands CUDA tensors to NCCL was never tried on one.

    Args:
        launcher: The process that has started this one.
        folder: Where the ranks of a job on one host meet; empty for torch's own way.
    """
    die_with_parent(launcher)
    if folder:
        meet_in_folder(Path(folder))
    if not torch.cuda.is_available():
        dist.Backend.default_device_backend_map["cpu"] = NAME


def record_failures(
    run: Callable[[], T], record: Callable[[BaseException], None] | None = None
) -> T:
    """Call ``run``; if it fails, write down how and when, and let the error go on."""
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
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    # Whole or not at all: the launcher may end this rank at any moment, and reads what is there.
    with written_whole(Path(path)) as draft:
        draft.write_text(json.dumps(_failure_note(exc)), encoding="utf-8")


def _failure_note(exc: BaseException) -> dict[str, object]:
    """Return what a launcher is told of a failure, in the form that torch's launcher reads."""
    at_s = wall_clock_s()
    code = exc.code if isinstance(exc, SystemExit) else None
    return {
        "message": {
            "message": f"{type(exc).__name__}: {exc}",
            "extraInfo": {
                "py_callstack": _said(exc),
                "timestamp": str(int(at_s)),
                "at_s": at_s,
                "pid": os.getpid(),
                "exit_code": code & 0xFF if isinstance(code, int) else 1,
                "echo": isinstance(exc, PeerError | dist.DistError),
            },
        }
    }


def _from_user_on(exc: BaseException) -> TracebackType | None:
    """Return the traceback of ``exc`` without the frames that lead to the user's own code."""
    found = exc.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename.startswith(_LEADING):
        found = found.tb_next
    return found


def _said(exc: BaseException) -> str:
    """Return the traceback of ``exc`` as far as it is the user's; our own errors say the rest."""
    if not isinstance(exc, PhalanxError):
        return "".join(traceback.format_exception(type(exc), exc, _from_user_on(exc)))
    frames = traceback.extract_tb(exc.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith((*_LEADING, _TORCH))]
    return "".join(
        [
            "Traceback (most recent call last):\n",
            *traceback.format_list(users or frames),
            *traceback.format_exception_only(exc),
        ]
    )


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
    _, launcher, folder, script, *args = sys.argv
    prepare(int(launcher), folder)
    try:
        record_failures(lambda: run_script(script, args))
    except Exception as exc:
        _end_by(exc)


def call() -> None:
    """Call the function that stands on stdin, and leave what comes of it.

    The file of the descriptor on the command line gets, pickled, what was returned or how it
    failed; nothing where the function has ended the process without a failure.
    """
    _, launcher, descriptor = sys.argv
    prepare(int(launcher), "")

    def run() -> bytes:
        # From the driver of the same user, over a connection of Ray's.
        function, args = pickle.load(sys.stdin.buffer)
        return pickle.dumps(function(*args))

    with os.fdopen(int(descriptor), "wb") as outcome:
        try:
            value = record_failures(run, lambda exc: pickle.dump(_failure_note(exc), outcome))
            outcome.write(value)
        except Exception as exc:
            _end_by(exc)


def _end_by(exc: Exception) -> NoReturn:
    exc.__traceback__ = _from_user_on(exc)
    sys.excepthook(type(exc), exc, exc.__traceback__)
    sys.exit(1)
