"""What the records of all benchmarks have in common."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["headline", "headlines"]


def headlines(failures: Mapping[str, str]) -> dict[str, str]:
    """Return why contestants fell out, as a record tells it; see :func:`headline`."""
    return {name: headline(cause) for name, cause in failures.items()}


def headline(cause: str) -> str:
    """Return the first line: a program's last words are of the machine that it ran on.

    Example:
        >>> headline("It ended. It said last:\\nTraceback …")
        'It ended.'
    """
    return cause.partition("\n")[0].removesuffix(" It said last:")
