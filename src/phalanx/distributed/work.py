"""An operation under way, and the work that a call returns for it."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from phalanx.clock import now_s
from phalanx.distributed.tensors import FlatTensor
from phalanx.torch_internals import uncompiled

__all__ = ["GroupOperation", "SharedWork", "Steps", "Wait", "uncompiled_methods"]

AnyClass = TypeVar("AnyClass", bound=type)
_CALLED_BY_TORCH = ("_allgather_base", "_reduce_scatter_base")


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
"""An operation: its calls, one after the other, with what this rank does between them."""


@dataclass(slots=True, eq=False)
class GroupOperation:
    """One operation of a group."""

    title: str  # in messages
    steps: Steps
    filled: Sequence[FlatTensor]  # by the steps; copied back at the end
    result: Any  # the tensors that it fills, in nested lists, as torch gives them
    timeout_s: float
    deadline_s: float = field(init=False)
    call: Wait | None = None  # that it is in
    error: BaseException | None = None
    done: bool = False  # well or not
    futures: list[Future[Any]] = field(default_factory=list)  # that do not know of the end yet

    def __post_init__(self) -> None:
        self.deadline_s = now_s() + self.timeout_s

    def advance(self, patience_s: float) -> bool:
        """Run until it ends, or others are late for so long; tell whether it has ended."""
        while not self.done:
            if self.call is None:
                self.call = next(self.steps, None)
            if self.call is None:
                for flat in self.filled:
                    flat.write_back()
                self.end()
            elif self.call.advance(patience_s):
                self.call = None
            else:
                return False
        return True

    def end(self, error: BaseException | None = None) -> None:
        """Mark the end; :meth:`settle` tells the futures.

        A work that somebody keeps must not keep the tensors and connections of its operation.
        """
        self.error = error
        self.done = True
        self.steps, self.call, self.filled = iter(()), None, ()

    def settle(self) -> None:
        """Tell each future of the end, once. Their callbacks run here, and may begin operations."""
        while self.futures:
            with suppress(IndexError):  # another thread has taken the last one
                self.futures.pop().set_result(self.result)

    def raise_error(self) -> None:
        """Raise why it has failed, if it has."""
        error = self.error
        if error is not None:
            # A copy: several callers may get one error, and each adds its own traceback.
            raise copy.copy(error).with_traceback(error.__traceback__) from error.__cause__


def uncompiled_methods(cls: AnyClass) -> AnyClass:
    """Have the public methods of ``cls`` run outside of any compiled code.

    They wait for other processes and keep state on the group, which no graph can hold.
    """
    for name, method in list(vars(cls).items()):
        is_public = not name.startswith("_") or name in _CALLED_BY_TORCH
        if is_public and isinstance(method, FunctionType):
            setattr(cls, name, uncompiled(method))
    return cls


@uncompiled_methods
class SharedWork(dist.Work):
    """A collective call under way or finished; what ``async_op=True`` returns."""

    def __init__(
        self, operation: GroupOperation, drive: Callable[[GroupOperation, float | None], None]
    ) -> None:
        super().__init__()
        self._operation = operation
        self._drive = drive

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Block until the operation has ended, and raise if it has failed.

        The group fails after ``timeout`` from now on; zero stands for the call's own limit.
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

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors; in C++ a failure is a ``RuntimeError`` with our words."""
        operation = self._operation
        future: Future[Any] = Future()

        def checked(future: Future[Any]) -> Any:
            operation.raise_error()
            return future.value()

        checked_future = future.then(checked)
        operation.futures.append(future)
        if operation.done:  # after the append: else no thread might tell it
            operation.settle()
        return checked_future

    getFuture = get_future
