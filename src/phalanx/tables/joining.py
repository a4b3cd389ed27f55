"""Which run to join, and as whom: told by the caller, or by torchrun's variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from phalanx.errors import ConfigError, UnsupportedError

__all__ = ["Ticket", "read_ticket"]


class Ticket(NamedTuple):
    """What to join.

    Attributes:
        run: Name of the run on this host, or None for this process alone.
        worker: Our number, or None for the next one.
        num_workers: How many are expected, or None if nobody knows.
    """

    run: str | None
    worker: int | None
    num_workers: int | None


def read_ticket(
    run: str | None, num_workers: int | None, environment: Mapping[str, str] | None = None
) -> Ticket:
    """Decide which run to join.

    Args:
        run: The name, if the caller gave one. It comes before torchrun's variables.
        num_workers: How many are expected, if the caller said.
        environment: The variables; None for this process's.

    Raises:
        ConfigError: The variables contradict each other or the caller.
        UnsupportedError: The run is spread over several hosts.

    Example:
        >>> read_ticket(None, None, {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a"})
        Ticket(run='torchrun-a-0', worker=1, num_workers=2)
        >>> read_ticket(None, None, {})
        Ticket(run=None, worker=None, num_workers=None)
    """
    if run is not None:
        return Ticket(run, None, num_workers)
    found = os.environ if environment is None else environment
    if "RANK" not in found or "WORLD_SIZE" not in found:
        return Ticket(None, None, num_workers)
    rank, size = _number(found, "RANK"), _number(found, "WORLD_SIZE")
    if not rank < size:
        raise ConfigError(f"`RANK` must be below `WORLD_SIZE` ({size}), but is {rank}.")
    if num_workers not in (None, size):
        raise ConfigError(
            f"`num_workers` must be torchrun's `WORLD_SIZE` ({size}), but is {num_workers}."
        )
    if "LOCAL_WORLD_SIZE" in found and _number(found, "LOCAL_WORLD_SIZE") != size:
        raise UnsupportedError(
            f"All {size} workers of a table must be on one host, but `LOCAL_WORLD_SIZE` is "
            f"{found['LOCAL_WORLD_SIZE']}."
        )
    return Ticket(_run_name(found), rank, size)


def _number(found: Mapping[str, str], name: str) -> int:
    if not found[name].isdecimal():
        raise ConfigError(f"`{name}` must be a number, but is {found[name]!r}.")
    return int(found[name])


def _run_name(found: Mapping[str, str]) -> str:
    """Name this start of the run: the same in all its workers, another after a restart."""
    run = found.get("TORCHELASTIC_RUN_ID", "none")
    if run == "none":  # what torchrun says where it was given no id: then the port is what differs
        run = "port-" + found.get("MASTER_PORT", "0")
    restart = found.get("TORCHELASTIC_RESTART_COUNT", "0")
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"torchrun-{run}-{restart}")
