"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

from phalanx.ipc.control_groups import enclosing_groups, read_or_nothing

__all__ = ["available_memory_bytes"]

# By the version of the hierarchy: files with the limit, with what is used, and the line of
# `memory.stat` that holds how much of that is files which can be dropped.
_NAMES_BY_VERSION = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return how much memory can be had without killing anybody, or None where nobody knows.

    It is the memory that the machine has left, swap included, or that this process's control groups
    (containers) still allow, if that is less. An estimate: others take memory meanwhile.

    Args:
        root: Where `proc` and `sys` lie.

    Example:
        >>> (available_memory_bytes() or 1) > 0
        True
    """
    bounds = [_machine_bytes(root), *_control_group_bytes(root)]
    return min((bound for bound in bounds if bound is not None), default=None)


def _machine_bytes(root: Path) -> int | None:
    amounts = _amounts(root / "proc/meminfo")
    if "MemAvailable" not in amounts:
        return None
    return 1024 * (amounts["MemAvailable"] + amounts.get("SwapFree", 0))


def _control_group_bytes(root: Path) -> list[int]:
    """Return what each of the control groups that we are in still allows."""
    rooms = []
    for folder, version in enclosing_groups("memory", root):
        *files, cached_line = _NAMES_BY_VERSION[version]
        limit, used = (read_or_nothing(folder / name).strip() for name in files)
        if limit.isdigit() and used.isdigit():
            cached = _amounts(folder / "memory.stat").get(cached_line, 0)
            rooms.append(max(0, int(limit) - int(used) + cached))
    return rooms


def _amounts(path: Path) -> dict[str, int]:
    lines = (line.replace(":", " ").split() for line in read_or_nothing(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
