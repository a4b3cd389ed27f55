"""Worker processes of executors, forked from a process that has imported torch.

One that is spawned imports torch, which takes longer than most tests; what it does afterwards is
the same. That it starts as users' do is shown by the files that spawn and by scripts, and by all of
chaos and conformance at night.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.process import _children as listed
from typing import Any

import pytest

from phalanx.execution import worker_client, worker_main, worker_start
from phalanx.ipc import die_with_parent
from tests.multiprocess.fork_server import context

__all__ = ["forked_by_day", "spawn_again"]


def _serve(environment: dict[str, str], *connections: Any) -> None:
    gc.freeze()  # what the server knew: no collection need go over it, and copy its pages
    os.environ.clear()
    os.environ.update(environment)
    # Its parent is the server, which ends with the process that tests.
    worker_main.die_with_parent = lambda _: die_with_parent(os.getppid())
    worker_main.serve(*connections)


def _fork_worker(*connections: Connection) -> BaseProcess:
    process = context.Process(target=_serve, args=(dict(os.environ), *connections), daemon=True)
    process.start()
    # The start of another looks at all that are listed, in the thread of another worker that has
    # died, say; and of two threads that ask at once how one ended, one is answered 255.
    listed.discard(process)
    return process


@contextmanager
def forked_by_day(config: pytest.Config) -> Iterator[None]:
    """Let executors of this process fork their workers, unless tests of the night are to run."""
    if "night" in config.getoption("-m").replace("not night", ""):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_client, "start_worker", _fork_worker)
        yield


def spawn_again(patch: pytest.MonkeyPatch) -> None:
    """Let workers start as users' do, within `forked_by_day`."""
    patch.setattr(worker_client, "start_worker", worker_start.start_worker)
