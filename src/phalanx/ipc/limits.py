"""What the control groups (containers) that this process is in allow it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["cores_allowed", "enclosing_groups", "read_or_nothing"]

_CGROUPS = Path("sys/fs/cgroup")


def enclosing_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Yield the folders of the groups that limit this process, and the version of their hierarchy.

    The innermost comes first. Version 2 names no controller, version 1 does.

    Args:
        controller: "memory" or "cpu".
        root: Where `proc` and `sys` lie.
    """
    for line in read_or_nothing(root / "proc/self/cgroup").splitlines():
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


def cores_allowed(root: Path = Path("/")) -> float | None:
    """Return how many cores' time may be used at once; None where all of it may.

    Example:
        >>> cores_allowed(Path("/no/such/root")) is None
        True
    """
    allowed = []
    for folder, version in enclosing_groups("cpu", root):
        if version == 2:  # "150000 100000", or "max 100000"
            words = read_or_nothing(folder / "cpu.max").split()
        else:  # -1 for no limit
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [read_or_nothing(folder / name).strip() for name in files]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            allowed.append(int(words[0]) / int(words[1]))
    return min(allowed, default=None)


def read_or_nothing(path: Path) -> str:
    """Return what a file of the kernel's says; nothing where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
