"""Exchange between the ranks of one group, apart from a user's own collectives.

# Note [Latest works]
Each of gloo's two threads lets go of an operation's work a moment after it has ended. The last to
hold a work frees its tensors, with Python's lock. If Python ends meanwhile, the process dies of
that: "terminate called without an active exception". So the two latest works are kept here.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from phalanx.distributed.job_store import open_store, this_host
from phalanx.environment import read_place
from phalanx.errors import ConfigError, PeerError, PeerLost, PhalanxError, StateError
from phalanx.ipc import ProcessIdentity, wait_until

__all__ = ["Exchange", "ProcessGroup", "differing_names", "nccl_is_here", "num_default_ranks"]

ProcessGroup = dist.ProcessGroup

_LENGTH = 8  # bytes that a document's length takes
_HEAD = _LENGTH + 24  # with its purpose
_FIRST = 4096  # that travel at once: the head, and all of most documents
_END_S = 0.2  # between the end of a process's connections and its own
_latest_works: deque[dist.Work] = deque(maxlen=2)  # see Note [Latest works]


class Exchange:
    """A process group, for documents and for slices of memory.

    Every method is a collective: all ranks call it, in the same order. Where a launcher has started
    the process and the script has made no group, this makes the default one.

    Args:
        group: Default: the default group.

    Attributes:
        rank: Our place in the group.
        ranks: What errors call the ranks, by place.
        size: How many ranks there are.
        device: Where tensors must lie that this group carries.
        overlaps: Whether a call that was begun continues while this process computes.
        about: What each rank trains, by rank, from :meth:`match_ranks` on.

    Raises:
        StateError: There is no group, and no launcher has started this process.
    """

    # Of groups whose ranks may change, which `ElasticExchange` has:
    newcomers_wait = False  # whether processes wait to join, as far as this rank knows
    newcomers_agreed = False  # the same as rank 0 knew it in the last run: all ranks act on it
    is_behind = False  # whether the others have done one run more
    is_late = False  # whether this rank came when the others had begun, and has done no run yet

    _group: Any = None  # a ProcessGroup; torch's stubs lack its operations

    def __init__(self, group: ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            _make_default_group()
        self.about: list[Mapping[str, Any]] = []  # Any: JSON
        self._group = group or dist.group.WORLD
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks: Sequence[int] = range(self.size)
        self._peers: dict[int, ProcessIdentity] = {}  # by rank, of this host
        self.overlaps = getattr(self._group, "overlaps", True)
        self.device = torch.device("cpu")
        kinds = {each.type for each in self._group._device_types}
        if "cpu" not in kinds:
            self.device = torch.device(min(kinds), torch.accelerator.current_device_index())

    def match_ranks(self, about: Mapping[str, Any], tensors: Iterable[Tensor]) -> None:
        """Compare what all ranks train, and give them the values that rank 0 has.

        Args:
            about: What this one trains; all but "replicas" and "seed" must be alike.
            tensors: What rank 0 gives.

        Raises:
            ConfigError: Ranks differ; every rank hears of it.
        """
        own = [about, this_host(), *ProcessIdentity.current()]
        told = [json.loads(each) for each in self.gather(json.dumps(own).encode(), "begin")]
        self.about = [each for each, *_ in told]
        here = [rank for rank, (_, host, *_) in enumerate(told) if host == own[1]]
        self._peers = {rank: ProcessIdentity(*told[rank][2:]) for rank in here}
        for rank, each in enumerate(self.about):
            differing = differing_names(each, self.about[0])
            if differing:
                raise ConfigError(
                    "All ranks must train the same model in the same way, but rank "
                    f"{rank} has other {differing} than rank 0. Make it from the same arguments in "
                    "every process."
                )
        self.broadcast(tensors)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks the values that rank 0 has in these tensors, as they begin."""
        for tensor in tensors if self.size > 1 else ():
            whole = tensor.detach().contiguous()
            if whole.numel():
                self._start(self._group.broadcast, [whole])()
            if whole.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(whole)

    def regroup(self) -> None:
        """Form another group if a rank was lost; only `ElasticExchange` can."""

    def mark_done(self) -> None:
        """Count a run that is done here."""

    def gather(self, document: bytes, purpose: str) -> list[bytes]:
        """Return every rank's document, by rank.

        Args:
            purpose: What the ranks are about to do.

        Raises:
            ConfigError: They are about to do different things; every rank hears of it.
        """
        head = len(document).to_bytes(_LENGTH, "little") + purpose.encode().ljust(_HEAD - _LENGTH)
        whole = head + document
        found = self._gather(whole[:_FIRST], _FIRST)
        purposes = [each[_LENGTH:_HEAD].decode().strip() for each in found]
        if len({*purposes}) > 1:
            with contextlib.suppress(PeerError):  # nobody leaves before all have heard
                self._gather(b"", 1)
            raise _differing(purposes, self.ranks)
        stops = [_HEAD + int.from_bytes(each[:_LENGTH], "little") for each in found]
        if max(stops) > _FIRST:
            rests = self._gather(whole[_FIRST:], max(stops) - _FIRST)
            found = [first + rest for first, rest in zip(found, rests, strict=True)]
        return [each[_HEAD:stop] for each, stop in zip(found, stops, strict=True)]

    def _gather(self, own: bytes, length: int) -> list[bytes]:
        """Return every rank's bytes, by rank, filled up to ``length``."""
        sent = torch.frombuffer(bytearray(own.ljust(length, b"\0")), dtype=torch.uint8)
        sent = sent.to(self.device)
        found = sent.new_empty((self.size, length))
        self.start_all_gather(sent, found.view(-1))()
        return [row.numpy().tobytes() for row in found.cpu()]

    # Each of these begins an operation, and returns a function that waits until it has ended.

    def start_all_to_all(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, sizes: Sequence[int]
    ) -> Callable[[], None]:
        """Send each rank a slice of ``sent`` and receive one from each.

        Args:
            sent: 1-D; the slices by receiver, one after the other.
            sent_sizes: Elements of each.
            received: 1-D, of the same dtype; the slices by sender.
            sizes: Elements of each.
        """
        return self._start(self._group.alltoall_base, received, sent, list(sizes), list(sent_sizes))

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Add up all ranks' tensors, in place, in the order of the backend."""
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return self._start(self._group.allreduce, [real])

    def start_all_gather(self, own: Tensor, found: Tensor) -> Callable[[], None]:
        """Join all ranks' tensors ``own``, 1-D and of one size, in ``found``."""
        return self._start(self._group._allgather_base, found, own)

    # Any: the arguments of torch's operations.
    def _start(self, operation: Callable[..., dist.Work], *args: Any) -> Callable[[], None]:
        with self._translating_errors():
            work = operation(*args)
        _latest_works.append(work)

        def wait() -> None:
            with self._translating_errors():
                work.wait()

        return wait

    @contextlib.contextmanager
    def _translating_errors(self) -> Iterator[None]:
        """Raise `PeerLost` for another backend's error; our own backend raises ours itself."""
        try:
            yield
        except PhalanxError:
            raise
        except RuntimeError as error:
            wait_until(lambda: self._find_gone() is not None, _END_S)
            gone = self._find_gone()
            who = "one is gone or late" if gone is None else f"rank {gone} is gone"
            raise PeerLost(
                f"All ranks must take part in every step, but {who}: {error}. The model may be in "
                "the middle of a step: start the job again from its last checkpoint.",
                gone,
            ) from error

    def _find_gone(self) -> int | None:
        """Return a rank of this host whose process has ended, if there is one."""
        ranks = self._peers.items()
        return next((rank for rank, process in ranks if not process.alive()), None)


def _make_default_group() -> None:
    place = read_place()
    if place is None:
        raise StateError(
            "Ranks must be in a process group, but `torch.distributed` has none. Start the script "
            "with `phalanx launch`, torchrun, mpirun or srun, or call "
            "`torch.distributed.init_process_group()` first, in every process of the job."
        )
    store = open_store(place, default_pg_timeout.total_seconds())
    backend = "cpu:gloo,cuda:nccl" if nccl_is_here() else "phalanx"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size)


def num_default_ranks() -> int:
    """Return the number of ranks of torch's default group, 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def nccl_is_here() -> bool:
    """Tell whether this torch has NCCL, and this host a GPU."""
    return dist.is_nccl_available() and torch.cuda.is_available()


# Any: JSON.
def differing_names(about: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """Name what one rank would train otherwise than another."""
    names = [name for name in first if about.get(name) != first[name]]
    return ", ".join(name for name in names if name not in ("replicas", "seed"))


def _differing(purposes: Sequence[str], ranks: Sequence[int]) -> ConfigError:
    """Say which rank is about to do something else than the first."""
    place = next(place for place, each in enumerate(purposes) if each != purposes[0])
    return ConfigError(
        f"All ranks must do the same in the same order, but rank {ranks[place]} is about to "
        f"{purposes[place]} while rank {ranks[0]} is about to {purposes[0]}. Make the same "
        "calls in every rank, in the same order."
    )
