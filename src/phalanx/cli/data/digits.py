"""The handwritten digits that ship inside the package (see assets/digits.txt for the source)."""

from __future__ import annotations

import gzip
from importlib.resources import files

import torch
from torch import Tensor

from phalanx.cli.data.data import Data
from phalanx.cli.data.loader import ScalePixels, TensorLoader

HIGHEST_PIXEL = 16
TEST_FRACTION = 0.2


def open_digits(*, batch_size: int, seed: int, test_fraction: float | None = None) -> Data:
    """Open the 1797 UCI digits, 8x8 pixels each, split into a training and a test set.

    The split is fixed: it depends on ``test_fraction`` alone, not on ``seed``, which decides only
    the order of the training set.

    Raises:
        ConfigError: ``batch_size`` is less than 1.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """
    images, labels = _read_digits()
    in_test = mark_test_rows(labels, TEST_FRACTION if test_fraction is None else test_fraction)
    scale = ScalePixels.fitted_to(images[~in_test], highest=HIGHEST_PIXEL)
    train = TensorLoader(
        images[~in_test],
        labels[~in_test],
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
        prepare=scale,
    )
    test = TensorLoader(
        images[in_test],
        labels[in_test],
        batch_size=batch_size,
        shuffle=False,
        generator=None,
        prepare=scale,
    )
    return Data(
        name="digits",
        kind="images",
        train=train,
        test=test,
        input_shape=(1, 8, 8),
        num_classes=10,
        description=(
            f"UCI handwritten digits: {train.num_rows} training and {test.num_rows} test images "
            f"of 8x8 pixels, 10 classes"
        ),
    )


def mark_test_rows(labels: Tensor, test_fraction: float) -> Tensor:
    """Choose the same fraction of every class, evenly spaced, with no chance involved.

    Shapes:
        labels int64 [N] -> bool [N], True for the test set.

    Example:
        >>> mark_test_rows(torch.tensor([7, 7, 7, 7, 3, 3]), 0.5).tolist()
        [False, True, False, True, False, True]
    """
    marks = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(int(labels.max()) + 1):
        rows = (labels == label).nonzero().flatten()
        # Row i of a class is taken where the running share reaches the next whole number.
        # The small term keeps 5 * 0.2 and its like from falling short of it by a rounding.
        reached = (torch.arange(len(rows) + 1, dtype=torch.float64) * test_fraction + 1e-9).floor()
        marks[rows] = reached.diff() > 0
    return marks


def _read_digits() -> tuple[Tensor, Tensor]:
    asset = files("phalanx.cli") / "assets" / "digits.csv.gz"
    numbers = gzip.decompress(asset.read_bytes()).replace(b"\n", b",").split(b",")
    # The last line ends with a newline, hence one empty piece at the end.
    table = torch.tensor([int(number) for number in numbers[:-1]], dtype=torch.uint8).view(-1, 65)
    return table[:, :64].reshape(-1, 1, 8, 8), table[:, 64].long()
