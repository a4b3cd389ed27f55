"""Start the ranks of a job: torch's own launcher, with defaults for training on CPUs.

    phalanx launch / launch(fn, n)
        │  torch.distributed.launcher: agent, restarts, logs
        ├─ rank 0 ─┐
        ├─ rank 1 ─┤ env: RANK, WORLD_SIZE, MASTER_ADDR, …; OMP_NUM_THREADS = cores // ranks
        └─ rank 2 ─┘

    /tmp/phalanx-run-<uid>-launch-<id>/  the job's folder, mode 0700: logs; on one host the store

The kernel ends the ranks with the launcher. What a launcher that was killed has left (its folder,
and the ranks' in /dev/shm) is removed by the next one.

Every attempt gets a store of its own. torch's agent would lend its store to all of them, and then a
restarted rank finds the addresses of its predecessor's peers there and knocks at closed doors.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    SignalException,
    Std,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from phalanx.distributed.launch_rendezvous import ONE_HOST, SEVERAL_HOSTS
from phalanx.distributed.rank_start import prepare, record_failures
from phalanx.errors import ConfigError, PeerError
from phalanx.ipc import RunDirectory
from phalanx.plan import check_argument, check_function, read_count

__all__ = [
    "Job",
    "RankFailed",
    "available_cores",
    "describe_failures",
    "first_failure",
    "launch",
    "launch_script",
    "process_failure",
    "signals_put_back",
]

_RESTARTS = str(Path(__file__).with_name("rank_restarts.py"))
_LAST_WORDS_LINES = 12
_AFTER_WORDS = "\n\nAt:\n"  # of an error that came through C++: its way through Python follows
_MOST_RANKS = 256  # as many workers as a table takes; each imports torch
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


@dataclass(frozen=True, kw_only=True)
class Job:
    """How many ranks, where, and how often they are tried.

    Args:
        ranks: Processes on this host, at least 1 and at most 256, or one a core where it has more.
        nodes: The fewest and the most hosts.
        endpoint: ``host:port`` where the hosts meet; empty for one host alone.
        run_id: What the hosts of one job have in common; on one host alone a part of what is drawn.
        max_restarts: How often all ranks are started again after one has failed.
        rank_restarts: How often each rank is restarted by itself before that, while the others
            continue: for a script with elastic ranks (`Ranks`).
        log_dir: Where each rank's output is kept; None for nowhere.
        colour: Whether the line prefixes bear colours.
        timeout_s: How long hosts wait for each other, in seconds.
    """

    ranks: int
    nodes: tuple[int, int] = (1, 1)
    endpoint: str = ""
    run_id: str = "phalanx"
    max_restarts: int = 0
    rank_restarts: int = 0
    log_dir: Path | None = None
    colour: bool = False
    timeout_s: float = 600.0

    @property
    def is_alone(self) -> bool:
        """Whether no other host takes part."""
        return self.nodes == (1, 1) and not self.endpoint

    @property
    def num_hosts(self) -> str:
        """How many hosts take part, in words."""
        fewest, most = self.nodes
        return f"{most} hosts" if fewest == most else f"{fewest} to {most} hosts"

    def __post_init__(self) -> None:
        read_count("ranks", self.ranks, 1, "rank")
        cores = available_cores()
        most = max(_MOST_RANKS, cores)
        check_argument(
            self.ranks <= most,
            "ranks",
            f"be at most {most} on one host",
            self.ranks,
            f"Give one a core, which are {cores} here, or fewer.",
        )
        read_count("max_restarts", self.max_restarts, 0)
        read_count("rank_restarts", self.rank_restarts, 0)
        if not self.timeout_s > 0:
            raise ConfigError(f"`timeout_s` must be above 0 seconds, but is {self.timeout_s!r}.")
        fewest, most = self.nodes
        if not 1 <= fewest <= most:
            raise ConfigError(
                f"`nodes` must be at least 1 host, the fewest before the most, but is {self.nodes}."
            )
        if most > 1 and not self.endpoint:
            raise ConfigError(
                f"`endpoint` must say where {most} hosts meet, but is empty. Give `host:port` of "
                "one of them, the same on all."
            )


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


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
        function: In a script, importable, and the call under ``if __name__ == "__main__":``. One
            that was typed at a prompt or in a notebook is run in forks of this process.
        n: How many; by default one per core.
        args: Its arguments, which are pickled.
        max_restarts: How often all are started again after one has failed.

    Returns:
        What each rank returned, by rank.

    Raises:
        ConfigError: ``function`` cannot be called or imported, or a number makes no sense.
        RankFailed: A rank failed; ``.rank`` names the first, its traceback is in the message.

    Blocks: Until all ranks have ended. None outlives the call.
    """
    check_function("function", function)
    job = Job(ranks=available_cores() if n is None else n, max_restarts=max_restarts)
    main_file = getattr(sys.modules["__main__"], "__file__", "")
    typed = function.__module__ == "__main__" and not Path(main_file).is_file()
    name = getattr(function, "__qualname__", "")
    if not typed and "<" in name:
        raise ConfigError(
            f"`function` must be importable from a module, but is {name!r}. Define it with `def`, "
            "outside of any function."
        )
    how = {"start_method": "fork" if typed else "spawn"}
    values = _run(job, how, _run_function, (function, tuple(args)))
    return [values[rank] for rank in range(job.ranks)]


def _run_function(
    launcher: str, folder: str, function: Callable[..., Any], args: tuple[object, ...]
) -> Any:
    prepare(int(launcher), folder)
    try:
        return record_failures(lambda: function(*args))
    except Exception:  # recorded above; raised on, torch would replace the record by a shorter one
        sys.exit(1)


def launch_script(script: Path, args: Sequence[str], job: Job) -> None:
    """Run a Python script in every rank of ``job``; output lines come with the rank before them.

    Raises:
        ConfigError: There is no such script.
        RankFailed: A rank failed, and no attempts were left.

    Blocks: Until all ranks have ended.
    """
    if not script.is_file():
        raise ConfigError(f"`script` must be a Python file, but there is no file {str(script)!r}.")
    prefix = "\x1b[9${local_rank}m[rank ${rank}]\x1b[0m " if job.colour else "[rank ${rank}] "
    how = {"tee": Std.ALL, "log_line_prefix_template": prefix}
    words = ("-u", _RESTARTS, str(job.rank_restarts))
    _run(job, how, sys.executable, (str(script), *args), words)


# Any: what functions return.
def _run(
    job: Job,
    how: Mapping[str, Any],
    entrypoint: Callable[..., Any] | str,
    args: Sequence[object],
    words: Sequence[str] = (),
) -> dict[int, Any]:
    """Run ``entrypoint(*words, launcher, folder, *args)`` in every rank.

    Blocks: Until all ranks have ended. A signal that ends the job is then raised again, for
    the handlers outside of `launch`.
    """
    try:
        with _folder() as folder, _environment(job):
            notes = _FailureNotes(job.log_dir or folder / "logs", how.get("tee", Std.NONE))
            config = _config(job, notes, how)
            store = str(folder) if job.is_alone else ""
            launcher = str(os.getpid())
            try:
                values: dict[int, Any] = elastic_launch(config, entrypoint)(
                    *words, launcher, store, *args
                )
            except ChildFailedError as exc:
                # Read while the folder stands.
                raise describe_failures({**notes.read(), **exc.failures}) from None
            except RendezvousTimeoutError:
                raise RankFailed(
                    f"{job.num_hosts} must come to {job.endpoint} within "
                    f"{job.timeout_s:g} s, but did not. Start `phalanx launch` on each with the "
                    "same `--endpoint`, `--nnodes` and `--run-id`, and see that this port of that "
                    "host can be reached from the others."
                ) from None
            except RendezvousConnectionError as exc:
                raise RankFailed(
                    f"The host at {job.endpoint}, where the others meet, must outlive the job, but "
                    f"cannot be reached ({exc}). See whether it runs, and start all hosts again."
                ) from exc
            return values
    except SignalException as exc:
        ended_by = exc.sigval
    signal.raise_signal(ended_by)
    raise RankFailed(
        f"The ranks were ended by {ended_by.name}, which the launcher has received.",
        exit_code=128 + ended_by,
    )


class _FailureNotes(DefaultLogsSpecs):
    """Where the ranks of the last attempt write down their failures.

    torch's agent reports the ranks that had ended when it first looked. A rank that fails informs
    its peers at once but ends only after its clean-up, so the peers may end before it.
    """

    def __init__(self, folder: Path, tee: Std) -> None:
        super().__init__(log_dir=str(folder), tee=tee)
        self._files: dict[int, tuple[int, str]] = {}  # by rank: local rank, file

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose the files of an attempt that begins."""
        files = super().reify(envs)
        self._files = {
            int(envs[local].get("RANK", local)): (local, file)
            for local, file in files.error_files.items()
        }
        return files

    def read(self) -> dict[int, ProcessFailure]:
        """Return what this host's ranks have written, by rank."""
        failures = {}
        for rank, (local, file) in self._files.items():
            if Path(file).is_file():
                note = json.loads(Path(file).read_text(encoding="utf-8"))["message"]["extraInfo"]
                failures[rank] = ProcessFailure(local, note["pid"], note["exit_code"], file)
        return failures


def _config(job: Job, logs: DefaultLogsSpecs, how: Mapping[str, Any]) -> LaunchConfig:
    alone = job.is_alone
    more = {name: value for name, value in how.items() if name != "tee"}
    return LaunchConfig(
        min_nodes=job.nodes[0],
        max_nodes=job.nodes[1],
        nproc_per_node=job.ranks,
        run_id=f"{job.run_id}-{secrets.token_hex(4)}" if alone else job.run_id,
        rdzv_backend=ONE_HOST if alone else SEVERAL_HOSTS,
        rdzv_endpoint=job.endpoint,
        rdzv_configs={} if alone else {"join_timeout": max(1, round(job.timeout_s))},
        local_addr="localhost" if alone else None,
        max_restarts=job.max_restarts,
        logs_specs=logs,
        **more,
    )


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
def _environment(job: Job) -> Iterator[None]:
    """Set what the launcher and the ranks read, for as long as the job runs."""
    threads = str(max(1, available_cores() // job.ranks))
    wanted = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a store per attempt, see above
    }
    before = {name: os.environ.get(name) for name in wanted}
    agent = logging.getLogger("torch.distributed.elastic")
    with ExitStack() as stack:
        # It repeats, before the end and for each rank, what we say once at the end.
        stack.callback(agent.setLevel, agent.level)
        agent.setLevel(logging.CRITICAL)
        stack.enter_context(signals_put_back())
        os.environ.update(wanted)
        stack.callback(_put_back, before)
        yield


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


def _put_back(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# --- the first failure-----------------------------------------------------------------------------


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
