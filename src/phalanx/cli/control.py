"""Orders to a training that is under way: a file that is looked at, and signals."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from phalanx.cli.options import Replicas, parse_replicas
from phalanx.errors import ConfigError
from phalanx.train import StepDone, Trainer

_MOST_CHARACTERS = 4096  # what is longer holds no orders


class Controlled(Protocol):
    """What takes the orders."""

    trainer: Trainer

    def resize(self, replicas: Replicas) -> None:
        """Go on with other replicas."""

    def refuse(self, reason: str) -> None:
        """Say why an order was not followed."""

    def stop(self) -> None:
        """Finish the step, save, and end."""


class Control:
    """Follow the orders in ``path`` whenever the file has changed, and those of signals.

    Orders stand one on a line: ``replicas 3``, ``replicas cpu,cpu``, ``stop``; what follows a ``#``
    is left out. They are followed between two steps. An order that cannot be is refused in a line
    of output and changes nothing. A ``stop`` that was there before the training has ended an
    earlier one, and is passed over.

    Args:
        path: The file, which may come later; None for signals only.
        session: Who follows them.

    Raises:
        ConfigError: There is something else than a file.
    """

    def __init__(self, path: Path | None, session: Controlled) -> None:
        if path is not None and path.exists():
            _check_file(path)
        self._path = path
        self._session = session
        self._seen: tuple[int, int, int] | None = None
        self._at_first = None if path is None else _state_of(path)
        self._wanted = 0

    def grow(self, by: int) -> None:
        """Go on with ``by`` replicas more after this step; callable from a signal's handler."""
        self._wanted += by

    def __call__(self, event: object) -> None:
        """Listen to the trainer's events."""
        if not isinstance(event, StepDone):
            return
        if self._wanted:
            self._follow_signals()
        if self._path is not None and self._has_changed(self._path):
            self._follow_file(self._path)

    def _follow_signals(self) -> None:
        by, self._wanted = self._wanted, 0
        devices = self._session.trainer.devices
        count = max(1, len(devices) + by)
        more: list[torch.device] = [devices[0]] * (count - len(devices))
        self._session.resize(tuple(str(device) for device in [*devices[:count], *more]))

    def _has_changed(self, path: Path) -> bool:
        found = _state_of(path)
        if found is None:
            return False
        seen, self._seen = self._seen, found
        return seen != self._seen

    def _follow_file(self, path: Path) -> None:
        try:
            lines = _read(path).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            self._session.refuse(f"{path} must be readable text, but is not: {error}")
            return
        except ConfigError as error:
            self._session.refuse(str(error))
            return
        is_old = self._seen == self._at_first
        for line in lines:
            order = line.partition("#")[0].split()
            if order and not (is_old and order == ["stop"]):
                self._follow(order)

    def _follow(self, order: list[str]) -> None:
        if order == ["stop"]:
            self._session.stop()
            return
        try:
            if order[0] != "replicas" or len(order) != 2:
                raise ConfigError(
                    "An order must be `replicas N`, `replicas DEVICES` or `stop`, but is "
                    f"{' '.join(order)!r:.80}."
                )
            replicas = parse_replicas(order[1])
        except ConfigError as error:
            self._session.refuse(str(error))
        else:
            self._session.resize(replicas)


def _check_file(path: Path) -> None:
    """Refuse what reading might wait for, or find no end of."""
    if not path.is_file():
        raise ConfigError(
            f"`--control` must be a file that can be read to its end, but {path} is a folder, a "
            "pipe or a device. Name a file, which may come later."
        )


def _read(path: Path) -> str:
    _check_file(path)
    with path.open(encoding="utf-8-sig") as file:  # some editors begin with a mark
        text = file.read(_MOST_CHARACTERS + 1)
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(
            f"{path} must hold at most {_MOST_CHARACTERS} characters of orders, but holds more."
        )
    return text


def _state_of(path: Path) -> tuple[int, int, int] | None:
    """Return what shows a change of the file; None if it is not there, or not any more."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
