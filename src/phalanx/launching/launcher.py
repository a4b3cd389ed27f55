"""Start a script as the ranks of a job: torch's own launcher, with defaults for training on CPUs.

    phalanx launch
        │  torch.distributed.launcher: agent, store, restarts, logs
        ├─ rank 0 ─┐
        ├─ rank 1 ─┤ env: RANK, WORLD_SIZE, MASTER_ADDR, …; OMP_NUM_THREADS = cores // ranks
        └─ rank 2 ─┘

    /tmp/phalanx-run-<uid>-launch-<id>/  the job's folder, mode 0700: logs and notes on failures

The agent keeps the store where ranks meet, so it outlives them. The kernel ends the ranks with the
launcher. What a launcher that was killed has left (its folder, and the ranks' in /dev/shm) is
removed by the next one.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from phalanx.errors import ConfigError
from phalanx.ipc import RunDirectory
from phalanx.launching.one_host import ONE_HOST
from phalanx.launching.rank_failures import RankFailed, RankFailure, describe_failures
from phalanx.replicas import num_cores

__all__ = ["launch_script"]

_AGENT_LOGGERS = ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api")
_MEET_S = 600  # how long hosts wait for each other
_RESTARTS = str(Path(__file__).with_name("rank_restarts.py"))


def launch_script(
    script: Path,
    args: Sequence[str],
    ranks: int,
    *,
    nodes: int = 1,
    endpoint: str = "",
    max_restarts: int = 0,
    rank_restarts: int = 0,
) -> None:
    """Run a Python script in every rank of a job; output lines come with the rank before them.

    It changes variables, loggers and signals of this process, which is the launcher.

    Args:
        script, args: The file, and its own arguments.
        ranks: Processes on this host.
        nodes: Hosts.
        endpoint: ``host:port`` where the hosts meet; empty for one host alone.
        max_restarts: How often all ranks are started again after one has failed.
        rank_restarts: How often each rank is restarted by itself before that, while the others
            continue: for a script with elastic ranks (`Ranks`).

    Raises:
        ConfigError: There is no endpoint for several hosts.
        RankFailed: A rank failed, and no attempts were left.

    Blocks: Until all ranks have ended.
    """
    alone = not endpoint
    if nodes > 1 and alone:
        raise ConfigError(
            f"`endpoint` must say where {nodes} hosts meet, but is empty. Give `host:port` of one "
            "of them, the same on all."
        )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // ranks)))
    if alone:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no other host reaches it
    for name in _AGENT_LOGGERS:  # they repeat, for each rank, what we say once at the end
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with _folder() as folder:
            config = LaunchConfig(
                min_nodes=nodes,
                max_nodes=nodes,
                nproc_per_node=ranks,
                run_id=f"phalanx-{endpoint or secrets.token_hex(4)}",
                rdzv_backend=ONE_HOST if alone else "c10d",
                rdzv_endpoint=endpoint,
                rdzv_configs={} if alone else {"join_timeout": _MEET_S, "read_timeout": _MEET_S},
                local_addr="localhost" if alone else None,
                max_restarts=max_restarts,
                logs_specs=DefaultLogsSpecs(log_dir=str(folder), tee=Std.ALL),
                log_line_prefix_template="[rank ${rank}] ",
            )
            run = elastic_launch(config, sys.executable)
            try:
                run("-u", _RESTARTS, str(rank_restarts), str(os.getpid()), str(script), *args)
            except ChildFailedError as exc:
                raise describe_failures(_read_failures(folder, exc.failures)) from None
            except (RendezvousTimeoutError, RendezvousConnectionError) as exc:
                why = str(exc.__cause__ or exc).splitlines()[0].rstrip(".")
                raise RankFailed(
                    f"All hosts must meet at {endpoint}, but did not: {why}. Start `phalanx "
                    "launch` on each with the same `--endpoint` and `--nnodes`, and see that the "
                    "port can be reached."
                ) from exc
    except SignalException as exc:
        ended_by = exc.sigval
        interrupts = ended_by == signal.SIGINT
        signal.signal(ended_by, signal.default_int_handler if interrupts else signal.SIG_DFL)
        signal.raise_signal(ended_by)


def _read_failures(logs: Path, reported: Mapping[int, ProcessFailure]) -> list[RankFailure]:
    """Return how this host's ranks have failed.

    torch's agent reports the ranks that had ended when it first looked. A rank that fails informs
    its peers at once but ends only after its clean-up, so the peers may end before it. The notes
    that ranks leave among torch's logs name it.
    """
    last = max(logs.glob("*/attempt_*"), key=lambda path: path.stat().st_mtime)
    notes = [json.loads(path.read_text("utf-8")) for path in last.glob("*/error.json")]
    # A script that is decorated with torch's `record` has written one of another form.
    noted = {note["rank"]: RankFailure(**note) for note in notes if "rank" in note}
    silent = {rank: RankFailure(rank, each.exitcode) for rank, each in reported.items()}
    return [*(silent | noted).values()]


@contextmanager
def _folder() -> Iterator[Path]:
    """Make the job's folder; remove it, and what killed ranks and launchers have left."""
    name = f"launch-{secrets.token_hex(4)}"
    try:
        with RunDirectory.join(name, base=tempfile.gettempdir()) as folder:
            yield folder.path
    finally:
        RunDirectory.sweep()
