"""Which run to join, and as which worker: by the caller, or by the launcher of this process.

A process that a launcher has started is never a run of its own: incomplete variables are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from phalanx.environment import read_place
from phalanx.errors import ConfigError


class JoinRequest(NamedTuple):
    """What to join.

    Attributes:
        run: Name of the run, or None for this process alone.
        worker: Our number, or None for the next one.
        num_workers: How many are expected, or None if nobody knows.
        store: Where workers on several hosts meet; None where all are on one.
    """

    run: str | None
    worker: int | None
    num_workers: int | None
    store: tuple[str, int] | None = None


def read_join_request(
    run: str | None, num_workers: int | None, environment: Mapping[str, str] | None = None
) -> JoinRequest:
    """Decide which run to join.

    Args:
        run: The name, if the caller gave one. It comes before all variables.
        num_workers: How many are expected, if the caller said.
        environment: The variables; None for this process's.

    Raises:
        ConfigError: The variables contradict the caller, or do not say enough.

    Example:
        >>> found = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "7"}
        >>> read_join_request(None, None, found)
        JoinRequest(run='torchrun-port-7-0', worker=1, num_workers=2, store=None)
        >>> read_join_request(None, None, {})
        JoinRequest(run=None, worker=None, num_workers=None, store=None)
    """
    if run is not None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run):
            raise ConfigError(
                "`run` must be 1 to 100 letters, digits, dots, dashes and underscores, a letter "
                f"or digit first, but is {run!r}."
            )
        return JoinRequest(run, None, num_workers)
    place = read_place(environment)
    if place is None:
        return JoinRequest(None, None, num_workers)
    if num_workers not in (None, place.size):
        raise ConfigError(
            f"`num_workers` must be the number of processes that were started ({place.size}), but "
            f"is {num_workers}."
        )
    if place.size == 1:
        return JoinRequest(None, None, num_workers)
    store = place.find_store() if place.is_spread else None
    return JoinRequest(place.job, place.rank, place.size, store)


def read_trust(
    secret_file: str | None,
    trusted_network: bool | None,
    environment: Mapping[str, str] | None = None,
) -> tuple[str | None, bool]:
    """Return the secret's file and whether the network is trusted: as given, or by variables.

    Raises:
        ConfigError: Both are given.
    """
    found = os.environ if environment is None else environment
    if secret_file is None and trusted_network is None:
        secret_file = found.get("PHALANX_SECRET_FILE") or None
        trusted_network = bool(found.get("PHALANX_TRUSTED_NETWORK"))
    if secret_file and trusted_network:
        raise ConfigError(
            "`trusted_network` must be False where `secret_file` is given, but both are set. With "
            "a secret everything between hosts is encrypted, and no network needs to be trusted."
        )
    return secret_file, bool(trusted_network)
