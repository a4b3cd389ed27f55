"""A table on disk: one file of tensors, and one of text that makes it count.

    <name>-<digest>.safetensors    values and states; written, synced, renamed
    <name>.json                    what it is, and which file of tensors; the last thing renamed

Until the text is renamed, the snapshot before it is the one that counts. A digest is of the
content, so two snapshots with the same content share a file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.files import open_regular, read_text, sync_to_disk, written_whole
from phalanx.plan import check_argument
from phalanx.tables.spec import TableSpec
from phalanx.tables.updaters import state_dtype

__all__ = ["load_parts", "read_directory", "save_parts"]

Bytes = NDArray[np.uint8]

_VERSION = 1
_MOST_MANIFEST_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 23  # given to the disk at a time
_ALIGN_BYTES = 4096  # of memory, places and lengths that can go to a disk past the cache
_NUM_BUFFERS = 3  # one is filled or hashed, one is written, one waits
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int64: "I64",
}


def read_directory(given: object) -> Path:
    """Return the folder that a user named.

    Raises:
        ConfigError: It is neither a string nor a path.
    """
    check_argument(isinstance(given, str | os.PathLike), "directory", "be a path", given)
    return Path(given)  # type: ignore[arg-type]


def save_parts(spec: TableSpec, parts: list[Tensor], directory: Path) -> Path:
    """Write a table down, and return the file of text that names everything.

    Raises:
        CheckpointError: The directory cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        whole = directory / f".{spec.name}.{os.getpid()}.{threading.get_ident()}.tmp"
        digest = _write(whole, dict(zip(_part_names(spec), parts, strict=True)))
        data = directory / f"{spec.name}-{digest[:16]}.safetensors"
        manifest = directory / f"{spec.name}.json"
        text = {"version": _VERSION, "table": spec.as_mapping(), "file": data.name}
        with _alone_in(directory):  # another's clearing up must not come between the two files
            os.replace(whole, data)
            sync_to_disk(directory)
            with written_whole(manifest) as draft:
                draft.write_text(json.dumps({**text, "sha256": digest}, indent=1))
                sync_to_disk(draft)
            sync_to_disk(directory)
            _remove_older(directory, spec.name, data)
    except OSError as exc:
        raise CheckpointError(
            f"`directory` must be a folder that a snapshot can be written to, but is "
            f"{str(directory)!r} ({exc.strerror or exc})."
        ) from exc
    return manifest


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Hold the folder against other workers that write a snapshot to it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _part_names(spec: TableSpec) -> list[str]:
    states = [f"state {i}" for i in range(len(spec.updater.states))]
    return [*(["keys"] if spec.has_keys else []), "values", *states]


def _write(path: Path, parts: dict[str, Tensor]) -> str:
    """Write a file of tensors, synced, and return its digest.

    A thread writes one block while the next is hashed. ``save_file`` would copy everything first,
    and the digest would read it back.
    """
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        _bypass_cache(file)
        with _Writer(file) as writer:
            for block in _blocks(_pieces(parts), writer.take):
                writer.put(block)
                digest.update(block.data)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _pieces(parts: dict[str, Tensor]) -> Iterator[Bytes]:
    """Yield the bytes of a file of safetensors: length of the header, header, tensors."""
    header: dict[str, object] = {}
    end = 0
    for name, part in parts.items():
        begin, end = end, end + part.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[part.dtype],
            "shape": list(part.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield np.frombuffer(len(text).to_bytes(8, "little") + text, dtype=np.uint8)
    for part in parts.values():
        yield part.reshape(-1).view(torch.uint8).numpy()


def _blocks(pieces: Iterable[Bytes], take: Callable[[], Bytes]) -> Iterator[Bytes]:
    """Yield the same bytes in buffers, each of them full but the last."""
    buffer, filled = take(), 0
    for piece in pieces:
        while len(piece):
            if filled == len(buffer):
                yield buffer
                buffer, filled = take(), 0
            count = min(len(piece), len(buffer) - filled)
            buffer[filled : filled + count] = piece[:count]
            piece, filled = piece[count:], filled + count
    yield buffer[:filled]


class _Writer:
    """A thread that writes blocks to a file, in their order.

    Args:
        file: Where they go.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        self._given: queue.SimpleQueue[Bytes | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="phalanx snapshot", daemon=True)
        for _ in range(_NUM_BUFFERS):
            self._free.put(_aligned_buffer())

    def take(self) -> Bytes:
        """Return a buffer to be filled, once one is free.

        Raises:
            OSError: An earlier block could not be written.
        """
        buffer = self._free.get()
        self._raise_failure()
        return buffer

    def put(self, block: Bytes) -> None:
        """Have a block written: a buffer that was taken, or its beginning."""
        self._given.put(block)

    def __enter__(self) -> _Writer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._given.put(None)
        self._thread.join()
        if kind is None:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _serve(self) -> None:
        while (block := self._given.get()) is not None:
            try:
                if self._failure is None:
                    _write_all(self._file, block.data)
            except BaseException as exc:
                self._failure = exc
            self._free.put(block)


def _aligned_buffer() -> Bytes:
    memory = torch.empty(_BLOCK_BYTES + _ALIGN_BYTES, dtype=torch.uint8, device="cpu")
    start = -memory.data_ptr() % _ALIGN_BYTES
    return memory[start : start + _BLOCK_BYTES].numpy()


def _bypass_cache(file: io.FileIO, wanted: bool = True) -> None:
    """Let blocks go to the disk from where they are, if the file system can do that.

    Through the cache each page is copied once more, to memory that the kernel has to find, and of
    a large file that takes longer than the disk.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)


def _write_all(file: io.FileIO, block: memoryview) -> None:
    if len(block) % _ALIGN_BYTES:
        _bypass_cache(file, False)
    while len(block):
        try:
            block = block[file.write(block) :]
        except OSError as exc:
            if exc.errno != errno.EINVAL or not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
                raise
            _bypass_cache(file, False)  # such blocks are too small for this file system


def _remove_older(directory: Path, name: str, kept: Path) -> None:
    for file in directory.glob(f"{name}-{'[0-9a-f]' * 16}.safetensors"):
        if file != kept:
            with contextlib.suppress(OSError):  # somebody else did, or reads it
                file.unlink()


def load_parts(spec: TableSpec, directory: Path) -> list[Tensor]:
    """Read what :func:`save_parts` wrote for a table of this name.

    Raises:
        CheckpointError: It is missing, damaged, or of another shape, dtype or updater.
    """
    manifest = directory / f"{spec.name}.json"
    try:
        found = json.loads(read_text(manifest, max_bytes=_MOST_MANIFEST_BYTES))
        data = directory / Path(found["file"]).name  # never elsewhere
        theirs, digest, version = found["table"], found["sha256"], found["version"]
    except FileNotFoundError:
        raise CheckpointError(
            f"`directory` must hold a snapshot of table {spec.name!r}, but {str(manifest)!r} is "
            f"not there. The table must have the name that it had then."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise CheckpointError(
            f"{str(manifest)!r} must describe a snapshot of table {spec.name!r}, but does not "
            f"({exc})."
        ) from exc
    if version != _VERSION:
        raise CheckpointError(
            f"{str(manifest)!r} must be of version {_VERSION}, but is of {version!r}."
        )
    _refuse_other(spec, theirs, manifest)
    return _read_parts(spec, data, digest)


def _refuse_other(spec: TableSpec, theirs: object, manifest: Path) -> None:
    if not isinstance(theirs, dict):
        raise CheckpointError(f"{str(manifest)!r} must describe a table, but does not.")
    updater = theirs.get("updater")
    found = {
        "shape": theirs.get("shape"),
        "dtype": theirs.get("dtype"),
        "updater": updater.get("name") if isinstance(updater, dict) else updater,
    }
    ours = spec.as_mapping()
    wanted = {
        "shape": ours["shape"],
        "dtype": ours["dtype"],
        "updater": spec.updater.options()["name"],
    }
    for field, value in wanted.items():  # learning rates and the like may be others
        if found[field] != value:
            raise CheckpointError(
                f"`{field}` of the snapshot {str(manifest)!r} must be that of table "
                f"{spec.name!r} ({value!r}), but is {found[field]!r}."
            )


def _read_parts(spec: TableSpec, data: Path, digest: str) -> list[Tensor]:
    try:
        with open_regular(data) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise CheckpointError(f"{str(data)!r} must be as it was written, but is damaged.")
            # The open file, and not whatever has its name by now.
            tensors = load_file(f"/proc/self/fd/{file.fileno()}")
        parts = [tensors[name] for name in _part_names(spec)]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError) as exc:
        raise CheckpointError(
            f"{str(data)!r} must hold the tensors of table {spec.name!r}, but does not ({exc})."
        ) from exc
    _check_parts(spec, parts, data)
    return parts


def _check_parts(spec: TableSpec, parts: list[Tensor], data: Path) -> None:
    """Refuse tensors of another shape or dtype than the table's, and keys that stand twice."""
    rows = parts[0].numel() if spec.has_keys else spec.rows
    wanted: list[tuple[tuple[int, ...], torch.dtype]] = []
    if spec.has_keys:
        wanted.append(((rows,), torch.int64))
    wanted.append(((rows, spec.cols), spec.dtype))
    for kind in spec.updater.states:
        wanted.append(((rows, spec.cols if kind == "element" else 1), state_dtype(spec.dtype)))
    for name, part, (shape, dtype) in zip(_part_names(spec), parts, wanted, strict=True):
        if tuple(part.shape) != shape or part.dtype != dtype:
            raise CheckpointError(
                f"{str(data)!r} must hold {name} as {dtype}, {shape}, but holds {part.dtype}, "
                f"{tuple(part.shape)}."
            )
    if spec.has_keys and len(parts[0].unique()) != rows:
        raise CheckpointError(
            f"{str(data)!r} must hold each key once, but holds {rows - len(parts[0].unique())} "
            "more."
        )
