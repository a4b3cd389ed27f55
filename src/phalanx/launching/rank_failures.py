"""How a rank writes down its failure, and which of several failures a job reports.

The note has the form that torch's launcher reads, with more in it:

    {"message": {"message": "ValueError: …",
                 "extraInfo": {"py_callstack": …, "at_s": …, "exit_code": …, "echo": …}}}
"""

from __future__ import annotations

import os
import runpy
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from phalanx.clock import wall_clock_s
from phalanx.errors import PeerError, PhalanxError

__all__ = [
    "RankFailed",
    "describe_failures",
    "failure_note",
    "first_failure",
    "process_failure",
    "users_traceback",
]

_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_LEADING = (_OURS, runpy.__file__, "<string>", "<frozen runpy>")
"""Where frames lie that come before the user's own, in a rank's traceback."""
_LAST_WORDS_LINES = 12
_AFTER_WORDS = "\n\nAt:\n"  # of an error that came through C++: its way through Python follows
_SIGTERM = 15  # what the launcher ends the others with


class RankFailed(PeerError):
    """A rank of a job ended with an error or was killed, and no attempts were left.

    Args:
        message: Which rank, how, and its last words.
        rank: The first that failed.
        exit_code: The job's: the rank's own, or 128 + the signal that killed it.
    """

    def __init__(self, message: str, rank: int | None = None, exit_code: int = 1) -> None:
        super().__init__(message, rank)
        self.exit_code = exit_code


# --- in the rank ----------------------------------------------------------------------------------


def failure_note(exc: BaseException) -> dict[str, object]:
    """Return the note on a failure of this process."""
    at_s = wall_clock_s()
    code = exc.code if isinstance(exc, SystemExit) else None
    return {
        "message": {
            "message": f"{type(exc).__name__}: {exc}",
            "extraInfo": {
                "py_callstack": _last_words(exc),
                "timestamp": str(int(at_s)),
                "at_s": at_s,
                "pid": os.getpid(),
                "exit_code": code & 0xFF if isinstance(code, int) else 1,
                "echo": isinstance(exc, PeerError | dist.DistError),
            },
        }
    }


def users_traceback(exc: BaseException) -> TracebackType | None:
    """Return the traceback of ``exc`` without the frames that lead to the user's own code."""
    found = exc.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename.startswith(_LEADING):
        found = found.tb_next
    return found


def _last_words(exc: BaseException) -> str:
    """Return the traceback of ``exc`` as far as it is the user's; our own errors say the rest."""
    if not isinstance(exc, PhalanxError):
        return "".join(traceback.format_exception(type(exc), exc, users_traceback(exc)))
    frames = traceback.extract_tb(exc.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith((*_LEADING, _TORCH))]
    return "".join(
        [
            "Traceback (most recent call last):\n",
            *traceback.format_list(users or frames),
            *traceback.format_exception_only(exc),
        ]
    )


# --- in the launcher ------------------------------------------------------------------------------


def first_failure(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the rank whose failure came first and was nobody else's echo.

    A rank that was killed leaves no note, and others fail because it is gone: so killed ranks come
    before those that wrote down when they failed, and those that lost a peer come last.
    """

    def order(rank: int) -> tuple[int, float, int]:
        failure = failures[rank]
        told = _told(failure)
        if told is None:
            killed_by_launcher = failure.exitcode == -_SIGTERM
            return (3 if killed_by_launcher else 0), 0.0, rank
        return (2 if told.get("echo") else 1), float(told.get("at_s", 0.0)), rank

    return min(failures, key=order)


# Any: JSON of a rank's own.
def _told(failure: ProcessFailure) -> dict[str, Any] | None:
    message = failure.error_file_data.get("message")
    return message.get("extraInfo") if isinstance(message, dict) else None


# Any: JSON of a rank's own.
def process_failure(
    local_rank: int, pid: int, exit_code: int, note: dict[str, Any] | None
) -> ProcessFailure:
    """Return the failure of a rank that torch's launcher has not started, as that describes one."""
    failure = ProcessFailure(local_rank, pid, exit_code, "")
    if note is not None:
        failure.error_file_data = note
    return failure


def describe_failures(failures: Mapping[int, ProcessFailure]) -> RankFailed:
    """Make the job's error: the first rank that failed and how, the others, and its last words."""
    rank = first_failure(failures)
    failure, told = failures[rank], _told(failures[rank])
    code = failure.exitcode
    if told is not None and code == -_SIGTERM:
        # Its script had ended already; the launcher only met the process on its way out.
        code = int(told.get("exit_code", 1))
    if code < 0:
        how, code = f"was killed by {failure.signal_name()}", 128 - code
    else:
        how = f"ended with exit code {code}"
    others = [
        str(other)
        for other, its in sorted(failures.items())
        if other != rank and (its.exitcode != -_SIGTERM or _told(its) is not None)
    ]
    also = f" Rank{'s' * (len(others) > 1)} {', '.join(others)} failed as well." if others else ""
    text = f"Rank {rank} (process {failure.pid}) {how}.{also}"
    if told is not None and told.get("py_callstack"):
        words = str(told["py_callstack"]).partition(_AFTER_WORDS)[0]
        lines = words.rstrip().splitlines()
        text += "\n" + "\n".join(lines[-_LAST_WORDS_LINES:])
    return RankFailed(text, rank, code or 1)
