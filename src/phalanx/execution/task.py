"""The work on one microbatch: what it is given, and what it leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from phalanx.replicas import MicrobatchRng, ProcessRng, Replica
from phalanx.types import Nested


@dataclass(kw_only=True, slots=True)
class MicrobatchContext:
    """One microbatch in the hands of one replica.

    Attributes:
        replica: The one that computes it.
        index: Which microbatch it is.
        batch: Its rows.
        rng: Its random numbers, entered around the user's code only.
    """

    replica: Replica
    index: int
    batch: Nested
    rng: MicrobatchRng | ProcessRng


class Task(ABC):
    """The work on one microbatch: called by a replica, under the caller's modes.

    Attributes:
        goes_back: Whether it is the backward pass, on its own, of an earlier run (a container's).
            Nothing is taken over from the source then, no buffers are collected, and a closed
            executor runs it, too.
    """

    goes_back: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, context: MicrobatchContext) -> Any:  # Any: the task's own result type
        """Compute the microbatch; leave gradients and buffers in the replica."""


@dataclass(frozen=True)
class MicrobatchResult:
    """The results of one microbatch for a trainer.

    Attributes:
        loss: Its mean loss.
        outputs: The module's outputs, detached; None where they were not asked for.
        targets: The microbatch's targets, on the same device.
    """

    loss: float
    outputs: Nested
    targets: Nested
