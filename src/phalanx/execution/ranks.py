"""A trainer's replicas in several processes of one job, each with its own range of microbatches.

Every rank runs the same script over the same batches. It computes its range, and sends the
results to the others (`rank_messages`). Then gradients are added over all ranks (`rank_reduction`),
and every rank steps all parameters, as in `torch.nn.parallel.DistributedDataParallel`.

Ranks may be lost and others come between two steps, where the exchange allows it: see
`elastic_exchange` in `phalanx.distributed`.
"""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.distributed import Exchange, GroupChanged
from phalanx.errors import ConfigError, PeerError
from phalanx.execution.rank_messages import RankMessage, add_statistics
from phalanx.execution.rank_reduction import RankReduction
from phalanx.execution.run import Gradients, PartialSum, RunResult, Task
from phalanx.execution.threads import ThreadExecutor
from phalanx.plan import SummationTree, flatten, workload_sizes
from phalanx.types import Nested

T = TypeVar("T")
_TRACED = 1024  # elements of each leaf of a microbatch that tell one batch from another
_SPREAD = 2_654_435_761  # a prime, as in Fibonacci hashing
_RUN = "run a batch"  # what ranks wait in, for errors


class RankExecutor(ThreadExecutor):
    """This rank's replicas, a part of the job's; at first all take rank 0's tensors.

    A run of ranks that may be lost raises `GroupChanged` where one was: nothing has changed here
    then, and the batch is to be cut and run again.

    Args:
        module: The module that all ranks train.
        devices, intra_op: As `Executor` takes them.
        exchange: The job's ranks.

    Raises:
        ConfigError: Ranks differ in what they train; it says in what.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        exchange: Exchange,
        *,
        intra_op: int,
    ) -> None:
        super().__init__(module, devices, intra_op=intra_op)
        self._exchange = exchange
        try:
            about = describe_rank(module, len(self))
            exchange.match_ranks(about, [*module.parameters(), *module.buffers()])
        except BaseException:
            self.close()
            raise
        self._trains = [about["parameters or buffers"], about["frozen parameters"]]
        self._note_ranks()

    def _note_ranks(self) -> None:
        """Take note of who the ranks are now."""
        exchange = self._exchange
        self._about = exchange.about  # another list for other ranks
        self._num_replicas: list[int] = [each["replicas"] for each in self._about]
        self._reduction = RankReduction(self.parameters, exchange)

    @property
    def owns_generator(self) -> bool:  # type: ignore[override]
        """True where the rank's one replica is all that draws in its process."""
        return [device.type for device in self.devices] == ["cpu"]

    def count_replicas(self) -> int:
        """Return the number of replicas of all ranks, of which a lost one is left out."""
        self._follow_ranks()
        return sum(self._num_replicas)

    def _follow_ranks(self) -> None:
        """Form another group if a rank was lost, and take note of who the ranks are.

        A rank that is behind still cuts the batch as the ranks ahead have cut it.
        """
        self._exchange.regroup()
        if self._about is not self._exchange.about and not self._exchange.is_behind:
            self._note_ranks()

    def run(
        self,
        task: Task,
        pieces: Sequence[Nested],
        *,
        weights: Sequence[float],
        seed: tuple[int, ...],
        owners: Sequence[int] | None = None,
        only: range | None = None,
    ) -> RunResult:
        """Run this rank's microbatches, and add to them what the others gave.

        Raises:
            Exception: What ``task`` raised here.
            PeerError: Another rank raised something; nothing has changed anywhere then.
            GroupChanged: The ranks are others now.
        """
        assert not task.is_backward
        assert only is None
        self._follow_ranks()
        if self._exchange.is_behind:  # it computes alone what the others have done
            return super().run(task, pieces, weights=weights, seed=seed)
        ranges = self._ranges(len(pieces), owned=owners is not None)
        only = ranges[self._exchange.rank]
        if owners is not None:  # by the numbers that replicas have here
            owners = [owner - only.start for owner in owners]
        about = {
            "step": [seed, weights, _trace_of(pieces)],
            "trains": self._trains,
            "optimizer": _options_of(self.optimizer),
            "newcomers_wait": self._exchange.newcomers_wait,
        }
        try:
            result = super().run(task, pieces, weights=weights, seed=seed, owners=owners, only=only)
            packed = RankMessage.of(about, result.results, result.sums).to_bytes()
        except BaseException as error:
            failed = RankMessage(about, f"{type(error).__name__}: {error}")
            self._exchange.gather(failed.to_bytes(), _RUN)
            raise
        messages = [RankMessage.from_bytes(each) for each in self._exchange.gather(packed, _RUN)]
        first = _check(messages, self._exchange.ranks)
        self._exchange.newcomers_agreed = first["newcomers_wait"]
        for each in messages:
            for index, computed in each.results.items():
                result.results[index] = computed
        self._add(result, messages, weights, ranges)
        return result

    def _ranges(self, num_microbatches: int, *, owned: bool) -> list[range]:
        """Return which microbatches are whose, by rank."""
        counts = self._num_replicas
        sizes = counts if owned else workload_sizes(num_microbatches, counts)
        stops = accumulate(sizes)
        return [range(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]

    def _add(
        self,
        result: RunResult,
        messages: Sequence[RankMessage],
        weights: Sequence[float],
        ranges: Sequence[range],
    ) -> None:
        """Let ``result`` hold all ranks' sums of gradients and statistics."""
        gradients: Gradients = [None] * len(self.parameters)
        if torch.is_grad_enabled():
            sums = self._reduction.begin(ranges)
            sums.send(result.sums)
            gradients, _ = sums.receive()
        total = PartialSum(gradients, add_statistics(messages, len(weights)))
        result.sums = {SummationTree(len(weights)).root: total}

    def mark_done(self) -> None:
        """Count a run whose outcome is kept here."""
        self._exchange.mark_done()


def repeat_on_new_ranks(attempt: Callable[[], T]) -> T:
    """Return the result of ``attempt``, called again whenever ranks have come or gone under it."""
    while True:
        with contextlib.suppress(GroupChanged):
            return attempt()


def write_once(write: Callable[[], None], exchange: Exchange) -> None:
    """Let the first rank write for all; every rank returns when it has.

    Where that is lost meanwhile, its successor writes. A rank that comes later and saves before
    its first step writes nothing.

    Raises:
        Exception: What ``write`` raised, at the first rank.
        PeerError: It raised something there; at the others.
    """

    def attempt() -> None:
        exchange.regroup()
        if exchange.is_late:
            return
        if not exchange.is_behind:  # else it is written
            failure = ""
            try:
                if exchange.rank == 0:
                    write()
            except BaseException as error:
                failure = f"{type(error).__name__}: {error}"
                raise
            finally:
                told = exchange.gather(failure.encode(), "save")[0]
            if told:
                rank = exchange.ranks[0]
                text = f"Rank {rank} must write for all ranks, but raised {told.decode()}"
                raise PeerError(text, rank)
        exchange.mark_done()

    repeat_on_new_ranks(attempt)


# Any: JSON.
def _check(messages: Sequence[RankMessage], ranks: Sequence[int]) -> dict[str, Any]:
    """Return the first message's account of its step; ``ranks`` have sent one message each.

    Raises:
        PeerError: A rank raised something.
        ConfigError: Ranks are at different steps, train different parameters, or step differently.
    """
    for rank, message in zip(ranks, messages, strict=True):
        if message.error is not None:
            raise PeerError(
                f"All ranks must complete their microbatches, but rank {rank} raised "
                f"{message.error}. The step was refused everywhere and nothing has changed.",
                rank,
            )
    first, *others = [each.about for each in messages]
    for rank, each in zip(ranks[1:], others, strict=True):
        if each["step"] != first["step"]:
            raise ConfigError(
                f"All ranks must be at the same step of the same batches, but rank {rank} is not "
                f"where rank {ranks[0]} is. Give every rank the whole batch, from loaders with the "
                "same seed (no `DistributedSampler`), and the same `seed` and `microbatches`."
            )
        if each["trains"] != first["trains"]:
            raise ConfigError(
                f"All ranks must train the same parameters, but rank {rank} has frozen others "
                f"than rank {ranks[0]}. Freeze them in every process, before the same step."
            )
        if each["optimizer"] != first["optimizer"]:
            raise ConfigError(
                f"All ranks must step the same optimizer with the same options, but rank {rank} "
                f"has {each['optimizer']} and rank {ranks[0]} {first['optimizer']}. Set its "
                "options, such as the learning rate, alike in every process."
            )
    return dict(first)


def _options_of(optimizer: Optimizer | None) -> str:
    """Return the optimizer's class, and the options of its groups that are numbers or text."""
    kinds = (int, float, str, tuple, type(None))
    groups = optimizer.param_groups if optimizer is not None else ()
    options = [
        {name: each for name, each in group.items() if isinstance(each, kinds)} for group in groups
    ]
    return f"{type(optimizer).__name__} {options}"


def _trace_of(microbatches: Sequence[Nested]) -> int:
    """Return a checksum of a batch: of small leaves whole, else of elements from all over them.

    One element is taken from each of 1,024 equal parts, not at the same place in each: rows of an
    image, or images of a batch, may begin where the parts do.
    """
    trace = 0
    for microbatch in microbatches:
        for leaf in flatten(microbatch)[0]:
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel():
                row = leaf.detach().reshape(-1)
                size = row.numel()
                if size > _TRACED:
                    part = torch.arange(_TRACED, device=row.device)
                    row = row[part * size // _TRACED + part * _SPREAD % (size // _TRACED)]
                row = row.cpu().contiguous()
                trace = zlib.crc32(row.view(torch.uint8).numpy().tobytes(), trace)
    return trace


def describe_rank(module: nn.Module, num_replicas: int) -> dict[str, Any]:  # Any: JSON
    """Return what a rank trains: all but "replicas" must be the same in all ranks."""
    tensors = (*module.parameters(), *module.buffers())
    return {
        "replicas": num_replicas,
        "parameters or buffers": _digest_of(module),
        "frozen parameters": [
            name for name, each in module.named_parameters() if not each.requires_grad
        ],
        "devices": sorted({each.device.type for each in tensors}),
    }


def _digest_of(module: nn.Module) -> str:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    shapes = [(name, tuple(each.shape), str(each.dtype)) for name, each in tensors]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()
