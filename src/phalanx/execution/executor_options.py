"""Options of executors: `Processes` and `Ranks`."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import ConfigError
from phalanx.plan import read_count, read_number


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Worker processes of this host, with options.

    ``executor="processes"`` is the same with the defaults.

    Args:
        timeout_s: How long a microbatch may take before its worker process counts as hung.
        max_failures: How many worker processes may be lost in all; None for any number.

    Raises:
        ConfigError: An option cannot work.

    Example:
        >>> Processes(timeout_s=60.0).max_failures
        20
    """

    timeout_s: float = 300.0
    max_failures: int | None = 20

    def __post_init__(self) -> None:
        _check_seconds("timeout_s", self.timeout_s)
        if self.max_failures is not None:
            way_out = "Give None for any number."
            read_count("max_failures", self.max_failures, 0, way_out=way_out)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks that survive the loss of others.

    When a rank dies, those left form another group and do the step again: the weights are the same
    bits as if nothing had happened, given ``microbatches``. A process that comes in its place, or
    later, is given the state by a peer between two steps. They meet in a separate group, so the
    script calls no `init_process_group()`; ``RANK`` and ``WORLD_SIZE`` say who comes at first.

    Args:
        timeout_s: How long a rank that lives may take for its part of a step.
        lost_after_s: After how long without a sign of life a rank of another host counts as lost;
            a process that ends is noticed at once.

    Raises:
        ConfigError: An option cannot work.

    Example:
        >>> Ranks(timeout_s=60.0).lost_after_s
        5.0
    """

    timeout_s: float = 300.0
    lost_after_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("timeout_s", "lost_after_s"):
            _check_seconds(name, getattr(self, name))


def _check_seconds(name: str, seconds: float) -> None:
    """Refuse what is no time to wait."""
    if not read_number(name, seconds) > 0:
        raise ConfigError(f"`{name}` must be above 0 seconds, but is {seconds!r}.")
