"""Memory and cores that the machine and its containers (control groups) leave to this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("sys/fs/cgroup")

# Files with the limit and with what is used, and the line of `memory.stat` for what may be dropped.
_MEMORY = ("memory.max", "memory.current", "inactive_file")
_MEMORY_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return how much memory can be had without killing a process, or None where it is unknown.

    It is the memory that the machine has left, swap included, or that this process's control groups
    still allow, if that is less. An estimate: others take memory meanwhile.

    Args:
        root: Where `proc` and `sys` lie.

    Example:
        >>> (available_memory_bytes() or 1) > 0
        True
    """
    machine = _amounts(root / "proc/meminfo")
    bounds = []
    if "MemAvailable" in machine:
        bounds.append(1024 * (machine["MemAvailable"] + machine.get("SwapFree", 0)))
    for group, is_v1 in _enclosing_groups("memory", root):
        *names, cached = _MEMORY_V1 if is_v1 else _MEMORY
        limit, used = (_read(group / name).strip() for name in names)
        if limit.isdigit() and used.isdigit():
            dropped = _amounts(group / "memory.stat").get(cached, 0)
            bounds.append(max(0, int(limit) - int(used) + dropped))
    return min(bounds, default=None)


def cores_allowed(root: Path = Path("/")) -> float | None:
    """Return how many cores' time may be used at once; None where all of it may.

    Example:
        >>> cores_allowed(Path("/no/such/root")) is None
        True
    """
    bounds = []
    for group, is_v1 in _enclosing_groups("cpu", root):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_v1 else ("cpu.max",)
        quota = " ".join(_read(group / name).strip() for name in names).split()
        if quota and quota[0].isdigit():  # neither "max" nor -1
            bounds.append(int(quota[0]) / int(quota[1]))
    return min(bounds, default=None)


def _amounts(path: Path) -> dict[str, int]:
    lines = (line.replace(":", " ").split() for line in _read(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _enclosing_groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the groups that limit this process, innermost first, and whether each is version 1's.

    Version 2 names no controller, version 1 does.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = root / _CGROUPS / (controller if controllers else "")
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                yield folder, bool(controllers)
                if folder == top:
                    break


def _read(path: Path) -> str:
    """Return the contents of a file of the kernel; an empty text if there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
