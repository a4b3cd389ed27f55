"""Every error that Phalanx raises on purpose.

The sentence is always the same: `` `name` must …, but is …. `` and then the fix. Errors keep
their data in attributes and survive pickling, because some of them cross process borders.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "GroupAborted",
    "InternalError",
    "OutOfSpace",
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
    """An argument cannot work; fix the call."""


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
    """Another worker failed first; its error is the cause."""


class OutOfSpace(PhalanxError, OSError):
    """There is not enough memory, or room in a folder, for what was asked.

    Args:
        message: What did not fit, as a sentence.
        needed_bytes: How much was asked for.
        available_bytes: How much there is, or None when it is not known.
    """

    def __init__(
        self, message: str, needed_bytes: int | None = None, available_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.needed_bytes, self.available_bytes), self.__dict__


class CheckpointError(PhalanxError):
    """The stored state is missing, damaged or of another shape."""


class InternalError(PhalanxError):
    """A bug of ours; please report it, with the output of `phalanx doctor`."""
