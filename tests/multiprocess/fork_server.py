"""The process that others are forked from: it has imported what they need, so each costs little.

On the CPU it is a fork of the process that tests, made when all tests have been collected and none
has run; it ends with that. So it has the modules, but neither threads nor groups. A thread of its
own forks it: modules that compute when they are imported give the main one a team of OpenMP's
threads, and a fork of that thread would wait for them forever.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver, resource_tracker, util

import pytest

__all__ = ["context", "start"]

NEEDED = (
    "torch._dynamo",  # which the first optimizer of a process would import
    "phalanx.launching",
    "phalanx.tables",
    "phalanx.train",
)

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["pytest", *NEEDED])  # where `start` was not called


def start(needed: Sequence[str] = NEEDED) -> None:
    """Fork the server, which the standard library would start as a Python of its own."""
    for name in needed:
        import_module(name)
    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", _fork)
        thread = threading.Thread(target=forkserver.ensure_running)
        thread.start()
        thread.join()


def _fork(path: str, args: Sequence[object], passed: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            faulthandler.disable()
            logging.getLogger().handlers.clear()  # pytest's
            _forget_pipes(passed)
            forkserver.main(*passed, preload=[])
        finally:
            os._exit(0)
    return pid


def _forget_pipes(kept: list[int]) -> None:
    """Leave all pipes and sockets but ``kept``, whose other ends would not see their end."""
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with suppress(OSError):  # that of the listing
            mode = os.fstat(fd).st_mode
            if fd not in kept and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                os.dup2(null, fd)
