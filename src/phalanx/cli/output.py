"""The file that ``--out`` names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.files import written_whole


@contextmanager
def written_output(out: Path) -> Iterator[Path]:
    """Yield where to write the file of ``--out``, whose folder is made; it appears at the end.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(out) as draft:
            yield draft
    except OSError as error:
        raise ConfigError(
            f"`--out` must be a file that can be written, but is {str(out)!r}: {error.strerror}. "
            "Name another."
        ) from error
