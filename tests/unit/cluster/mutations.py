"""Frames that almost are ours."""

from __future__ import annotations

import random
from collections.abc import Sequence


def mutated(chance: random.Random, frame: bytes) -> bytes:
    """Return a frame with one to four bytes changed, now and then cut short."""
    changed = bytearray(frame)
    for _ in range(chance.randint(1, 4)):
        if changed:
            changed[chance.randrange(len(changed))] = chance.randrange(256)
    if changed and chance.random() < 0.1:
        del changed[chance.randrange(len(changed)) :]
    return bytes(changed)


def mutated_message(chance: random.Random, frames: Sequence[bytes]) -> list[bytes]:
    """Return a message of which a frame or two are changed, or that has others than it should."""
    changed = list(frames)
    for _ in range(chance.randint(1, 2)):
        at = chance.randrange(len(changed))
        changed[at] = mutated(chance, changed[at])
    if chance.random() < 0.3:
        changed = chance.choices(changed, k=chance.randint(0, 5)) or [b""]
    return changed
