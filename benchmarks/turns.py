"""Time contestants beside each other: each in processes of its own, and only one of them at work.

A machine is never equally fast for two minutes on end, so contestants that are measured one after
the other are measured on different machines. Here all are set up first; then they take turns, many
rounds long, and each makes a few steps in a turn:

    Runner ──"5\\n"──> contestant 1    (all others are stopped)
           <──times──
           ──"5\\n"──> contestant 2
           ...
    next round, in another order

A contestant is stopped by SIGSTOP until its next turn: waiting in a read is not enough where a
library has threads that look for messages without a pause, as torch RPC has. Three such processes
took one and a half of two cores from whoever was being timed.

The first steps of a turn find the caches full of somebody else's data, and the cores slow after
their rest, and are dropped. The contestants of a round come in an order drawn anew each time, so
that none always follows the same neighbour.

What travels is one line each way: a number down a child's stdin, such as a number of steps, and
seconds as a JSON list up its stdout (an empty one as soon as it is ready). A child whose stdin ends
is finished.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeVar

from benchmarks.processes import Child, Command, claim_stdout, end, hear
from phalanx.clock import now_s
from phalanx.errors import PeerError

_MOST_DROPPED = 100  # of steps that take microseconds


class _Task(Protocol):
    @property
    def kind(self) -> str: ...
    def __hash__(self) -> int: ...


T = TypeVar("T", bound=_Task)

Step = Callable[[], object]
Turn = Callable[[int], list[float]]
"""What a process does with the number that it is told: as a rule so many steps."""


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
    commands: Mapping[str, Sequence[Command]], pace: Pace, show: Callable[[str, str], None]
) -> Outcome:
    """Run contestants against each other and return their times.

    Args:
        commands: The command lines of each contestant's processes; the first process is timed.
        pace: How many steps.
        show: Told ``(contestant, what it does)`` before each of the turns: one to set up, one to
            warm up, then one per round.

    Blocks: Until all turns are done. No child outlives the call.
    """
    dropped: dict[str, int] = {}
    seconds: dict[str, list[list[float]]] = {name: [] for name in commands}
    with Runner(commands, patience_s=pace.patience_s) as runner:
        for name in commands:
            show(name, "setting up")
            runner.start(name)
        for name in commands:
            show(name, "warming up")
            dropped[name] = pace.num_dropped(runner.run(name, pace.warmup))
        for number in range(pace.rounds):
            for name in runner.shuffled(number):
                show(name, f"round {number + 1} of {pace.rounds}")
                times = runner.run(name, dropped[name] + pace.kept)
                seconds[name].append(times[dropped[name] :])
    finished = {name: turns for name, turns in seconds.items() if name not in runner.failures}
    failures = {name: str(error) for name, error in runner.failures.items()}
    return Outcome(seconds=finished, failures=failures)


def compete_at(
    numbers: Mapping[T, int],
    commands: Mapping[str, Sequence[Command]],
    rounds: int,
    seconds: dict[str, dict[T, list[list[float]]]],
    failures: dict[str, str],
    show: Callable[[str], None],
) -> None:
    """Let contestants take turns at one task after the other, and put down what comes of it.

    Args:
        numbers: What processes are told to do each task, which has a ``kind``.
        commands: The command lines of each contestant's processes; the first one's seconds count.
        rounds: How many turns at each task.
        seconds: Takes the seconds of every turn, by contestant and task.
        failures: Takes why contestants fell out.
        show: Told what comes before each turn.
    """
    with Runner(commands) as runner:
        for name in commands:
            runner.start(name)
            seconds[name] = {task: [] for task in numbers}
        for turn in range(rounds):
            for task, number in numbers.items():
                for name in runner.shuffled(turn):
                    show(f"round {turn + 1} of {rounds} · {task.kind} · {name}")
                    seconds[name][task].append(runner.run(name, number))
        failures |= {name: str(error) for name, error in runner.failures.items()}


class Runner:
    """Own the contestants' processes: start them, let one at a time run, end them all.

    A contestant of which a process dies or is silent is out, and `failures` says why: its turns are
    empty from then on, and the others go on.

    Example:
        with Runner(commands) as runner:
            for name in commands:
                runner.start(name)
            times = runner.run("ddp", 5)
    """

    def __init__(
        self, commands: Mapping[str, Sequence[Command]], *, patience_s: float = 180.0
    ) -> None:
        self.failures: dict[str, PeerError] = {}
        self._commands = commands
        self._patience_s = patience_s
        self._children: dict[str, list[Child]] = {}

    def __enter__(self) -> Runner:
        try:
            for name, commands in self._commands.items():
                children = self._children.setdefault(name, [])
                for command in commands:
                    children.append(Child(command))
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

    def shuffled(self, round_number: int) -> list[str]:
        """Return all contestants in the order of a round."""
        return random.Random(round_number).sample(list(self._commands), len(self._commands))

    def start(self, name: str) -> None:
        """Wait until contestant ``name`` is ready, and stop it."""
        self._answer(name)

    def run(self, name: str, number: int) -> list[float]:
        """Let contestant ``name`` take a turn, and return its seconds; none if it is out.

        Blocks: Until all its processes have answered, so that none is at work in the next turn.
        """
        for child in self._children.get(name, ()):
            child.process.send_signal(signal.SIGCONT)
            child.send(str(number))
        return self._answer(name)

    def _answer(self, name: str) -> list[float]:
        if name in self.failures:
            return []
        children = self._children[name]
        try:
            first, *_ = hear(name, children, self._patience_s)
        except PeerError as error:
            self.failures[name] = error
            end(self._children.pop(name), grace_s=0.0)
            return []
        for child in children:
            child.process.send_signal(signal.SIGSTOP)
        return [float(second) for second in json.loads(first)]

    def close(self) -> None:
        """End all contestants; may be called again."""
        groups = list(self._children.values())
        self._children.clear()
        end([child for group in groups for child in group])


def serve(contestant: AbstractContextManager[Step]) -> None:
    """Be a contestant's process: set up, then make as many steps as asked, until the input ends."""

    @contextlib.contextmanager
    def turns() -> Iterator[Turn]:
        with contestant as step:
            yield lambda num_steps: [seconds_of(step) for _ in range(num_steps)]

    serve_turns(turns())


def serve_turns(contestant: AbstractContextManager[Turn]) -> None:
    """Be a contestant's process: set up, then answer each number with seconds."""
    with claim_stdout() as answers, contestant as turn:
        print("[]", file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(turn(int(line))), file=answers, flush=True)


def seconds_of(step: Step) -> float:
    """Return how long a step takes."""
    started_s = now_s()
    step()
    return now_s() - started_s
