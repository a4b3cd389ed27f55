"""The notes of ranks on their failures, and the choice of the one that a job reports."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist

from phalanx.clock import wall_clock_s
from phalanx.environment import read_rank
from phalanx.errors import PeerError

__all__ = ["ECHOES", "FailureNote", "RankFailed", "describe_failures"]

ECHOES = (PeerError, dist.DistError)
"""The errors of a rank because it lost another one."""


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


class FailureNote(NamedTuple):
    """A rank's note on how it ended; torch's agent reads the message.

    Attributes:
        exit_code: Or minus the signal that killed it.
        message: The error.
        at_s: The moment of the failure. A rank that was killed cannot note it, and others fail
            because it is gone: so it comes first.
        is_echo: Whether it failed because it lost another rank.
    """

    rank: int
    exit_code: int
    message: str = ""
    at_s: float = 0.0
    is_echo: bool = False

    @classmethod
    def of(cls, exc: BaseException) -> FailureNote:
        """Describe the failure of this process; exit code 0 means that it is none."""
        code = exc.code if isinstance(exc, SystemExit) else 1
        return cls(
            rank=read_rank(),
            exit_code=code & 0xFF if isinstance(code, int) else int(code is not None),
            message="".join(traceback.format_exception_only(exc)).rstrip(),
            at_s=wall_clock_s(),
            is_echo=isinstance(exc, ECHOES),
        )


def describe_failures(failures: Iterable[FailureNote]) -> RankFailed:
    """Make the job's error: the first rank that failed and how, the others, and its last words."""
    # The launcher ends the others with SIGTERM.
    own = [each for each in failures if each.exit_code != -signal.SIGTERM] or list(failures)
    first, *others = sorted(own, key=lambda each: (each.is_echo, each.at_s, each.rank))
    how, code = f"ended with exit code {first.exit_code}", first.exit_code
    if code < 0:
        how, code = f"was killed by {signal.Signals(-code).name}", 128 - code
    ranks = ", ".join(str(rank) for rank in sorted(each.rank for each in others))
    also = f" Rank{'s' * (len(others) > 1)} {ranks} failed as well." if others else ""
    text = f"Rank {first.rank} {how}.{also}\n{first.message}".rstrip()
    return RankFailed(text, first.rank, code or 1)
