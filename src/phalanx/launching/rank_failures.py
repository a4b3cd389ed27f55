"""The record of a rank's failure, and the choice of the failure that a job reports."""

from __future__ import annotations

import runpy
import signal
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from phalanx.clock import wall_clock_s
from phalanx.environment import read_rank
from phalanx.errors import PeerError, PhalanxError

__all__ = [
    "Note",
    "RankFailed",
    "RankFailure",
    "describe_failures",
    "failure_note",
    "users_traceback",
]

_LEADING = (str(Path(__file__).parent), runpy.__file__, "<string>", "<frozen runpy>")
"""Where frames lie that come before the user's own, in a rank's traceback."""
_TORCH = str(Path(torch.__file__).parent)
_LAST_WORDS_LINES = 12


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

# Any: JSON.
Note = Mapping[str, Any]


def failure_note(exc: BaseException) -> Note:
    """Return the note on a failure of this process; torch's agent reads the message."""
    code = exc.code if isinstance(exc, SystemExit) else None
    return {
        "message": _last_words(exc),
        "at_s": wall_clock_s(),
        "rank": read_rank(),
        "exit_code": code & 0xFF if isinstance(code, int) else 1,
        "is_echo": isinstance(exc, PeerError | dist.DistError),
    }


def users_traceback(exc: BaseException) -> TracebackType | None:
    """Return the traceback of ``exc`` without the frames that lead to the user's own code."""
    found = exc.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename.startswith(_LEADING):
        found = found.tb_next
    return found


def _last_words(exc: BaseException) -> str:
    """Return the traceback of ``exc`` as far as it is the user's; our own errors say the rest."""
    words = traceback.TracebackException.from_exception(exc)
    hidden: tuple[str, ...] = _LEADING
    if isinstance(exc, PhalanxError):
        hidden, words.__cause__, words.__context__ = (*_LEADING, _TORCH), None, None
    users = [frame for frame in words.stack if not frame.filename.startswith(hidden)]
    words.stack = traceback.StackSummary.from_list(users or words.stack)
    return "\n".join("".join(words.format()).rstrip().splitlines()[-_LAST_WORDS_LINES:])


# --- in the launcher ------------------------------------------------------------------------------


class RankFailure(NamedTuple):
    """The end of a rank: its exit code, or minus the signal that killed it, and its own note."""

    exit_code: int
    note: Note | None = None


def describe_failures(failures: Mapping[int, RankFailure]) -> RankFailed:
    """Make the job's error: the first rank that failed and how, the others, and its last words.

    A rank that was killed leaves no note, and others fail because it is gone: so killed ranks come
    before those that left a note, and those that lost a peer come last.
    """

    def order(rank: int) -> tuple[bool, bool, float, int]:
        note = failures[rank].note
        if note is None:
            return False, False, 0.0, rank
        return True, note["is_echo"], note["at_s"], rank

    # The launcher ends the others with SIGTERM; one with a note had failed before.
    ended = -signal.SIGTERM
    own = [rank for rank, (code, note) in failures.items() if note is not None or code != ended]
    rank = min(own or failures, key=order)
    code, note = failures[rank]
    if note is not None and code == ended:
        code = note["exit_code"]
    how = f"ended with exit code {code}"
    if code < 0:
        how, code = f"was killed by {signal.Signals(-code).name}", 128 - code
    others = [str(other) for other in sorted(own) if other != rank]
    also = f" Rank{'s' * (len(others) > 1)} {', '.join(others)} failed as well." if others else ""
    words = "" if note is None else f"\n{note['message']}"
    return RankFailed(f"Rank {rank} {how}.{also}{words}", rank, code or 1)
