"""A store in a folder, for processes that may be killed at any moment.

Torch's `FileStore` appends to one file under a lock, in several writes: a process that is killed
between two of them leaves half an entry, at which all others then read for ever. Here each key is
a file that is there as a whole or not at all, and nobody holds a lock:

    group%2F3%2Fhello%2F0      a value: written beside, and then renamed
    count+                     a sum: a line for each that has added something
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

from torch.distributed import DistStoreError, Store

from phalanx.ipc import wait_until

__all__ = ["FolderStore"]


class FolderStore(Store):
    """What torch's stores do, in ``folder``, which is made where it is not there yet.

    Raises:
        DistStoreError: A key that is waited for does not come in time, or the folder is gone.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise DistStoreError(f"the folder of the job cannot be made: {error}") from error
        self._folder = folder
        self._me = secrets.token_hex(8)
        self._drafts = itertools.count()
        self._timeout = timedelta(seconds=300)

    def set_timeout(self, timeout: timedelta) -> None:
        """Say how long a key is waited for."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        draft = self._draft(value)
        draft.replace(self._value(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a value where there is none; return what is there then.

        Raises:
            DistStoreError: ``expected`` is a value: that cannot be done without a lock.
        """
        if expected:
            raise DistStoreError("Only what is not there yet can be compared and set in a folder.")
        draft = self._draft(desired)
        try:
            os.link(draft, self._value(key))
        except FileExistsError:
            pass
        finally:
            draft.unlink()
        return self.get(key)

    def _draft(self, value: str | bytes) -> Path:
        draft = self._folder / f".{self._me}-{next(self._drafts)}"
        try:
            draft.write_bytes(value.encode() if isinstance(value, str) else bytes(value))
        except OSError as error:
            raise DistStoreError(f"the folder of the job cannot be written: {error}") from error
        return draft

    def get(self, key: str) -> bytes:
        """Return a value, or a sum, when it is there."""
        self.wait([key])
        try:
            return self._value(key).read_bytes()
        except FileNotFoundError:
            return str(self.add(key, 0)).encode()

    def add(self, key: str, amount: int) -> int:
        """Add to a sum, and return what it is after that."""
        path = self._folder / f"{quote(key, safe='')}+"
        mine = f"{self._me}-{next(self._drafts)}"
        try:
            if amount:
                with path.open("ab", buffering=0) as file:  # one write: whole, and after all others
                    file.write(f"{amount} {mine}\n".encode())
            lines = path.read_text().splitlines() if path.exists() else []
        except OSError as error:
            raise DistStoreError(f"the folder of the job cannot be written: {error}") from error
        total = 0
        for line in lines:
            number, who = line.split()
            total += int(number)
            if who == mine:
                break
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all keys are there."""
        return all(self._paths(key) for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove a key; tell whether it was there."""
        found = self._paths(key)
        for path in found:
            path.unlink(missing_ok=True)
        return bool(found)

    deleteKey = delete_key  # what a `PrefixStore` around this one calls

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        seconds = (self._timeout if timeout is None else timeout).total_seconds()
        if not wait_until(lambda: self.check(keys), seconds):
            raise DistStoreError(f"{', '.join(keys)} did not come within {seconds:g} s")

    def _value(self, key: str) -> Path:
        return self._folder / quote(key, safe="")

    def _paths(self, key: str) -> list[Path]:
        path = self._value(key)
        return [each for each in (path, path.with_name(f"{path.name}+")) if each.exists()]
