"""Memory and cores that the machine and its containers leave to this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("sys/fs/cgroup")

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
    for folder, version in _enclosing_groups("memory", root):
        *files, cached_line = _NAMES_BY_VERSION[version]
        limit, used = (_read_or_nothing(folder / name).strip() for name in files)
        if limit.isdigit() and used.isdigit():
            cached = _amounts(folder / "memory.stat").get(cached_line, 0)
            rooms.append(max(0, int(limit) - int(used) + cached))
    return rooms


def _amounts(path: Path) -> dict[str, int]:
    lines = (line.replace(":", " ").split() for line in _read_or_nothing(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def cores_allowed(root: Path = Path("/")) -> float | None:
    """Return how many cores' time may be used at once; None where all of it may.

    Example:
        >>> cores_allowed(Path("/no/such/root")) is None
        True
    """
    allowed = []
    for folder, version in _enclosing_groups("cpu", root):
        if version == 2:  # "150000 100000", or "max 100000"
            words = _read_or_nothing(folder / "cpu.max").split()
        else:  # -1 for no limit
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [_read_or_nothing(folder / name).strip() for name in files]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            allowed.append(int(words[0]) / int(words[1]))
    return min(allowed, default=None)


def _enclosing_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Yield the folders of the groups that limit this process, and the version of their hierarchy.

    The innermost comes first. Version 2 names no controller, version 1 does.

    Args:
        controller: "memory" or "cpu".
        root: Where `proc` and `sys` lie.
    """
    for line in _read_or_nothing(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        top = root / _CGROUPS / (controller if controllers else "")
        group = top / path.lstrip("/")
        for folder in [group, *group.parents]:
            yield folder, version
            if folder == top:
                break


def _read_or_nothing(path: Path) -> str:
    """Return the contents of a file of the kernel; an empty text if there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
