"""A process between the launcher and one rank: it restarts the rank, and keeps the survivors.

    launcher ──> python rank_restarts.py RESTARTS LAUNCHER script.py args… ──> the rank

torch's agent ends all ranks of a host as soon as one of them fails. Elastic ranks (`Ranks()`) train
on without one that was killed, so this process reports that as a success where its rank has said
that its group is elastic, unless all ranks of the host were lost. A rank with an error is a failure
of the job.

It runs as a file and imports the standard library only: it costs a few MiB and starts at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

__all__: list[str] = []

_RANK = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "  # it ends silently until `main`
    "from phalanx.launching.rank_start import main; main()"
)
_PR_SET_PDEATHSIG = 1


def _main() -> int:
    """Run the rank until it succeeds, or no restarts are left; return its exit status."""
    restarts, _, *script = sys.argv[1:]
    signals: list[int] = []  # that end the job; the agent sends them to the rank as well
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.append(number))
    status, how = 0, ""
    for attempt in range(int(restarts) + 1):
        environment = {**os.environ, "PHALANX_RANK_RESTARTS": str(attempt)}
        words = [sys.executable, "-u", "-c", _RANK, str(os.getpid()), *script]
        with subprocess.Popen(words, env=environment) as child:
            if signals:  # which came too early for the rank
                child.terminate()
            status = child.wait()
        if status == 0 or signals:
            return status
        how = f"Rank {os.environ['RANK']} (process {child.pid}) {_how(status)}."
        if attempt < int(restarts):
            sys.stderr.write(
                f"{how} It is restarted ({attempt + 1} of {restarts}); "
                "elastic ranks (`Ranks()`) continue meanwhile.\n"
            )
    if status > 0 or not _mark_lost():
        return status
    sys.stderr.write(f"{how} The ranks that are left continue without it.\n")
    return 0


def _mark_lost() -> bool:
    """Mark our rank as lost; tell whether the group is elastic and others of the host are left."""
    # Each rank has a folder, for its error file, in the one of this attempt to run the job.
    own = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
    if not (own / "elastic").exists():  # as `elastic_exchange.py` says it
        return False
    (own / "lost").touch()
    return len(list(own.parent.glob("*/lost"))) < int(os.environ["LOCAL_WORLD_SIZE"])


def _how(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # die with the launcher
    if os.getppid() != int(sys.argv[2]):
        sys.exit(1)
    _status = _main()
    if _status < 0:  # end as the rank did: the launcher names the signal
        if -_status != signal.SIGKILL:
            signal.signal(-_status, signal.SIG_DFL)
        os.kill(os.getpid(), -_status)
    sys.exit(_status)
