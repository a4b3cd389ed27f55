"""Warnings that name a line of the user's program, not one of ours."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn_user"]

_NOT_THE_USERS = {"phalanx", "torch", "contextlib", "typer", "click"}


def warn_user(message: str) -> None:
    """Warn at the line outside of Phalanx and torch from which this was called."""
    frame, level = sys._getframe(), 1
    while frame.f_back and _package_of(frame.f_globals) in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _package_of(names: dict[str, object]) -> str:
    return str(names.get("__name__")).partition(".")[0]
