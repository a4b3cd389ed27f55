"""Start one rank again when it fails, while the others go on: a process between launcher and rank.

    launcher ──> python rank_restarts.py RESTARTS LAUNCHER FOLDER script.py args… ──> the rank

It runs as a file and imports the standard library only: it costs a few MiB and starts at once. Of
several hosts' jobs the one above rank 0 also keeps the store, which then outlives that rank; for
this it needs torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

__all__: list[str] = []

_LOOK_S = 0.2
_RANK = ("-u", "-c", "from phalanx.distributed.rank_start import main; main()")


class _Ended(BaseException):
    """A signal has ended the job."""


def _main() -> int:
    """Run the rank until it succeeds, or no restarts are left; return its exit status."""
    restarts, launcher, folder, *script = sys.argv[1:]
    store = None if folder else _keep_store()

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        raise _Ended(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    status = 0
    for attempt in range(int(restarts) + 1):
        environment = {**os.environ, "PHALANX_RANK_RESTARTS": str(attempt)}
        words = [sys.executable, *_RANK, str(os.getpid()), folder, *script]
        with subprocess.Popen(words, env=environment) as child:
            try:
                status = _await(child, int(launcher))
            except _Ended as ended:
                child.send_signal(ended.args[0])
                return child.wait()
        if status == 0 or attempt == int(restarts):
            break
        sys.stderr.write(
            f"Rank {os.environ['RANK']} (process {child.pid}) {_how(status)}. It is started again "
            f"({attempt + 1} of {restarts}); ranks that survive its loss go on (`Ranks()`).\n"
        )
    del store
    return status


def _await(child: subprocess.Popen[bytes], launcher: int) -> int:
    """Wait for the rank; end with the launcher, whose signal may never come."""
    while True:
        try:
            return child.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            if os.getppid() != launcher:
                child.kill()


def _keep_store() -> object:
    """Keep the job's store, as torchrun's agent does, if this is above rank 0."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if os.environ["RANK"] != "0":
        return None
    from torch.distributed import TCPStore  # late: one of the job's processes needs it

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, None, is_master=True, wait_for_workers=False, multi_tenant=True)


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
