"""Start the ranks of a job: torch's own launcher, with defaults for training on CPUs.

    phalanx launch / launch(fn, n)
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
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from phalanx.errors import ConfigError
from phalanx.ipc import RunDirectory, die_with_parent
from phalanx.launching.one_host import ONE_HOST
from phalanx.launching.rank_failures import RankFailed, RankFailure, describe_failures
from phalanx.launching.rank_start import prepare, record_failures
from phalanx.plan import check_function, read_count
from phalanx.replicas import num_cores

__all__ = ["launch", "launch_script", "signals_put_back"]

_AGENT_LOGGERS = ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api")
_MEET_S = 600  # how long hosts wait for each other
_RESTARTS = str(Path(__file__).with_name("rank_restarts.py"))


def launch(
    function: Callable[..., Any],
    n: int | None = None,
    *,
    args: Sequence[object] = (),
    max_restarts: int = 0,
) -> list[Any]:
    """Run ``function(*args)`` in ``n`` processes of this host, as ranks of one job.

    Each rank finds the usual variables (``RANK``, ``WORLD_SIZE``, …), so that
    ``torch.distributed.init_process_group("phalanx")`` works there without arguments; without a
    name it takes ``phalanx`` too where there is no CUDA device. Each has ``cores // n`` threads,
    unless ``OMP_NUM_THREADS`` says otherwise.

    Args:
        function: In a script, one that pickle takes, and the call under
            ``if __name__ == "__main__":``. One that was typed at a prompt or in a notebook is run
            in forks of this process.
        n: Number of ranks; by default one per core.
        args: Arguments of the function, which are pickled.
        max_restarts: Number of restarts of all ranks after one has failed.

    Returns:
        The results of the function, by rank.

    Raises:
        ConfigError: ``function`` cannot be called, or a number makes no sense.
        RankFailed: A rank failed; ``.rank`` names the first, its traceback is in the message.

    Blocks: Until all ranks have ended. None outlives the call.
    """
    check_function("function", function)
    ranks = num_cores() if n is None else read_count("n", n, 1, "rank")
    restarts = read_count("max_restarts", max_restarts, 0)
    main_file = getattr(sys.modules["__main__"], "__file__", "")
    typed = function.__module__ == "__main__" and not Path(main_file).is_file()
    given = (str(os.getpid()), function, tuple(args))
    method = "fork" if typed else "spawn"
    values = _run(_run_function, given, ranks, max_restarts=restarts, start_method=method)
    return [values[rank] for rank in range(ranks)]


def _run_function(launcher: str, function: Callable[..., Any], args: tuple[object, ...]) -> Any:
    die_with_parent(int(launcher))
    prepare()
    try:
        return record_failures(lambda: function(*args))
    except Exception:  # recorded above; raised on, torch would replace the record by a shorter one
        sys.exit(1)


# Any, below: options of torch's `LaunchConfig`, and what functions return.


def launch_script(
    script: Path, args: Sequence[str], ranks: int, *, rank_restarts: int = 0, **more: Any
) -> None:
    """Run a Python script in every rank of a job; output lines come with the rank before them.

    Args:
        script, args: The file, and its own arguments.
        ranks, more: As `_run` takes them.
        rank_restarts: How often each rank is restarted by itself, while the others continue: for a
            script with elastic ranks (`Ranks`).

    Raises:
        RankFailed: A rank failed, and no attempts were left.

    Blocks: Until all ranks have ended.
    """
    words = ("-u", _RESTARTS, str(rank_restarts), str(os.getpid()), str(script), *args)
    prefix = "[rank ${rank}] "
    _run(sys.executable, words, ranks, tee=Std.ALL, log_line_prefix_template=prefix, **more)


def _run(
    entrypoint: Callable[..., Any] | str,
    args: Sequence[object],
    ranks: int,
    *,
    nodes: int = 1,
    endpoint: str = "",
    tee: Std = Std.NONE,
    **more: Any,
) -> dict[int, Any]:
    """Run a function or a program in every rank; return what they return, by rank.

    Args:
        entrypoint, args: The function or program, and its arguments.
        ranks: Processes on this host.
        nodes: Hosts.
        endpoint: ``host:port`` where the hosts meet; empty for one host alone.
        tee: Which of their streams are shown.
        more: Options of torch's `LaunchConfig`.
    """
    if nodes > 1 and not endpoint:
        raise ConfigError(
            f"`endpoint` must say where {nodes} hosts meet, but is empty. Give `host:port` of one "
            "of them, the same on all."
        )
    alone = not endpoint
    try:
        with _folder() as folder, _variables(ranks, alone=alone), signals_put_back():
            config = LaunchConfig(
                min_nodes=nodes,
                max_nodes=nodes,
                nproc_per_node=ranks,
                run_id=f"phalanx-{endpoint or secrets.token_hex(4)}",
                rdzv_backend=ONE_HOST if alone else "c10d",
                rdzv_endpoint=endpoint,
                rdzv_configs={} if alone else {"join_timeout": _MEET_S, "read_timeout": _MEET_S},
                local_addr="localhost" if alone else None,
                logs_specs=DefaultLogsSpecs(log_dir=str(folder), tee=tee),
                **more,
            )
            run = elastic_launch(config, entrypoint)
            try:
                values: dict[int, Any] = run(*args)
            except ChildFailedError as exc:
                raise describe_failures(_read_failures(folder, exc.failures)) from None
            except (RendezvousTimeoutError, RendezvousConnectionError) as exc:
                why = str(exc.__cause__ or exc).splitlines()[0].rstrip(".")
                raise RankFailed(
                    f"All hosts must meet at {endpoint}, but did not: {why}. Start `phalanx "
                    "launch` on each with the same `--endpoint` and `--nnodes`, and see that the "
                    "port can be reached."
                ) from exc
            return values
    except SignalException as exc:
        ended_by = exc.sigval
    signal.raise_signal(ended_by)  # for the handlers outside of `launch`
    raise RankFailed(
        f"The ranks were ended by {ended_by.name}, which the launcher has received.",
        exit_code=128 + ended_by,
    )


def _read_failures(logs: Path, reported: Mapping[int, ProcessFailure]) -> dict[int, RankFailure]:
    """Return how this host's ranks have failed, by rank.

    torch's agent reports the ranks that had ended when it first looked. A rank that fails informs
    its peers at once but ends only after its clean-up, so the peers may end before it. The notes
    that ranks leave among torch's logs name it.
    """
    last = max(logs.glob("*/attempt_*"), key=lambda path: path.stat().st_mtime)
    notes = [json.loads(path.read_text("utf-8")) for path in last.glob("*/error.json")]
    # A script that is decorated with torch's `record` has written one of another form.
    by_rank = {note["rank"]: note for note in notes if "rank" in note}
    codes = {rank: note["exit_code"] for rank, note in by_rank.items()}
    codes |= {rank: failure.exitcode for rank, failure in reported.items()}
    return {rank: RankFailure(code, by_rank.get(rank)) for rank, code in codes.items()}


@contextmanager
def _folder() -> Iterator[Path]:
    """Make the job's folder; remove it, and what killed ranks and launchers have left."""
    name = f"launch-{secrets.token_hex(4)}"
    try:
        with RunDirectory.join(name, base=tempfile.gettempdir()) as folder:
            yield folder.path
    finally:
        RunDirectory.sweep()


@contextmanager
def _variables(ranks: int, *, alone: bool) -> Iterator[None]:
    """Set what the ranks read, unless the user has set it, and silence torch's agent meanwhile.

    It repeats, for each rank, what we say once at the end.
    """
    wanted = {"OMP_NUM_THREADS": str(max(1, num_cores() // ranks))}
    if alone:
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # no other host reaches it
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    loggers = [logging.getLogger(name) for name in _AGENT_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def signals_put_back() -> Iterator[None]:
    """Undo what a launcher does to signals: afterwards Ctrl-C is the caller's again."""
    mine = threading.current_thread() is threading.main_thread()  # else nobody can change them
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT) if mine else ()
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set by Python
                signal.signal(number, handler)
