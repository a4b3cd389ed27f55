"""``python -m benchmarks ddp``: our DistributedDataParallel beside torch's, over the same backend.

First the steps are timed; torch's class makes them with the batch in pieces, too, which shows how
much of the time of four microbatches the pieces take. Then the kernel is asked how many bytes the
connections of rank 0 receive in a step; over phalanx, ranks on one host have none.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contest import Step, Turn, commands_of
from benchmarks.models import MODELS
from benchmarks.report import OUT, Names, Out, Rounds, Row, Run, Sheet, ratio, read_names
from benchmarks.step import CONTESTANTS, StepJob, compete_at

_RANKS = 2
_COUNTED_STEPS = 10
_BYTES_RECEIVED = struct.Struct("=Q")  # at byte 128 of Linux's struct tcp_info


@dataclass(frozen=True, kw_only=True)
class CountingJob(StepJob):
    """A rank that is asked how many bytes a step takes."""

    def open_turn(self, stack: ExitStack) -> Turn:
        """Set up, and return what counts the bytes of so many steps."""
        step = self.open(stack)
        return lambda number: [_bytes_of(step, number)]


def _bytes_of(step: Step, number: int) -> float:
    """Return the bytes that this rank receives in one of so many steps."""
    step()
    before = _received_bytes()
    for _ in range(number):
        step()
    return (_received_bytes() - before) / number


def _received_bytes() -> int:
    """Return what the kernel has received for the TCP connections of this process."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it is of something else
            if fd.is_socket():
                with socket.socket(fileno=os.dup(int(fd.name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                found += _BYTES_RECEIVED.unpack_from(info, 128)[0]
    return found


def ddp(models: Names = "mlp,cnn", rounds: Rounds = 10, out: Out = OUT) -> None:
    """Time a step of our DistributedDataParallel beside torch's, and count bytes on the wire."""
    run = Run("ddp", out)
    names = [name for name in CONTESTANTS if "ddp" in name]
    for model in read_names("models", models, MODELS):
        job = StepJob(model=model, workers=_RANKS)
        medians = compete_at(run, job, names, rounds).medians("step")
        commands = {
            name: commands_of(CountingJob(model=model, workers=_RANKS, contestant=name), _RANKS)
            for name in names
            if "phalanx" not in name
        }
        outcome = run.compete(f"{model}, bytes", commands, {"bytes": _COUNTED_STEPS}, rounds=1)
        received = outcome.medians("bytes")
        rows: list[Row] = []
        for name in names:
            peer = "ddp-phalanx" if "phalanx" in name else "ddp"
            median_s, num_bytes = medians.get(name), received.get(name)
            cells = [median_s and 1e3 * median_s, ratio(median_s, medians.get(peer))]
            cells += [num_bytes and num_bytes / 2**20, ratio(num_bytes, received.get(peer))]
            rows.append((CONTESTANTS[name].title.format(workers=_RANKS), *cells))
        columns = ("median\nms", "÷ DDP", "received\nMiB", "÷ DDP")
        run.sheets.append(Sheet(f"{model}, {_RANKS} ranks", columns, rows))
    run.publish()
