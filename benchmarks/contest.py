"""Time contestants in turn: each in processes of its own, and one of them at work at a time.

A shared machine is never equally fast for two minutes, so contestants that run one after the other
run on different machines. Here all are set up first; then they take turns, in another order each
round:

    Contest ──"5\\n"──> contestant 1    (all others are stopped)
            <──times──
            ──"5\\n"──> contestant 2
            ...

A contestant is stopped by SIGSTOP until its next turn, since threads of a library may poll: three
processes of torch RPC took one and a half of two cores from the one that was timed. A question, a
whole number, goes down each process's stdin; its answer, a JSON list of numbers, comes up stdout,
an empty one as soon as the process is ready. A process ends when its stdin or its parent does.
"""

from __future__ import annotations

import json
import math
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Generic, Protocol, TypeVar

import phalanx
from phalanx.clock import now_s
from phalanx.ipc import die_with_parent

Command = tuple[str, ...]
Step = Callable[[], object]
Turn = Callable[[int], list[float]]
T = TypeVar("T")

_PATIENCE_S = 180.0
_GRACE_S = (3.0, 10.0)  # after the end of its stdin, and after SIGTERM
_LAST_WORDS_BYTES = 4000
_SETTLE_S = 0.15  # an idle core takes some 100 ms until it is as fast as it stays (decision 0006)
_FEWEST_DROPPED, _MOST_DROPPED = 2, 100
# A contestant sets its own numbers of threads or is measured with torch's, never with the caller's.
_ENVIRONMENT_LEFT_OUT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class ContestantFailed(Exception):
    """A contestant's process ended, or did not answer in time."""


# -- in a contestant's process -----------------------------------------------------------------


class Job(Protocol):
    """A dataclass of JSON values that says what a process does."""

    __dataclass_fields__: ClassVar[dict[str, Any]]  # Any: as typeshed has it

    def run(self) -> None:
        """Do it, in a process that has nothing else to do."""


def command_of(job: Job) -> Command:
    """Return the command line of a process that runs ``job``."""
    kind = type(job)
    program = (
        f"import json, sys; from {kind.__module__} import {kind.__name__} as Job; "
        "Job(**json.loads(sys.argv[1])).run()"
    )
    return (sys.executable, "-c", program, json.dumps(asdict(job)))


def claim_stdout() -> IO[str]:
    """Return stdout, for answers; what else is printed goes to stderr from here on."""
    die_with_parent(os.getppid())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(contestant: AbstractContextManager[Turn]) -> None:
    """Be a contestant's process: set up, then answer each question, until the input ends."""
    with claim_stdout() as answers, contestant as turn:
        print("[]", file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(turn(int(line))), file=answers, flush=True)


def time_steps(step: Step, number: int) -> list[float]:
    """Return the seconds of so many steps."""
    return [seconds_of(step) for _ in range(number)]


def seconds_of(step: Step) -> float:
    """Return the seconds of one step."""
    started_s = now_s()
    step()
    return now_s() - started_s


# -- its parent --------------------------------------------------------------------------------


class Child:
    """A process, its two pipes, and the file that takes its stderr.

    Args:
        name: What errors call it.
        command: Its command line; it imports the same packages as this process.
    """

    def __init__(self, name: str, command: Command) -> None:
        self.name = name
        self._heard = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by `end`
        # A session of its own: Ctrl-C reaches the parent alone, which ends its children.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
            env=_environment(),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._questions, self._answers = self.process.stdin, self.process.stdout

    def fileno(self) -> int:
        """Return the descriptor that its lines come from, for `select`."""
        return self._answers.fileno()

    @property
    def has_line(self) -> bool:
        """Whether a line has come."""
        return b"\n" in self._heard

    def is_behind(self) -> bool:
        """Tell whether more has come than was heard."""
        return self.has_line or bool(select.select([self], [], [], 0.0)[0])

    def ask(self, number: int) -> None:
        """Continue it with a question. If it has ended, `hear` says so."""
        self.process.send_signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._questions.write(b"%d\n" % number)

    def listen(self) -> None:
        """Take what has come.

        Raises:
            ContestantFailed: It has ended.
        """
        piece = os.read(self.fileno(), 1 << 16)
        self._heard += piece
        if not piece:
            raise ContestantFailed(f"{self.name} ended.")

    def take_line(self) -> bytes:
        """Return the first line that has come."""
        line, self._heard = self._heard.split(b"\n", 1)
        return line

    def last_words(self) -> str:
        """Return the end of its stderr."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _LAST_WORDS_BYTES))
        words = self._errors.read().decode(errors="replace").strip()
        return f"\n{self.name} said last:\n{words}" if words else ""


def _environment() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in _ENVIRONMENT_LEFT_OUT}
    sources = [str(Path(package).parents[1]) for package in (__file__, phalanx.__file__)]
    paths = filter(None, [*sources, environment.get("PYTHONPATH")])
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def hear(children: Sequence[Child], timeout_s: float = _PATIENCE_S) -> list[bytes]:
    """Return the next line of each child; all are heard at once, so the first to end is named.

    Raises:
        ContestantFailed: One has ended, or did not answer in time.
    """
    deadline_s = now_s() + timeout_s
    try:
        while waiting := [child for child in children if not child.has_line]:
            ready, _, _ = select.select(waiting, [], [], max(0.0, deadline_s - now_s()))
            if not ready:
                raise ContestantFailed(f"{waiting[0].name} did not answer for {timeout_s:g} s.")
            for child in ready:
                child.listen()
    except ContestantFailed as error:
        words = "".join(child.last_words() for child in children)
        raise ContestantFailed(f"{error}{words}") from None
    return [child.take_line() for child in children]


def end(children: Sequence[Child]) -> None:
    """End processes: by the end of their pipes, then by SIGTERM, which launchers pass on."""
    for child in children:
        child.process.send_signal(signal.SIGCONT)
        child._questions.close()
        child._answers.close()
    for grace_s, then in zip(_GRACE_S, (signal.SIGTERM, signal.SIGKILL), strict=True):
        deadline_s = now_s() + grace_s
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline_s - now_s()))
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(then)
    for child in children:
        child.process.wait()
        child._errors.close()


class Contest:
    """The contestants' processes: start them, let one contestant at a time work, end them all.

    A contestant of which a process fails is out: `failures` says why, and its turns are empty.

    Args:
        commands: The command lines of each contestant's processes.

    Example:
        with Contest(commands) as contest:
            for name in commands:
                contest.start(name)
            seconds = contest.run("ddp", 5)
    """

    def __init__(self, commands: Mapping[str, Sequence[Command]]) -> None:
        self.failures: dict[str, str] = {}
        self._commands = commands
        self._children: dict[str, list[Child]] = {}

    def __enter__(self) -> Contest:
        try:
            for name, commands in self._commands.items():
                children = self._children.setdefault(name, [])
                for rank, command in enumerate(commands):
                    children.append(Child(f"{name}, process {rank}", command))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        end([child for group in self._children.values() for child in group])
        self._children.clear()

    @property
    def pids(self) -> list[int]:
        """The processes that were started."""
        return [child.process.pid for group in self._children.values() for child in group]

    def shuffled(self, round_number: int) -> list[str]:
        """Return the contestants in the order of a round."""
        return random.Random(round_number).sample(list(self._commands), len(self._commands))

    def start(self, name: str) -> None:
        """Wait until a contestant is ready, and stop it."""
        self._answer(name)

    def run(self, name: str, question: int) -> list[float]:
        """Let a contestant take a turn; return the answer of its first process, if it is not out.

        Blocks: Until all its processes have answered, so that none is at work in the next turn.
        """
        for child in self._children.get(name, ()):
            child.ask(question)
        return self._answer(name)

    def _answer(self, name: str) -> list[float]:
        children = self._children.get(name)
        if children is None:
            return []
        try:
            first, *_ = hear(children)
        except ContestantFailed as error:
            self.failures[name] = str(error)
            end(self._children.pop(name))
            return []
        for child in children:
            child.process.send_signal(signal.SIGSTOP)
        return [float(second) for second in json.loads(first)]


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The answers by contestant, task and round; and why contestants failed."""

    answers: Mapping[str, Mapping[T, Sequence[Sequence[float]]]]
    failures: Mapping[str, str]

    def medians(self, task: T) -> dict[str, float]:
        """Return the median answer of each contestant that gave one."""
        found = {name: self.all(name, task) for name in self.answers}
        return {name: statistics.median(numbers) for name, numbers in found.items() if numbers}

    def all(self, name: str, task: T) -> list[float]:
        """Return a contestant's answers of all rounds."""
        return [number for turn in self.answers[name].get(task, ()) for number in turn]

    def record(self) -> dict[str, Any]:  # Any: JSON
        """Return every answer, for the JSON file."""
        return {
            name: {str(task): turns for task, turns in by_task.items()}
            for name, by_task in self.answers.items()
        }


def compete(
    commands: Mapping[str, Sequence[Command]],
    questions: Mapping[T, int],
    rounds: int,
    show: Callable[[str], None],
    *,
    settle: int = 0,
) -> Outcome[T]:
    """Let contestants take turns at each task, and return their answers.

    Args:
        commands: The command lines of each contestant's processes; the first one's answers count.
        questions: What they are asked for each task.
        rounds: Turns of each contestant at each task.
        show: Called with a line before each turn.
        settle: A question is a number of steps, and the first ones of a turn do not count: as many
            as take 150 ms, by the times of so many steps before the first round.

    Blocks: Until all turns are done. No process outlives the call.
    """
    answers: dict[str, dict[T, list[list[float]]]] = {
        name: {task: [] for task in questions} for name in commands
    }
    dropped = dict.fromkeys(commands, 0)
    with Contest(commands) as contest:
        for name in commands:
            contest.start(name)
        for name in commands if settle else ():
            dropped[name] = _num_to_settle(contest.run(name, settle))
        for number in range(rounds):
            for task, question in questions.items():
                for name in contest.shuffled(number):
                    show(f"round {number + 1} of {rounds} · {name}")
                    found = contest.run(name, question + dropped[name])
                    answers[name][task].append(found[dropped[name] :])
    for name in contest.failures:
        del answers[name]
    return Outcome(answers, contest.failures)


def _num_to_settle(seconds: Sequence[float]) -> int:
    if not seconds:
        return 0
    steps = math.ceil(_SETTLE_S / max(1e-6, statistics.median(seconds)))
    return max(_FEWEST_DROPPED, min(steps, _MOST_DROPPED))


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Let so many other processes keep a core busy each."""
    children: list[Child] = []
    try:
        for number in range(count):
            children.append(Child(f"busy process {number}", (sys.executable, "-c", _BUSY)))
        yield
    finally:
        end(children)


_BUSY = """
import sys, threading, os
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    pass
"""
