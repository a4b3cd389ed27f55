"""What the CLI trains on: one value with its loaders and the shapes a model must fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["images", "tokens", "custom"]


@dataclass(frozen=True, kw_only=True)
class Data:
    """A training set, perhaps a test set, and what is known of their shapes.

    Args:
        name: The spec that it was opened by, such as ``"digits"``.
        kind: ``"images"``: float32 [B, C, H, W] with one class each. ``"tokens"``: int64 [B, T]
            with the next token of each. ``"custom"``: whatever the user's own object yields.
        train: An iterable of batches ``(inputs, targets)``, iterated once per epoch.
        test: The same, or None.
        input_shape: Shape of one sample without the batch dim, or None where it is not known.
        num_classes: How many values a target may take, or None where it is not known.
        description: One line for people.
    """

    name: str
    kind: Kind
    # A user's loader may yield any nested batch, so the element type is theirs.
    train: Iterable[Any]
    test: Iterable[Any] | None
    input_shape: tuple[int, ...] | None
    num_classes: int | None
    description: str
