"""Time contestants beside each other: each in processes of its own, and only one of them at work.

A machine is never equally fast for two minutes on end, so contestants that are measured one after
the other are measured on different machines. Here all are set up first; then the controller goes
round them many times, and each makes a few steps per round:

    controller ──"5\\n"──> contestant 1    (all others are stopped)
               <──times──
               ──"5\\n"──> contestant 2
               ...
    next round, in another order

Whose turn it is not is stopped by SIGSTOP: waiting in a read is not enough where a library has
threads that look for messages without a pause, as torch RPC has. Three such processes took one and
a half of two cores from whoever was being timed.

The first steps of a turn find the caches full of somebody else's data, and the cores slow after
their rest, and are dropped. The contestants of a round come in an order drawn anew each time, so
that none always follows the same neighbour.

What travels is one line each way: a number of steps down a child's stdin, the seconds of each as a
JSON list up its stdout (an empty one as soon as it is ready). A child whose stdin ends is finished,
and the kernel kills one whose controller has died: it may be stopped.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

import phalanx
from phalanx.clock import now_s
from phalanx.errors import PeerError, PeerLost, PeerTimeout, UnsupportedError
from phalanx.ipc import die_with_parent

__all__ = [
    "Arena",
    "Entrant",
    "Outcome",
    "Pace",
    "attend",
    "child_environment",
    "compete",
    "serve",
]

_GRACE_S = 3.0  # for a child to end by itself when its stdin has ended
_LAST_WORDS_BYTES = 4000
_MOST_DROPPED = 100  # of steps that take microseconds
# A contestant sets its own numbers of threads or is measured with torch's, never with the caller's.
_ENVIRONMENT_LEFT_OUT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

Step = Callable[[], object]
Turn = Callable[[int], list[float]]
"""What a process does with the number that it is told: as a rule so many steps."""


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A contestant as the arena sees it.

    Args:
        commands: One command line per process; the first process is timed.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How many steps are made, and how many of them count.

    Args:
        rounds: Turns of each contestant.
        kept: Steps per turn that count.
        dropped: Steps at the beginning of each turn that do not, at least.
        settle_s: Seconds of steps at the beginning of each turn that do not count: a core that had
            nothing to do takes some 100 ms until it is as fast as it stays (decision 0006).
        warmup: Steps before the first round.
        patience_s: How long a contestant may take to be ready, and for each turn.
    """

    rounds: int = 10
    kept: int = 3
    dropped: int = 2
    settle_s: float = 0.15
    warmup: int = 4
    patience_s: float = 180.0

    @classmethod
    def for_steps(cls, num_steps: int) -> Pace:
        """Return the pace that keeps at least ``num_steps`` steps of each contestant."""
        return cls(rounds=-(-num_steps // cls.kept))

    def num_dropped(self, warm: Sequence[float]) -> int:
        """Return how many steps of a turn do not count, for who has warmed up in these times."""
        step_s = statistics.median(warm) if warm else 0.0
        settling = math.ceil(self.settle_s / step_s) if step_s > 0.0 else 0
        return max(self.dropped, min(settling, _MOST_DROPPED))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came out.

    Args:
        seconds: Of each kept step, by contestant and round.
        failures: Why contestants fell out.
    """

    seconds: Mapping[str, list[list[float]]]
    failures: Mapping[str, str]


def compete(
    entrants: Iterable[Entrant], pace: Pace, on_turn: Callable[[str, str], None] = lambda *_: None
) -> Outcome:
    """Run ``entrants`` against each other and return their times.

    A contestant that dies or falls silent is out, with its own last words in ``failures``; the
    others go on.

    Args:
        entrants: Who runs.
        pace: How many steps.
        on_turn: Told ``(contestant, what it does)`` before each of the turns: one to set up, one to
            warm up, then one per round.

    Blocks: Until all turns are done. No child outlives the call.
    """
    entrants = list(entrants)
    seconds: dict[str, list[list[float]]] = {}
    failures: dict[str, str] = {}

    def turn(name: str, doing: str, num_steps: int | None) -> list[float]:
        on_turn(name, doing)
        if name in failures:
            return []
        try:
            return arena.greet(name) if num_steps is None else arena.run(name, num_steps)
        except PeerError as exc:
            failures[name] = str(exc)
            arena.dismiss(name)
            return []

    names = [entrant.name for entrant in entrants]
    with Arena(entrants, patience_s=pace.patience_s) as arena:
        for name in names:
            turn(name, "setting up", None)
        dropped = {name: pace.num_dropped(turn(name, "warming up", pace.warmup)) for name in names}
        for number in range(pace.rounds):
            for name in random.Random(number).sample(names, len(names)):
                doing = f"round {number + 1} of {pace.rounds}"
                times = turn(name, doing, dropped[name] + pace.kept)
                seconds.setdefault(name, []).append(times[dropped[name] :])
    finished = {name: seconds[name] for name in names if name not in failures}
    return Outcome(seconds=finished, failures=failures)


class Arena:
    """Own the contestants' processes: start them, let one at a time run, end them all.

    Example:
        with Arena(entrants) as arena:
            for entrant in entrants:
                arena.greet(entrant.name)
            times = arena.run("ddp", 5)
    """

    def __init__(self, entrants: Iterable[Entrant], *, patience_s: float = 180.0) -> None:
        self._entrants = list(entrants)
        self._patience_s = patience_s
        self._children: dict[str, list[_Child]] = {}

    def __enter__(self) -> Arena:
        try:
            for entrant in self._entrants:
                children = self._children.setdefault(entrant.name, [])
                for rank, command in enumerate(entrant.commands):
                    children.append(_Child(rank, command))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        children = [child for group in self._children.values() for child in group]
        return [child.process.pid for child in children if child.process.poll() is None]

    def greet(self, name: str) -> list[float]:
        """Wait until contestant ``name`` is ready, and stop it; raises like `run`."""
        times = self._times(name)
        self._signal(name, signal.SIGSTOP)
        return times

    def run(self, name: str, num_steps: int) -> list[float]:
        """Let contestant ``name`` make steps; return the seconds of each.

        Raises:
            PeerLost: One of its processes ended; the message holds what it said last.
            PeerTimeout: It did not answer in time.

        Blocks: Until all its processes have answered, so that none is at work in the next turn.
        """
        self._signal(name, signal.SIGCONT)
        for child in self._children[name]:
            child.send(num_steps)
        times = self._times(name)
        self._signal(name, signal.SIGSTOP)
        return times

    def _signal(self, name: str, number: int) -> None:
        for child in self._children[name]:
            child.process.send_signal(number)

    def dismiss(self, name: str) -> None:
        """End contestant ``name``."""
        _end(self._children.pop(name), grace_s=0.0)

    def close(self) -> None:
        """End all contestants; may be called again."""
        groups = list(self._children.values())
        self._children.clear()
        _end([child for group in groups for child in group], grace_s=_GRACE_S)

    def _times(self, name: str) -> list[float]:
        """Hear one answer from each process of ``name``; return the first one's.

        All are listened to at once: when one dies, another usually fails for want of it a moment
        later, and whoever is heard first is the cause.
        """
        children = self._children[name]
        deadline_s = now_s() + self._patience_s
        with selectors.DefaultSelector() as selector:
            for child in children:
                selector.register(child.answers, selectors.EVENT_READ, child)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline_s - now_s()))
                if not ready:
                    late = [key.data for key in selector.get_map().values()]
                    raise PeerTimeout(
                        f"Contestant `{name}` must answer within {self._patience_s:g} s, but "
                        f"process {late[0].rank} of {len(children)} did not.{_last_words(late)}",
                        rank=late[0].rank,
                    )
                for key, _ in ready:
                    child = key.data
                    if not child.listen():
                        echoes = [other for other in children if other is not child]
                        raise PeerLost(
                            f"Contestant `{name}` must answer with its times, but process "
                            f"{child.rank} of {len(children)} ended ({child.status()})."
                            f"{_last_words([child, *echoes])}",
                            rank=child.rank,
                        )
                    if child.has_answer():
                        selector.unregister(child.answers)
        times, *_ = [child.take_answer() for child in children]
        return times


@dataclass
class _Child:
    """One process of a contestant, its two pipes, and the file that takes its stderr."""

    rank: int
    command: tuple[str, ...]
    process: subprocess.Popen[bytes] = field(init=False)
    errors: IO[bytes] = field(init=False)
    heard: bytes = b""

    def __post_init__(self) -> None:
        # A file, not a pipe: nobody has to empty it while the child is being timed.
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed in `_end`
        try:
            # A session of its own: Ctrl-C reaches the controller alone, which ends its children.
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                bufsize=0,
                start_new_session=True,
                env=child_environment(),
            )
        except BaseException:
            self.errors.close()
            raise

    @property
    def answers(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def send(self, num_steps: int) -> None:
        assert self.process.stdin is not None
        # If it has ended, whoever reads its answer finds out, and why.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{num_steps}\n".encode())

    def listen(self) -> bool:
        """Take what has come; return False if nothing will come any more."""
        piece = os.read(self.answers.fileno(), 1 << 16)
        self.heard += piece
        return bool(piece)

    def has_answer(self) -> bool:
        return b"\n" in self.heard

    def take_answer(self) -> list[float]:
        line, self.heard = self.heard.split(b"\n", 1)
        return [float(second) for second in json.loads(line)]

    def status(self) -> str:
        """Say how it ended."""
        try:
            code = self.process.wait(_GRACE_S)  # its pipe is closed, so it is about to end
        except subprocess.TimeoutExpired:
            return "its stdout is closed"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def last_words(self) -> str:
        self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, self.errors.tell() - _LAST_WORDS_BYTES))
        return self.errors.read().decode(errors="replace").strip()


def child_environment() -> dict[str, str]:
    """Return the environment of a contestant's process, which finds these very packages."""
    environment = {k: v for k, v in os.environ.items() if k not in _ENVIRONMENT_LEFT_OUT}
    sources = [str(Path(package).parents[1]) for package in (__file__, phalanx.__file__)]
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [*sources, environment.get("PYTHONPATH")])
    )
    return environment


def _last_words(children: Iterable[_Child]) -> str:
    said = [(child, child.last_words()) for child in children]
    return "".join(f"\nProcess {child.rank} said last:\n{words}" for child, words in said if words)


def _end(children: list[_Child], *, grace_s: float) -> None:
    """End ``children``: by the end of their input, and after ``grace_s`` by force."""
    try:
        for child in children:
            assert child.process.stdin is not None
            child.process.stdin.close()
            child.process.send_signal(signal.SIGCONT)
        deadline_s = now_s() + grace_s
        for child in children:
            child.process.wait(max(0.0, deadline_s - now_s()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for child in children:
            if child.process.poll() is None:
                child.process.kill()
        for child in children:
            child.process.wait()
            child.answers.close()
            child.errors.close()


def serve(contestant: AbstractContextManager[Step]) -> None:
    """Be a contestant's process: set up, then make as many steps as asked, until the input ends."""

    @contextlib.contextmanager
    def turns() -> Iterator[Turn]:
        with contestant as step:
            yield lambda num_steps: [_seconds(step) for _ in range(num_steps)]

    attend(turns())


def attend(contestant: AbstractContextManager[Turn]) -> None:
    """Be a contestant's process: set up, then answer each number with seconds.

    Whatever the contestant prints goes to stderr; stdout belongs to the answers.
    """
    with contextlib.suppress(UnsupportedError):
        die_with_parent(os.getppid())  # stopped, it would not see its input end
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(seconds: list[float]) -> None:
        answers.write(json.dumps(seconds) + "\n")
        answers.flush()

    with answers, contestant as turn:
        tell([])
        for line in sys.stdin:
            tell(turn(int(line)))


def _seconds(step: Step) -> float:
    started_s = now_s()
    step()
    return now_s() - started_s
