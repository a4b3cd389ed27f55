"""Numbers of workers as errors say them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["say_numbers"]


def say_numbers(noun: str, numbers: Sequence[int]) -> str:
    """Say ``[0, 1, 2, 5]``, in ascending order and at least one, as "Workers 0–2 and 5".

    Example:
        >>> say_numbers("Worker", [3]), say_numbers("Worker", [0, 1, 2, 5])
        ('Worker 3', 'Workers 0–2 and 5')
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    words = [str(s[0]) if len(s) == 1 else f"{s[0]}–{s[-1]}" for s in spans]
    listed = ", ".join(words[:-1]) + " and " * (len(words) > 1) + words[-1]
    return f"{noun}{'s' if len(numbers) > 1 else ''} {listed}"
