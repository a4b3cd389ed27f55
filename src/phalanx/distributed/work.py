"""An operation under way, and the work that a call returns for it."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from phalanx.clock import now_s
from phalanx.distributed.collective_buffers import Need, RemoteNeed, Steps
from phalanx.distributed.uncompiled_methods import uncompiled_methods

__all__ = ["PendingOperation", "SharedWork"]


def _no_steps() -> Steps:
    yield from ()


@dataclass(slots=True, eq=False)
class PendingOperation:
    """One operation under way.

    Attributes:
        title: What it is called in messages.
        steps: The operation.
        result: Tensors that it fills.
        need: The ranks that it waits for, where it does.
        error: Why it has failed.
        timeout_s: How long it may take, from the call.
        deadline_s: When that has passed.
        done: Whether it has ended, well or not.
        futures: Those that have not been told of the end yet.
    """

    title: str
    steps: Steps
    result: Any  # nested lists of tensors, as torch gives them
    timeout_s: float
    deadline_s: float = field(init=False)
    need: Need | RemoteNeed | None = None
    error: BaseException | None = None
    done: bool = False
    futures: list[Future[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.deadline_s = now_s() + self.timeout_s

    def end(self, error: BaseException | None = None) -> None:
        """Mark the end; the futures are told by :meth:`settle`.

        Whoever keeps the work must not keep what the operation was made of: a connection, say,
        whose other end waits for it to be closed.
        """
        self.error = error
        self.done = True
        self.steps = _no_steps()

    def settle(self) -> None:
        """Tell each future of the end, once; their callbacks run here.

        They are the user's code and may begin another operation. So this is called after
        :meth:`end`, and without any lock.
        """
        while self.futures:
            with suppress(IndexError):  # another thread has taken the last one
                self.futures.pop().set_result(self.result)

    def raise_error(self) -> None:
        """Raise why it has failed, if it has."""
        error = self.error
        if error is not None:
            # A copy: one error may be told to many callers, and each adds its own traceback.
            raise copy.copy(error).with_traceback(error.__traceback__) from error.__cause__


@uncompiled_methods
class SharedWork(dist.Work):
    """A collective call under way or finished; what ``async_op=True`` returns.

    Attributes:
        sources: The sender of what a receive has taken, once it has.
    """

    def __init__(
        self, operation: PendingOperation, drive: Callable[[PendingOperation, float | None], None]
    ) -> None:
        super().__init__()
        self._operation = operation
        self._drive = drive
        self.sources: list[int] = []

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Block until the operation has ended, and raise if it has failed.

        Args:
            timeout: At most so long from now on, beyond which the group fails; zero for the
                call's own limit.
        """
        operation = self._operation
        if not operation.done:
            self._drive(operation, timeout.total_seconds() or None)
        operation.raise_error()
        return True

    def synchronize(self) -> None:
        """Do what :meth:`wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell whether the operation has ended, well or not."""
        return self._operation.done

    def is_success(self) -> bool:
        """Tell whether the operation has ended well."""
        return self._operation.done and self._operation.error is None

    def exception(self) -> BaseException | None:
        """Return why the operation has failed, if it has."""
        return self._operation.error

    def result(self) -> list[Tensor]:
        """Return the tensors that the operation fills."""
        return list(self._operation.result)

    def source_rank(self) -> int:
        """Return the sender of what a receive has taken."""
        return self.sources[0] if self.sources else -1

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors; in C++ a failure is a ``RuntimeError`` with our words."""
        operation = self._operation
        future: Future[Any] = Future()

        def checked(future: Future[Any]) -> Any:
            operation.raise_error()
            return future.value()

        told = future.then(checked)
        operation.futures.append(future)
        if operation.done:  # asked for after the append: else no thread might tell it
            operation.settle()
        return told

    getFuture = get_future
