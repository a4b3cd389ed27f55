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
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from phalanx.errors import ConfigError
from phalanx.ipc import RunDirectory
from phalanx.launching.rank_failures import FailureNote, RankFailed, describe_failures
from phalanx.replicas import num_cores

__all__ = ["launch_script"]

_AGENT_LOGGERS = ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api")
_LOOPBACK = "127.0.0.1"
_MEET_S = 600  # how long hosts wait for each other
_ONE_HOST = "phalanx-one-host"
_RANK_RESTARTS = str(Path(__file__).with_name("rank_restarts.py"))


class _OneHost(StaticTCPRendezvous):
    """A rendezvous of one launcher: each attempt gets a store, at the loopback address only.

    torch's own opens its store at all addresses of the host, and lends one to all attempts, where
    the ranks of the next one find the addresses of their predecessors.
    """

    def get_backend(self) -> str:
        return _ONE_HOST

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((_LOOPBACK, 0))
        port, fd = listener.getsockname()[1], listener.detach()
        self._store = TCPStore(
            _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd
        )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_LOOPBACK, port))


rendezvous_handler_registry.register(
    _ONE_HOST, lambda parameters: _OneHost(_LOOPBACK, 0, 0, 1, parameters.run_id, 0)
)


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
        name = f"launch-{secrets.token_hex(4)}"
        with RunDirectory.join(name, base=tempfile.gettempdir()) as run_directory:
            config = LaunchConfig(
                min_nodes=nodes,
                max_nodes=nodes,
                nproc_per_node=ranks,
                run_id=f"phalanx-{endpoint or name}",
                rdzv_backend=_ONE_HOST if alone else "c10d",
                rdzv_endpoint=endpoint,
                rdzv_configs={"join_timeout": _MEET_S, "read_timeout": _MEET_S},
                local_addr="localhost" if alone else None,
                max_restarts=max_restarts,
                logs_specs=DefaultLogsSpecs(log_dir=str(run_directory.path), tee=Std.ALL),
                log_line_prefix_template="[rank ${rank}] ",
            )
            if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup, which torch undoes
                config.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"  # torch 2.8 does not read it
            run = elastic_launch(config, sys.executable)
            try:
                run("-u", _RANK_RESTARTS, str(rank_restarts), str(os.getpid()), str(script), *args)
            except ChildFailedError as exc:
                raise describe_failures(_read_failures(run_directory.path, exc.failures)) from None
            except (RendezvousTimeoutError, RendezvousConnectionError) as exc:
                why = str(exc.__cause__ or exc).splitlines()[0].rstrip(".")
                raise RankFailed(
                    f"All hosts must meet at {endpoint}, but did not: {why}. Start `phalanx "
                    "launch` on each with the same `--endpoint` and `--nnodes`, and see that the "
                    "port can be reached."
                ) from exc
            finally:
                RunDirectory.sweep()  # what killed ranks have left
    except SignalException as exc:
        if exc.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        signal.signal(exc.sigval, signal.SIG_DFL)
        signal.raise_signal(exc.sigval)


def _read_failures(logs: Path, reported: Mapping[int, ProcessFailure]) -> list[FailureNote]:
    """Return how this host's ranks have failed.

    torch's agent reports the ranks that had ended when it first looked. A rank that fails informs
    its peers at once but ends only after its clean-up, so the peers may end before it. The notes
    that ranks leave among torch's logs name it.
    """
    last = max(logs.glob("*/attempt_*"), key=lambda path: path.stat().st_mtime)
    notes = [json.loads(path.read_text("utf-8")) for path in last.glob("*/error.json")]
    # A script that is decorated with torch's `record` has written one of another form.
    noted = {note["rank"]: FailureNote(**note) for note in notes if "rank" in note}
    silent = {rank: FailureNote(rank, each.exitcode) for rank, each in reported.items()}
    return [*(silent | noted).values()]
