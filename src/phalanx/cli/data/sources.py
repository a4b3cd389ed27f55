"""From the text of ``--data`` to the reader that opens it."""

from __future__ import annotations

from phalanx.cli.data.custom import open_custom
from phalanx.cli.data.data import Data
from phalanx.cli.data.digits import open_digits
from phalanx.cli.data.text import open_text
from phalanx.errors import ConfigError


def open_data(
    spec: str,
    *,
    batch_size: int,
    seed: int,
    test_fraction: float | None = None,
    context: int = 64,
) -> Data:
    """Open a training set and its test set.

    Args:
        spec: ``digits`` (ships with the package), ``text:PATH`` (the bytes of a file, or of all
            files under a folder), or ``module:attribute`` (a user's Dataset or loader). ``~`` is
            the home folder, which no shell fills in after a colon.
        batch_size: Samples, or windows of text, per batch. The last batch may be smaller.
        seed: Decides the order of the training set in every epoch, and nothing else.
        test_fraction: Share kept for the test set, between 0 and 1; default 0.2 for digits and 0.1
            for text. The others bring their own test set.
        context: Bytes per window, for text.

    Returns:
        The data, read into memory in compact form. Which samples are in which set depends on the
        files and ``test_fraction`` alone.

    Raises:
        ConfigError: There is no such data, a file is unreadable or damaged, or an argument is out
            of its range.

    Example:
        >>> data = open_data("digits", batch_size=64, seed=0)
        >>> inputs, targets = next(iter(data.train))
        >>> tuple(inputs.shape), tuple(targets.shape)
        ((64, 1, 8, 8), (64,))
    """
    reader, separator, where = spec.partition(":")
    if test_fraction is not None:
        if not 0 < test_fraction < 1:
            raise ConfigError(f"`test_fraction` must be between 0 and 1, but is {test_fraction!r}.")
        if reader not in ("digits", "text"):
            raise ConfigError(
                f"`test_fraction` must be left out for `{spec}`, which brings its own test set, "
                f"but is {test_fraction!r}."
            )
    if spec == "digits":
        return open_digits(batch_size=batch_size, seed=seed, test_fraction=test_fraction)
    if separator and where and reader == "text":
        return open_text(
            where, batch_size=batch_size, seed=seed, context=context, test_fraction=test_fraction
        )
    if separator and where and reader != "digits":
        return open_custom(spec, batch_size=batch_size, seed=seed)
    raise ConfigError(f"Data must be `digits`, `text:PATH` or `module:attribute`, but is {spec!r}.")
