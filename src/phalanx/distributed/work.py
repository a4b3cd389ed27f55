"""An operation of a group, as its caller and its lane see it."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from phalanx.clock import now_s
from phalanx.distributed.tensors import FlatTensor
from phalanx.torch_internals import uncompiled

__all__ = ["SharedWork", "Steps", "Wait", "uncompiled_methods"]

AnyClass = TypeVar("AnyClass", bound=type)


class Wait(Protocol):
    """A part of an operation that waits for other ranks: in shared memory, or over the network."""

    grace_s: float  # added to the timeout, so that the others can name the late rank

    def advance(self, patience_s: float) -> bool:
        """Run until it ends, or others are late for so long; tell whether it has ended."""

    def find_error(self, title: str) -> BaseException | None:
        """Return why it cannot end well, as far as this rank sees."""

    def timeout_error(self, title: str, timeout_s: float) -> BaseException | None:
        """Return the error that names the late ranks; None where no rank is late."""


Steps = Iterator[Wait]
"""An operation: its waits, one after the other, and between them the work of this rank."""


def uncompiled_methods(cls: AnyClass) -> AnyClass:
    """Have the methods of ``cls`` that override torch's run outside of any compiled code.

    They wait for other processes and keep state on the group, which no graph can hold.
    """
    for name, method in list(vars(cls).items()):
        is_torchs = hasattr(cls.__base__, name) and not name.startswith("__")
        if is_torchs and isinstance(method, FunctionType):
            setattr(cls, name, uncompiled(method))
    return cls


@uncompiled_methods
class SharedWork(dist.Work):
    """An operation of a group, under way or finished; what ``async_op=True`` returns.

    Args:
        title: Its name in messages.
        steps: See `Steps`.
        filled: What the steps fill; copied back at the end.
        result: The same, or all of a coalesced call, in nested lists, as torch gives them.
        drive: Runs the operation until it has ended; it fails after so many more seconds.
        wake: Called when a future waits for the operation, so that a thread runs it.
    """

    def __init__(
        self,
        title: str,
        steps: Steps,
        filled: Sequence[FlatTensor],
        result: Any,
        timeout_s: float,
        drive: Callable[[SharedWork, float | None], None],
        wake: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.title = title
        self.timeout_s = timeout_s
        self.deadline_s = now_s() + timeout_s
        self.current: Wait | None = None  # that it is in
        self.error: BaseException | None = None
        self.done = False  # well or not
        self.futures: list[Future[Any]] = []  # that do not know of the end yet
        self._steps = steps
        self._filled = filled
        self._result = result
        self._drive = drive
        self._wake = wake

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Block until the operation has ended, and raise if it has failed.

        The group fails after ``timeout`` from now on; zero stands for the call's own limit.
        """
        if not self.done:
            self._drive(self, timeout.total_seconds() or None)
        self.raise_error()
        return True

    def synchronize(self) -> None:
        """Do what :meth:`wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell whether the operation has ended, well or not."""
        return self.done

    def is_success(self) -> bool:
        """Tell whether the operation has ended well."""
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        """Return why the operation has failed, if it has."""
        return self.error

    def result(self) -> list[Tensor]:
        """Return the tensors that the operation fills."""
        return list(self._result)

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors; in C++ a failure is a ``RuntimeError`` with our words."""
        future: Future[Any] = Future()

        def checked(future: Future[Any]) -> Any:
            self.raise_error()
            return future.value()

        checked_future = future.then(checked)
        self.futures.append(future)
        if self.done:  # after the append: else no thread might tell it
            self.notify()
        elif self._wake is not None:
            self._wake()
        return checked_future

    getFuture = get_future

    # --- for the lane ----------------------------------------------------------------------------

    def advance(self, patience_s: float) -> bool:
        """Run until it ends, or others are late for so long; tell whether it has ended."""
        while not self.done:
            if self.current is None:
                self.current = next(self._steps, None)
            if self.current is None:
                for flat in self._filled:
                    flat.write_back()
                self.end()
            elif self.current.advance(patience_s):
                self.current = None
            else:
                return False
        return True

    def end(self, error: BaseException | None = None) -> None:
        """Mark the end; :meth:`notify` sets the futures.

        A work that somebody keeps must not keep tensors and connections.
        """
        self.error = error
        self.done = True
        self._steps, self.current, self._filled = iter(()), None, ()

    def notify(self) -> None:
        """Set each future, once. Their callbacks run here, and may begin operations."""
        while self.futures:
            with suppress(IndexError):  # another thread has taken the last one
                self.futures.pop().set_result(self._result)

    def raise_error(self) -> None:
        """Raise why it has failed, if it has."""
        error = self.error
        if error is not None:
            # A copy: several callers may get one error, and each adds its own traceback.
            raise copy.copy(error).with_traceback(error.__traceback__) from error.__cause__
