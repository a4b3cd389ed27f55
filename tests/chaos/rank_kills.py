"""Ranks of `phalanx` groups, killed at random moments: a part of ``make chaos``.

Four ranks make one random collective call after the other, and check every result. At a random
moment one is killed. The others must say so in time, name it, and what it was in; then they, in the
same processes, and a newcomer make the next group.

    rank 0 ── group 1 ──────── told ── group 2 ─────── told ── group 3 ─ ...
    rank 1 ── group 1 ─ killed
    rank 1'                            group 2 ─────── told ── group 3 ─ ...
    rank 2 ── group 1 ──────── told ── group 2 ─ killed
"""

from __future__ import annotations

import gc
import random
import re
import statistics
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from tests.chaos import command
from tests.chaos.calls import draw
from tests.chaos.ranks import RunResult, held, join_group, told
from tests.multiprocess.children import DEADLINE_S, Child, Parent

RANKS = 4
PROMISED_S = 0.2  # from a death to what the survivors raise, as the median of many
LATEST_S = 10.0  # of any: a busy machine may not run a survivor for long
LONGEST_LIFE_S = 0.03


@dataclass(frozen=True)
class Survivor(RunResult):
    """How a survivor fared; ``kind`` is what its last call was."""

    kind: str


def serve(parent: Parent) -> None:
    """Take part in one group after another, until told None."""
    torch.set_num_threads(1)
    while (order := parent.hear()) is not None:
        rank, store, seed = order
        before = held()
        join_group(store, rank, RANKS, DEADLINE_S)
        chance, number, kind = random.Random(seed), 0, ""
        try:
            while True:
                call = draw(chance, number, RANKS)
                number, kind = number + 1, call.kind
                right = call.is_right(rank)
                if not right:
                    raise AssertionError(f"rank {rank} has a wrong result of {call}")
                if number == 1:
                    parent.tell("under way")
        except (ConnectionError, RuntimeError, TimeoutError) as exc:
            report = told(exc)
        finally:
            dist.destroy_process_group()
        gc.collect()
        left_over = sorted(held() - before)
        parent.tell(Survivor(**report, num_right=number - 1, kind=kind, left_over=left_over))


@dataclass
class Result:
    """What came of the kills.

    Attributes:
        told_after_s: From each death to each survivor's error.
        kinds: What survivors were in, how often.
        calls: Calls that were made, with the right result.
        seconds: How long it all took.
    """

    told_after_s: list[float] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        kinds = "".join(f"{number:5} in {kind}\n" for kind, number in sorted(self.kinds.items()))
        after_ms = sorted(1e3 * seconds for seconds in self.told_after_s)
        late = sum(ms > 1e3 * PROMISED_S for ms in after_ms)
        return (
            f"{kinds}{self.kills} times one of {RANKS} ranks killed in {self.seconds:.0f} s; "
            f"{self.calls} calls with the right result; survivors named the killed rank after p50 "
            f"{statistics.median(after_ms):.0f} ms, p99 {after_ms[99 * len(after_ms) // 100]:.0f} "
            f"ms, max {after_ms[-1]:.0f} ms; {late} of {len(after_ms)} after more than "
            f"{1e3 * PROMISED_S:g} ms"
        )

    @property
    def kills(self) -> int:
        return len(self.told_after_s) // (RANKS - 1)

    def note(self, victim: int, killed_at_s: float, rank: int, survivor: Survivor) -> None:
        """Take in what a survivor says."""
        after_s = survivor.raised_at_s - killed_at_s
        self.told_after_s.append(after_s)
        self.kinds[survivor.kind] += 1
        self.calls += survivor.num_right
        who = f"rank {rank}, when rank {victim} was killed, "
        if (survivor.error, survivor.rank) != ("PeerLost", victim):
            self.wrong.append(f"{who}raised {survivor.error}: {survivor.message}")
        in_what = r"(\w+ #\d+|no operation yet)"
        named = rf"Rank {victim} of {RANKS} has died.* of each: rank {victim}: {in_what}"
        if survivor.kind == "messages":  # gloo may see its connection end before the kernel says
            named += rf"|The connection to rank {victim} of {RANKS} is lost"
        if not re.match(named, survivor.message):
            self.wrong.append(f"{who}was not told whom, and in what: {survivor.message}")
        if not 0 <= after_s < LATEST_S:
            self.wrong.append(f"{who}was told after {after_s:.3f} s")
        self.wrong += [f"{who}kept {what}" for what in survivor.left_over]


def kill_ranks(kills: int, seed: int, progress: command.Progress = lambda _: None) -> Result:
    """Kill so many ranks, one a group; fail where something is not as promised."""
    result, chance = Result(), random.Random(seed)
    began_s = time.monotonic()
    ranks = [Child(serve) for _ in range(RANKS)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(kills):
                _kill_one(ranks, Path(folder) / str(number), chance, result)
                progress(number + 1)
    finally:
        for rank in ranks:
            rank.end()
    result.seconds = time.monotonic() - began_s
    assert not result.wrong, "\n".join(result.wrong)
    return result


def _kill_one(ranks: list[Child], store: Path, chance: random.Random, result: Result) -> None:
    seed = chance.random()
    for rank, child in enumerate(ranks):
        child.put((rank, str(store), seed))
    for child in ranks:
        assert child.get() == "under way"
    threading.Event().wait(chance.uniform(0.0, LONGEST_LIFE_S))
    victim = chance.randrange(RANKS)
    killed_at_s = time.monotonic()
    ranks[victim].kill()
    ranks[victim].end()
    ranks[victim] = Child(serve)
    for rank, child in enumerate(ranks):
        if rank != victim:
            result.note(victim, killed_at_s, rank, child.get())
    store.unlink()


if __name__ == "__main__":
    command.run(kill_ranks, faults="kills", number=300)
