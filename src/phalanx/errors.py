"""Every error that Phalanx raises on purpose.

The sentence is always the same: `` `name` must …, but is …. `` and then the way out. Errors keep
their data in attributes and survive pickling, because some of them cross process borders.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "GroupAborted",
    "InternalError",
    "PeerError",
    "PeerLost",
    "PeerTimeout",
    "PhalanxError",
    "StateError",
    "UnsupportedError",
]


class PhalanxError(Exception):
    """The base of all errors raised by Phalanx."""


class ConfigError(PhalanxError, ValueError):
    """What was passed cannot work; fix the call."""


class StateError(PhalanxError, RuntimeError):
    """The call is right but the moment is wrong; fix the order of calls."""


class UnsupportedError(PhalanxError):
    """This combination is not built; choose another."""


class PeerError(PhalanxError):
    """Another worker failed.

    Args:
        message: What happened, as a sentence.
        rank: The worker that failed, or None when it is not known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[PeerError], tuple[str, int | None], dict[str, object]]:
        return type(self), (str(self), self.rank), self.__dict__


class PeerTimeout(PeerError, TimeoutError):
    """Another worker did not answer in time."""


class PeerLost(PeerError, ConnectionError):
    """Another worker is gone."""


class GroupAborted(PeerError):
    """An echo: somebody else failed first."""


class CheckpointError(PhalanxError):
    """The stored state is missing, damaged or of another shape."""


class InternalError(PhalanxError):
    """A bug of ours; please report it."""
