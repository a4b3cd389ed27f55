"""Bytes that almost are ours."""

from __future__ import annotations

import random


def mutated(chance: random.Random, frame: bytes) -> bytes:
    """Return bytes with one to four of them changed, now and then cut short."""
    changed = bytearray(frame)
    for _ in range(chance.randint(1, 4)):
        if changed:
            changed[chance.randrange(len(changed))] = chance.randrange(256)
    if changed and chance.random() < 0.1:
        del changed[chance.randrange(len(changed)) :]
    return bytes(changed)
