"""A process between the launcher and one rank: it restarts the rank, and keeps the survivors.

    launcher ──> python rank_restarts.py RESTARTS LAUNCHER script.py args… ──> the rank

torch's agent ends all ranks of a host as soon as one of them fails. Elastic ranks (`Ranks()`) train
on without the one that was lost, so this process keeps a failure to itself until all ranks of the
host have ended, if its rank has said that its group is elastic. A rank that was killed while
another one finished the training is then no failure of the job. A rank with an error is.

It runs as a file and imports the standard library only: it costs a few MiB and starts at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

__all__: list[str] = []

_POLL_S = 0.2
_RANK = ("-u", "-c", "from phalanx.launching.rank_start import main; main()")


class _Ended(BaseException):
    """A signal has ended the job."""


def _main() -> int:
    """Run the rank until it succeeds, or no restarts are left; return its exit status."""
    restarts, launcher, *script = sys.argv[1:]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)
    status = 0
    for attempt in range(int(restarts) + 1):
        environment = {**os.environ, "PHALANX_RANK_RESTARTS": str(attempt)}
        words = [sys.executable, *_RANK, str(os.getpid()), *script]
        with subprocess.Popen(words, env=environment) as child:
            try:
                status = _await_rank(child, int(launcher))
            except _Ended as ended:
                child.send_signal(ended.args[0])
                return child.wait()
        if status == 0:
            break
        how = f"Rank {os.environ['RANK']} (process {child.pid}) {_how(status)}."
        if attempt < int(restarts):
            sys.stderr.write(
                f"{how} It is restarted ({attempt + 1} of {restarts}); "
                "elastic ranks (`Ranks()`) continue meanwhile.\n"
            )
        elif _is_elastic():
            sys.stderr.write(f"{how} The ranks that are left continue without it.\n")
    return _await_others(status, int(launcher))


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    raise _Ended(number)


def _await_rank(child: subprocess.Popen[bytes], launcher: int) -> int:
    """Wait for the rank; end with the launcher, whose signal may never come."""
    while True:
        try:
            return child.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            if os.getppid() != launcher:
                child.kill()


def _await_others(status: int, launcher: int) -> int:
    """Return the status for the launcher, after the host's other ranks where this one was lost."""
    # Each rank has a folder, for its error file, in the one of this attempt to run the job. The
    # status is part of a file's name, so that no reader ever meets half of it.
    ends = _own_folder().parent
    (ends / f"ended-{os.environ['RANK']}-{'failure' if status else 'success'}").touch()
    if status == 0 or not _is_elastic():
        return status
    try:
        while len(list(ends.glob("ended-*"))) < int(os.environ["LOCAL_WORLD_SIZE"]):
            if os.getppid() != launcher:
                return status
            time.sleep(_POLL_S)
    except _Ended:
        return status
    is_made_good = status < 0 and any(ends.glob("ended-*-success"))
    return 0 if is_made_good else status


def _own_folder() -> Path:
    return Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent


def _is_elastic() -> bool:
    """Tell whether the rank has said that its group is elastic (`elastic_exchange.py`)."""
    return (_own_folder() / "elastic").exists()


def _how(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"


if __name__ == "__main__":
    _status = _main()
    if _status < 0:  # end as the rank did: the launcher names the signal
        if -_status != signal.SIGKILL:
            signal.signal(-_status, signal.SIG_DFL)
        os.kill(os.getpid(), -_status)
    sys.exit(_status)
