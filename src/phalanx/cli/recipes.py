"""How long and how fast each model is trained on each kind of data, unless the user says otherwise.

All are for ``torch.optim.AdamW`` with its other defaults and a constant learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Defaults of one training.

    Args:
        epochs: Times through the training set.
        batch_size: Samples, or windows of text, per optimizer step.
        lr: AdamW's learning rate, constant.
    """

    epochs: int
    batch_size: int
    lr: float


_RECIPE_BY_PAIR = {
    ("digits", "mlp"): Recipe(epochs=20, batch_size=64, lr=1e-3),
    ("digits", "cnn"): Recipe(epochs=10, batch_size=64, lr=2e-3),
    ("idx", "mlp"): Recipe(epochs=5, batch_size=128, lr=1e-3),
    ("idx", "cnn"): Recipe(epochs=4, batch_size=128, lr=2e-3),
    ("text", "gpt"): Recipe(epochs=1, batch_size=32, lr=2e-3),
}
_OTHERWISE = Recipe(epochs=5, batch_size=64, lr=1e-3)


def defaults_for(data: str, model: str) -> Recipe:
    """Look up the recipe for two specs as given on the command line.

    Specs and not opened things, because data cannot be opened without its batch size.

    Example:
        >>> defaults_for("digits", "cnn").batch_size
        64
        >>> defaults_for("my_data:train", "my_model:Net").epochs
        5
    """
    return _RECIPE_BY_PAIR.get((data.partition(":")[0], model), _OTHERWISE)


def default_model(data: str) -> str:
    """Name the built-in model that suits a data spec: ``gpt`` for text, else ``cnn``.

    Example:
        >>> default_model("text:stdlib"), default_model("digits")
        ('gpt', 'cnn')
    """
    return "gpt" if data.partition(":")[0] == "text" else "cnn"
