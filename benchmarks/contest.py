"""Time contestants in turn: each in processes of its own, and one of them at work at a time.

A shared machine is never equally fast for two minutes, so contestants that run one after the other
run on different machines. Here all are set up first; then they take turns, in another order each
round:

    compete ──"5\\n"──> contestant 1    (all others are stopped)
            <──times──
            ──"5\\n"──> contestant 2
            ...

A contestant is stopped by SIGSTOP until its next turn, since threads of a library may poll: three
processes of torch RPC took one and a half of two cores from the one that was timed. A question, a
whole number, goes down each process's stdin; its answer, a JSON list of numbers, comes up stdout,
an empty one as soon as the process is ready. A process ends when its stdin or its parent does. The
processes of a contestant have a working folder of their own, where they can meet.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

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


def command_of(job: Any) -> Command:  # Any: a dataclass of JSON values
    """Return the command line of a process that calls ``job.run()``."""
    kind = type(job)
    program = (
        f"import json, sys; from {kind.__module__} import {kind.__name__} as Job; "
        "Job(**json.loads(sys.argv[1])).run()"
    )
    return (sys.executable, "-c", program, json.dumps(asdict(job)))


def commands_of(job: Any, count: int) -> list[Command]:
    """Return the command lines of a job's processes, which differ in ``rank``."""
    return [command_of(replace(job, rank=rank)) for rank in range(count)]


def claim_stdout() -> IO[str]:
    """Return stdout, for answers; what else is printed goes to stderr from here on."""
    die_with_parent(os.getppid())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(open_turn: Callable[[ExitStack], Turn]) -> None:
    """Be a contestant's process: set up, then answer each question, until the input ends."""
    with claim_stdout() as answers, ExitStack() as stack:
        turn = open_turn(stack)
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
        folder: Its working folder.
    """

    def __init__(self, name: str, command: Command, folder: str | None = None) -> None:
        self.name = name
        self.heard = b""
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by `end`
        # A session of its own: Ctrl-C reaches the parent alone, which ends its children.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            bufsize=0,
            start_new_session=True,
            cwd=folder,
            env=_environment(),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.questions, self.answers = self.process.stdin, self.process.stdout

    def fileno(self) -> int:
        """Return the descriptor that its lines come from, for `select`."""
        return self.answers.fileno()

    def is_behind(self) -> bool:
        """Tell whether more has come than was heard."""
        return b"\n" in self.heard or bool(select.select([self], [], [], 0.0)[0])

    def close(self) -> None:
        """Close its pipes, at whose end it ends, and continue it if it is stopped."""
        self.questions.close()
        self.answers.close()
        self.process.send_signal(signal.SIGCONT)

    def last_words(self) -> str:
        """Return the end of its stderr."""
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, size - _LAST_WORDS_BYTES))
        words = self.errors.read().decode(errors="replace").strip()
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
        while waiting := [child for child in children if b"\n" not in child.heard]:
            ready, _, _ = select.select(waiting, [], [], max(0.0, deadline_s - now_s()))
            if not ready:
                raise ContestantFailed(f"{waiting[0].name} did not answer for {timeout_s:g} s.")
            for child in ready:
                piece = os.read(child.fileno(), 1 << 16)
                if not piece:
                    raise ContestantFailed(f"{child.name} ended.")
                child.heard += piece
    except ContestantFailed as error:
        words = "".join(child.last_words() for child in children)
        raise ContestantFailed(f"{error}{words}") from None
    lines = []
    for child in children:
        line, child.heard = child.heard.split(b"\n", 1)
        lines.append(line)
    return lines


def end(children: Sequence[Child]) -> None:
    """End processes: by the end of their pipes, then by SIGTERM, which launchers pass on."""
    for child in children:
        child.close()
    for grace_s, then in zip(_GRACE_S, (signal.SIGTERM, signal.SIGKILL), strict=True):
        deadline_s = now_s() + grace_s
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline_s - now_s()))
        for child in children:
            child.process.send_signal(then)  # to one that has ended, nothing
    for child in children:
        child.process.wait()
        child.errors.close()


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The answers by contestant, task and round; and why contestants failed."""

    answers: Mapping[str, Mapping[T, Sequence[Sequence[float]]]]
    failures: Mapping[str, str]

    def medians(self, task: T) -> dict[str, float]:
        """Return the median answer of each contestant that gave one."""
        found = {
            name: [number for turn in by_task[task] for number in turn]
            for name, by_task in self.answers.items()
        }
        return {name: statistics.median(numbers) for name, numbers in found.items() if numbers}


def compete(
    commands: Mapping[str, Sequence[Command]],
    questions: Mapping[T, int],
    rounds: int,
    show: Callable[[str], None],
    *,
    settle: int = 0,
) -> Outcome[T]:
    """Let contestants take turns at each task, and return their answers.

    A contestant of which a process fails is out.

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
    children: dict[str, list[Child]] = {name: [] for name in commands}
    failures: dict[str, str] = {}

    def answer(name: str, *questions: int) -> list[float]:
        """Let a contestant work until all its processes have answered."""
        if name in failures:
            return []
        for child in children[name]:
            child.process.send_signal(signal.SIGCONT)
            with suppress(BrokenPipeError):  # `hear` tells why
                child.questions.write(b"".join(b"%d\n" % each for each in questions))
        try:
            first, *_ = hear(children[name])
        except ContestantFailed as error:
            failures[name] = str(error)
            end(children.pop(name))
            del answers[name]
            return []
        for child in children[name]:
            child.process.send_signal(signal.SIGSTOP)
        return [float(number) for number in json.loads(first)]

    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in commands:
                place = os.path.join(folder, name)
                os.mkdir(place)
                for rank, command in enumerate(commands[name]):
                    children[name].append(Child(f"{name}, process {rank}", command, place))
            for name in commands:
                answer(name)  # it is ready
            dropped = {
                name: _num_to_settle(answer(name, settle)) if settle else 0 for name in commands
            }
            for number in range(rounds):
                for task, question in questions.items():
                    for name in random.Random(number).sample(list(commands), len(commands)):
                        show(f"round {number + 1} of {rounds} · {name}")
                        found = answer(name, question + dropped[name])
                        if name in answers:
                            answers[name][task].append(found[dropped[name] :])
        finally:
            end([child for group in children.values() for child in group])
    return Outcome(answers, failures)


def _num_to_settle(seconds: Sequence[float]) -> int:
    if not seconds:
        return 0
    steps = math.ceil(_SETTLE_S / max(1e-6, statistics.median(seconds)))
    return max(_FEWEST_DROPPED, min(steps, _MOST_DROPPED))
