"""Calls callbacks with the events of a trainer, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from phalanx.callbacks import (
    Event,
    EventHandler,
    FitBegun,
    FitEnded,
    RanksChanged,
    StepDone,
    progress_for,
)
from phalanx.distributed import ElasticExchange
from phalanx.execution import ExecutorChoice


class EventDispatcher:
    """Calls callbacks with what has happened.

    Args:
        callbacks: Called with every event, in order, but for those that save: what they write
            holds what the others have counted of the event.
        choice: What was given as ``executor=``: workers may be lost, and ranks change.
    """

    def __init__(self, callbacks: Sequence[EventHandler], choice: ExecutorChoice) -> None:
        self._elastic = choice.elastic
        self._members = choice.elastic.members if choice.elastic else {}
        self._callbacks = tuple(sorted(callbacks, key=lambda each: getattr(each, "saves", False)))
        self._failures = choice.failures

    def dispatch(self, event: Event) -> None:
        """Call all callbacks with ``event``; before a `StepDone`, with what was lost in that step.

        They are called with the step also if one raises at a lost worker or changed ranks.
        """
        try:
            if isinstance(event, StepDone):
                if self._failures.unreported:
                    self.dispatch_failures(event.step)
                if self._elastic is not None:
                    self._dispatch_ranks(event.step, self._elastic)
        finally:
            for callback in self._callbacks:
                callback(event)

    def _dispatch_ranks(self, step: int, elastic: ElasticExchange) -> None:
        """Call callbacks with the ranks lost or joined since the last call, if there are any."""
        before, now = self._members, elastic.members
        if before.keys() == now.keys():
            return
        self._members = now
        changed = RanksChanged(
            step=step,
            rank=elastic.rank,
            ranks=tuple(elastic.ranks),
            pids=tuple(each.process[0] for each in now.values()),
            lost=tuple(each.rank for number, each in before.items() if number not in now),
            came=tuple(each.rank for number, each in now.items() if number not in before),
        )
        self.dispatch(changed)

    @contextmanager
    def dispatching_fit(
        self,
        begun: FitBegun,
        ended: Callable[[], FitEnded],
        *,
        progress: bool | None,
        trainer: Any,
    ) -> Iterator[None]:
        """Call callbacks at the beginning of a `fit`, the body, and at its end, after errors too.

        Args:
            ended: Returns the last event.
            progress: Whether this `fit` is shown; None: where somebody looks on.
        """
        callbacks = self._callbacks
        shown = progress_for(progress, callbacks)
        if shown is not None:
            shown.attach(trainer)
            self._callbacks = (*callbacks, shown)
        try:
            self.dispatch(begun)
            yield
        except BaseException as error:
            try:
                self._dispatch_to_all(ended())
            except Exception as failure:  # the first cause is what the user must see
                error.add_note(f"Also failed: {type(failure).__name__}: {failure}")
            raise
        else:
            self._dispatch_to_all(ended())
        finally:
            self._callbacks = callbacks

    def _dispatch_to_all(self, event: Event) -> None:
        """Call every callback, also after one that raises: each may have something to close."""
        with ExitStack() as calls:
            for callback in reversed(self._callbacks):
                calls.callback(callback, event)

    def dispatch_failures(self, step: int) -> None:
        """Call callbacks with the workers lost since the last call, in update ``step``."""
        for lost in self._failures.drain(step):
            self.dispatch(lost)
