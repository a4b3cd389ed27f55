"""A trainer's replicas in several processes of one job, each with its own range of microbatches.

Every rank runs the same script over the same batches. It computes its range, and says what came of
it (`rank_messages`). Then the gradients' partial sums travel to the owners of their parameters (see
`rank_sums`).
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.distributed import Exchange
from phalanx.errors import ConfigError, PeerError
from phalanx.execution.contract import Peers
from phalanx.execution.partial_sums import RunResult
from phalanx.execution.rank_messages import RankMessage
from phalanx.execution.rank_sums import RankShards, RankSums
from phalanx.execution.shards import is_cut
from phalanx.execution.task import Task
from phalanx.execution.threads import ThreadExecutor
from phalanx.plan import flatten, workload_sizes
from phalanx.types import Nested

__all__ = ["RankExecutor", "describe_rank", "device_types_of", "refuse_unserved", "write_once"]

_TRACED = 64  # elements of each microbatch that tell one batch from another
_STEP = "run a batch"
_OPENS_AGAIN = "opens again"  # stands in a message in the place of a step
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class RankExecutor(ThreadExecutor, Peers):
    """This rank's replicas, as a part of the job's; :meth:`join` comes first.

    Its replicas' gradients go into messages: nothing is stepped where they lie.

    Attributes:
        exchange: The job's ranks.
        counts: Replicas by rank.
    """

    @property
    def peers(self) -> Peers:  # type: ignore[override]
        """The other ranks."""
        return self

    def join(self, exchange: Exchange | None = None) -> None:
        """Compare what all ranks train, and begin with rank 0's parameters and buffers.

        Args:
            exchange: The ranks; default: those of the default group.

        Raises:
            StateError: This process is in no group.
            ConfigError: Ranks differ in their model; it says which. Or it is on a device whose
                tensors they cannot exchange.
        """
        self._module = module = self.sources[0]
        self.exchange = exchange = Exchange() if exchange is None else exchange
        own = describe_rank(module, self.workloads)
        told = [json.loads(each) for each in exchange.gather(json.dumps(own).encode(), "begin")]
        for rank, each in enumerate(told):
            if each["model"] != told[0]["model"]:
                raise ConfigError(
                    f"All ranks must train the same model, but rank {rank}'s has other parameters "
                    "than rank 0's. Build it from the same arguments in every process."
                )
            if each["device_types"] != told[0]["device_types"]:
                raise ConfigError(
                    "All ranks must hold the module on the same kind of device, but rank 0 has it "
                    f"on {' and '.join(told[0]['device_types'])} and rank {rank} on "
                    f"{' and '.join(each['device_types'])}. Move it before the trainer is made."
                )
            differing = sorted({*each["frozen"]} ^ {*told[0]["frozen"]})
            if differing:
                here = 0 if differing[0] in told[0]["frozen"] else rank
                raise ConfigError(
                    f"All ranks must train the same parameters, but `{differing[0]}` is frozen on "
                    f"rank {here} and not on rank {rank - here}. Freeze it in every process."
                )
        refuse_unserved(own["device_types"], exchange)
        self._take_shares([each["workloads"] for each in told])
        self.align(module)

    @property
    def owns_generator(self) -> bool:  # type: ignore[override]
        """Whether the rank's one replica is all that draws in its process."""
        return [device.type for device in self.devices] == ["cpu"]

    def _take_shares(self, by_rank: Sequence[Sequence[float]]) -> None:
        self.counts = [len(each) for each in by_rank]
        self._powers = [sum(each) for each in by_rank]
        self._all_workloads = [share for each in by_rank for share in each]
        self._sums = RankSums(self.parameters, self.counts, self.exchange)

    def all_workloads(self) -> Sequence[float]:
        """Return the relative shares of all ranks' replicas, rank after rank."""
        return self._all_workloads

    def open_shards(self, optimizer: Optimizer) -> RankShards:
        """Return the optimizer in shards, of which this rank steps its own."""
        return RankShards(optimizer, self.parameters, self._sums, keeps_all=False)

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
        """Run this rank's microbatches, and learn what the others' gave.

        Raises:
            Exception: What ``task`` raised here.
            PeerError: Another rank raised something; nothing has changed anywhere then.
        """
        assert not task.goes_back
        assert only is None
        only = self._own(len(pieces), owned=owners is not None)
        if owners is not None:  # by the numbers that replicas have here
            owners = [owner - only.start for owner in owners]
        own = {
            "step": [seed, [each.hex() for each in weights], _trace_of(pieces)],
            "whole": self.optimizer is not None and not is_cut(self.optimizer),
            "groups": [] if self.optimizer is None else _options_of(self.optimizer),
            **self._tells(),
        }
        fingerprint = json.dumps(own)
        try:
            result = super().run(task, pieces, weights=weights, seed=seed, owners=owners, only=only)
            message = RankMessage.of(fingerprint, result.results, result.sums)
            packed = message.pack()
        except BaseException as error:
            failed = RankMessage(fingerprint, f"{type(error).__name__}: {error}")
            self.exchange.gather(failed.pack(), _STEP)
            raise
        messages = [RankMessage.read(each) for each in self.exchange.gather(packed, _STEP)]
        _check(messages)
        self._hears(json.loads(messages[0].fingerprint))
        for message in messages:
            for index, computed in message.results.items():
                result.results[index] = computed
        self._sums.add(result, messages)
        return result

    def _tells(self) -> Mapping[str, Any]:  # Any: JSON; so below
        """Return what else this rank tells the others in each run."""
        return {}

    def _hears(self, first: Mapping[str, Any]) -> None:
        """Take note of what rank 0 has told."""

    def _own(self, num_microbatches: int, *, owned: bool) -> range:
        """Return which microbatches are this rank's."""
        sizes = self.counts if owned else workload_sizes(num_microbatches, self._powers)
        stop = list(accumulate(sizes))[self.exchange.rank]
        return range(stop - sizes[self.exchange.rank], stop)

    def agree_to_open_again(self) -> None:
        """Tell all ranks that the trained parameters were changed here; all must tell the same.

        Raises:
            ConfigError: Other ranks are at a step of what was trained so far; they hear of it.
        """
        message = RankMessage(
            _OPENS_AGAIN, "ConfigError: its trained parameters were changed, and not on all ranks"
        )
        told = [RankMessage.read(each) for each in self.exchange.gather(message.pack(), _STEP)]
        others = [rank for rank, each in enumerate(told) if each.fingerprint != _OPENS_AGAIN]
        if others:
            raise ConfigError(
                "All ranks must train the same parameters, but those that are frozen, the "
                f"optimizer's groups, or the module were changed on rank {self.exchange.rank} and "
                f"not on rank {others[0]}. Change them in every process, before the same step."
            )

    def check_alike(self) -> None:
        """Compare the parameters of all ranks by a checksum.

        Raises:
            PeerError: They differ; on every rank, naming the same one.
        """
        own = [_checksum_of(each) for each in self._module.parameters()]
        packed = json.dumps(own).encode()
        told = [json.loads(each) for each in self.exchange.gather(packed, "compare weights")]
        for rank, each in enumerate(told):
            for (name, _), ours, theirs in zip(
                self._module.named_parameters(), told[0], each, strict=True
            ):
                if ours != theirs:
                    raise PeerError(
                        f"All ranks must hold the same weights, but rank {rank}'s differ from "
                        f"rank 0's, first in `{name}`. Let whatever writes them (an optimizer that "
                        "draws noise, a callback) do the same in every process, from generators "
                        "with the same seed, and start again from a checkpoint before this.",
                        rank,
                    )

    def align(self, module: nn.Module) -> None:
        """Give all ranks the parameters and buffers of rank 0."""
        tensors = [*module.parameters(), *module.buffers()]
        with torch.no_grad():
            for tensor in tensors:
                whole = tensor.detach().contiguous()
                self.exchange.spread([(whole, 0)])
                if whole.data_ptr() != tensor.data_ptr():
                    tensor.copy_(whole)


def write_once(write: Callable[[], None], exchange: Exchange) -> None:
    """Let rank 0 write for all; every rank returns when it has.

    Raises:
        Exception: What ``write`` raised, at rank 0.
        PeerError: It raised something there; at the others.
    """
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
        raise PeerError(f"Rank 0 must write for all ranks, but raised {told.decode()}", 0)


def _check(messages: Sequence[RankMessage]) -> None:
    for rank, message in enumerate(messages):
        if message.error is not None:
            raise PeerError(
                f"All ranks must complete their microbatches, but rank {rank} raised "
                f"{message.error}. The step was refused everywhere and nothing has changed.",
                rank,
            )
    first, *others = [json.loads(each.fingerprint) for each in messages]
    for rank, each in enumerate(others, 1):
        if each["step"] != first["step"]:
            raise ConfigError(
                f"All ranks must be at the same step of the same batches, but rank {rank} is not "
                "where rank 0 is. Give every rank the whole batch, from loaders with the same "
                "seed (no `DistributedSampler`), and the same `seed` and `microbatches`."
            )
        _check_options(rank, each["groups"], first["groups"])
        if each["whole"] != first["whole"]:
            raise ConfigError(
                f"All ranks must step the optimizer in the same way, but rank {rank}'s was changed "
                "or left alone unlike rank 0's. Replace `step` and register hooks in every process."
            )


# Any: what the user's groups hold, as JSON has it.
def _check_options(rank: int, theirs: list[dict[str, Any]], first: list[dict[str, Any]]) -> None:
    """Refuse a rank whose optimizer has other groups, or other options, than rank 0's."""
    if len(theirs) != len(first):
        raise ConfigError(
            f"All ranks must have the same parameter groups, but rank {rank} has {len(theirs)} of "
            f"them and rank 0 has {len(first)}. Make the optimizer alike in every process."
        )
    for place, (group, ours) in enumerate(zip(theirs, first, strict=True)):
        for name in sorted({*group, *ours}):
            here, there = group.get(name), ours.get(name)
            if here != there and repr(here) != repr(there):  # nan is nan
                raise ConfigError(
                    "All ranks must step with the same options of the optimizer, but "
                    f"`{name}` of group {place} is {here!r} on rank {rank} and {there!r} on rank "
                    "0. Set it in every process, before the same step."
                )


def _options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return each group's options that are numbers or text, and how many parameters it has."""
    return [
        {
            **{name: found for name, each in group.items() if (found := _plain(each)) is not None},
            "params": len(group["params"]),
        }
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    """Return an option as JSON can hold it; None for one that ranks do not compare."""
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() == 1 and not value.is_complex() else None
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, (int, float, str)):
        return value
    return float(value) if isinstance(value, Real) else None  # NumPy's, say


def _trace_of(microbatches: Sequence[Nested]) -> int:
    """Return a checksum of the beginnings of a batch's rows."""
    trace = 0
    for microbatch in microbatches:
        for leaf in flatten(microbatch)[0]:
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel():
                row = leaf.detach().reshape(-1)[:_TRACED].cpu().contiguous()
                trace = zlib.crc32(row.view(torch.uint8).numpy().tobytes(), trace)
    return trace


def _checksum_of(parameter: Tensor) -> int:
    """Return the sum of all bits' words: one pass over memory, on the parameter's own device."""
    values = parameter.detach().contiguous()
    if values.is_complex():
        values = torch.view_as_real(values)
    return int(values.view(_WORDS[values.itemsize]).sum(dtype=torch.int64))


def describe_rank(module: nn.Module, workloads: Sequence[float]) -> dict[str, Any]:  # Any: JSON
    """Return what a rank trains: all but "workloads" must be the same in all ranks."""
    return {
        "workloads": list(workloads),
        "model": _digest_of(module),
        "frozen": [name for name, each in module.named_parameters() if not each.requires_grad],
        "device_types": device_types_of(module),
    }


def device_types_of(module: nn.Module) -> list[str]:
    """Return on which kinds of devices parameters and buffers lie."""
    return sorted({each.device.type for each in (*module.parameters(), *module.buffers())})


def refuse_unserved(device_types: Sequence[str], exchange: Exchange) -> None:
    """Refuse kinds of devices between which nothing can travel.

    Raises:
        ConfigError: There is one.
    """
    unserved = [each for each in device_types if each not in exchange.device_types]
    if unserved:
        served = ", ".join(sorted(exchange.device_types))
        raise ConfigError(
            "`module` must lie on a device whose tensors the ranks can exchange "
            f"({served}), but is on {' and '.join(unserved)}. Leave it on the CPU and give its "
            f"replicas there as `replicas=['{unserved[0]}:0']`, or start the ranks with a backend "
            "for that device."
        )


def _digest_of(module: nn.Module) -> str:
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()
