"""Data parallelism over the ranks of a job, bitwise identical on any number of them."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from phalanx.distributed import Exchange, ProcessGroup
from phalanx.errors import ConfigError
from phalanx.execution import (
    Gradients,
    MicrobatchContext,
    PartialSum,
    RankMessage,
    RankReduction,
    RankSums,
    RunResult,
    ThreadExecutor,
    add_statistics,
    describe_rank,
)
from phalanx.memory import laid_out_as
from phalanx.parallel.data_parallel import DataParallel
from phalanx.parallel.graph import Passes, RunPart, reached_leaves
from phalanx.plan import (
    Layout,
    Node,
    check_argument,
    equal_sizes,
    ranges_of,
    read_count,
    read_number,
)
from phalanx.replicas import Statistics
from phalanx.torch_internals import call_after_backward
from phalanx.types import Nested

T = TypeVar("T")


class DistributedDataParallel(DataParallel):
    """Train ``module`` on all ranks of a job; the number of ranks changes no bit of its weights.

    It replaces `torch.nn.parallel.DistributedDataParallel` in your own loop: every
    rank calls it with its rows of the batch, and the optimizer steps on every rank. The batch of
    all ranks is cut into ``microbatches``; each rank computes its share of them, and their
    gradients are added in an order that depends on the number of microbatches alone.

    At the start all ranks take over the parameters and buffers of rank 0. Buffers that `forward`
    writes, such as batch norm's statistics, are merged over all ranks at the end of the backward
    pass; without one, before the next forward pass. Dropout draws from a generator seeded by
    (seed, step, microbatch), where the seed is that of rank 0's `torch.manual_seed`. Parameters
    that no rank has used keep a ``grad`` of None.

    Args:
        module: The module; it is trained in place, on the device where it lies. `state_dict()` has
            its keys, without ``module.``; `load_state_dict` takes them with and without.
        microbatches: Number of pieces that the batch of all ranks is cut into, at least as many as
            there are ranks.
        process_group: The ranks, over gloo, phalanx or NCCL; default: the default group.
        reduction: "mean": the loss is a mean over the rank's rows, as for torch's class; the number
            of ranks must be a power of two that divides ``microbatches``. "sum": it is a sum, and
            the finished sum of gradients is divided by all ranks' weight (rows, or
            :meth:`set_weight`); any number of ranks.
        bucket_cap_mb: About how many MiB of gradients travel together.
        layout: As for `DataParallel`: which dim of which input is split into microbatches.
        output: As for `DataParallel`: how outputs of a rank's microbatches are merged.
        buffers: As for `DataParallel`: what becomes of buffers that `forward` writes.

    Attributes:
        steps: Forward passes of training so far. Random numbers depend on it: save it, and set it
            in a run that is resumed.

    Shapes:
        B: rows of all ranks. Rank r passes the rows of its microbatches, in order: with 4
        microbatches and 10 rows (3, 3, 2, 2), 2 ranks pass 6 and 4. `ExactSampler` deals them out.

    Raises:
        StateError: `torch.distributed` has no process group.
        ConfigError: An argument is one of torch's class only; the ranks differ in the module or in
            these arguments; there are more of them than microbatches; "mean" does not allow their
            number; or, in a step, they do not have the rows of their microbatches.
        PeerLost: A rank is gone.

    Determinism: the weights are bitwise identical for any number of ranks that is allowed, on the
    same kind of device, with dropout, batch norm, clipping and accumulation, where the ranks'
    rows are those that `ExactSampler` deals out, and a row does not depend on the rank that loads
    it. Operators run on one thread on a CPU.

    Example:
        >>> import tempfile
        >>> import torch.distributed as dist
        >>> init = f"file://{tempfile.mkdtemp()}/store"
        >>> dist.init_process_group("gloo", init_method=init, rank=0, world_size=1)
        >>> net = nn.Linear(4, 2)
        >>> model = DistributedDataParallel(net, microbatches=4)
        >>> model(torch.ones(8, 4)).mean().backward()
        >>> net.bias.grad.tolist()
        [0.5, 0.5]
        >>> dist.destroy_process_group()

    Source: torch's class of the same name; EasyScale (SC '23) for the idea of fixed logical ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        microbatches: int = 4,
        *,
        process_group: ProcessGroup | None = None,
        reduction: str = "mean",
        bucket_cap_mb: float = 25,
        layout: Layout | None = None,
        output: str | Mapping[str | int, str] | None = None,
        buffers: str = "mean",
        **unknown: object,
    ) -> None:
        if unknown:
            raise ConfigError(
                f"`{next(iter(unknown))}` is no argument of this class. Leave out those of torch's "
                "class: the module is trained on the device where it lies (`module.to(…)`), and "
                "any of its parameters may be unused."
            )
        way_out = "Give 4, say, and no `device_ids`: the module is trained where it lies."
        read_count("microbatches", microbatches, 1, way_out=way_out)
        wanted = "be 'mean' or 'sum'"
        check_argument(reduction in ("mean", "sum"), "reduction", wanted, reduction)
        super().__init__(
            module, 1, microbatches=microbatches, layout=layout, output=output, buffers=buffers
        )
        self._is_mean = reduction == "mean"
        fits = 0 < read_number("bucket_cap_mb", bucket_cap_mb) < math.inf
        check_argument(fits, "bucket_cap_mb", "be finite and above 0", bucket_cap_mb)
        self._bucket_bytes = int(bucket_cap_mb * 2**20)
        self._exchange = exchange = Exchange(process_group)
        self.steps = 0
        self._num_microbatches = microbatches
        self._rank_reduction: tuple[object, RankReduction] | None = None
        self._weight: float | None = None
        self._unmerged: _RankPasses | None = None  # whose buffers wait for its backward pass
        options = {"microbatches": microbatches, "reduction": reduction, "buffers": buffers}
        options |= {"layout": layout, "output": output}
        own = {f"`{name}`": repr(value) for name, value in options.items()}
        exchange.match_ranks({**describe_rank(module, 1), **own, "seed": torch.initial_seed()}, ())
        self._seed = int(exchange.about[0]["seed"])
        _check_ranks(exchange.size, microbatches, reduction)  # what all ranks were given
        exchange.broadcast((*module.parameters(), *module.buffers()))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing; scripts for torch's class may keep calling it.

        Gradients are summed over all ranks in every backward pass, and accumulate in ``grad`` as
        everywhere in torch: partial sums of several batches would have to be kept for each
        microbatch to be added in the same order on any number of ranks.
        """
        yield

    def set_weight(self, weight: float | Tensor) -> None:
        """Say what this rank's rows stand for in the next backward pass, such as unmasked tokens.

        The sum of all ranks' gradients is divided by the sum of their weights. A pass without a
        call counts rows.

        Raises:
            ConfigError: ``reduction`` is "mean"; or it is no finite number of at least 0.
        """
        if self._is_mean:
            raise ConfigError(
                "`set_weight()` needs the reduction 'sum', but it is 'mean'. Give "
                "reduction='sum', and a loss that is a sum."
            )
        number = read_number("weight", weight.item() if isinstance(weight, Tensor) else weight)
        check_argument(0 <= number < math.inf, "weight", "be finite and at least 0", weight)
        self._weight = number

    def _forget_weight(self) -> None:
        self._weight = None

    def extra_repr(self) -> str:
        exchange = self._exchange
        reduction = "mean" if self._is_mean else "sum"
        return (
            f"rank {exchange.rank} of {exchange.size}, microbatches={self._microbatches}, "
            f"reduction={reduction!r}"
        )

    # Any: what nn.Module's own state holds.
    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_exchange"]  # a copy is on the default group's ranks, as with torch's class
        return {**state, "_rank_reduction": None, "_unmerged": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._exchange = Exchange()

    def _make_executor(self) -> ThreadExecutor:
        return ThreadExecutor(
            self.module, self._devices, intra_op=1, averages=self._averages, inline=True
        )

    @property
    def _own(self) -> range:
        """This rank's microbatches."""
        return ranges_of(self._num_microbatches, self._exchange.size)[self._exchange.rank]

    @property
    def _num_pieces(self) -> int:
        return len(self._own)

    def _run(
        self,
        parts: Sequence[Nested | None],
        sizes: Sequence[int],
        run: RunPart,
        merge: Callable[[list[Nested]], T],
    ) -> T:
        own = self._own

        def run_own(piece: int, module: nn.Module, inputs: Nested) -> Nested:
            return run(piece - own.start, module, inputs)

        def at_place(values: Sequence[Any], other: Any) -> list[Any]:
            after = self._num_microbatches - own.stop
            return [other] * own.start + list(values) + [other] * after

        self._merge_buffers()
        try:
            outputs = super()._run(at_place(parts, None), at_place(sizes, 0), run_own, merge)
        except BaseException:
            self._unmerged = None
            raise
        is_step = self._in_step()
        self.steps += is_step
        if not is_step or not any(each.requires_grad for each in self.parameters()):
            self._merge_buffers()  # no backward pass will
        return outputs

    def _merge_buffers(self) -> None:
        """Merge the buffers of the last forward pass, if no backward pass has done it."""
        if self._unmerged is not None:
            self._write_buffers(self._unmerged.merged_statistics())

    def _in_training(self) -> bool:
        return any(each.training for each in self.module.modules())

    def _in_step(self) -> bool:
        return torch.is_grad_enabled() and self._in_training()

    def _passes(self, sizes: Sequence[int]) -> Passes:
        return (_OneRankPasses if self._exchange.size == 1 else _RankPasses)(self, sizes)

    def _rank_reduction_of(self, executor: ThreadExecutor) -> RankReduction:
        """Return the exchange of the gradients that are trained now, as they lie in memory now."""
        trained = [(id(each), each.requires_grad, each.stride()) for each in executor.parameters]
        if self._rank_reduction is None or self._rank_reduction[0] != trained:
            self._rank_reduction = (
                trained,
                RankReduction(
                    executor.parameters,
                    self._exchange,
                    self._bucket_bytes,
                    note_size=self._num_microbatches + 2,
                ),
            )
        return self._rank_reduction[1]


class _OneRankPasses(Passes):
    """One forward pass on the only rank, and its backward passes.

    Args:
        owner: The container.
        sizes: The rows of this rank's microbatches; 0 for those of others.
    """

    def __init__(self, owner: DistributedDataParallel, sizes: Sequence[int]) -> None:
        self.only: range = owner._own
        self._owner = owner
        self._sizes = list(sizes)
        self._seed = (owner._seed, owner.steps) if owner._in_step() else super().seed()
        self._weight: float = 0  # of the backward pass that runs

    def seed(self) -> tuple[int, ...]:
        return self._seed

    def begin_backward(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        owner = self._owner
        self._weight = sum(self._sizes) if owner._weight is None else owner._weight
        call_after_backward(owner._forget_weight)  # it holds for all forward passes behind it
        return gradients

    def add_gradients(self, executor: ThreadExecutor, result: RunResult) -> Gradients:
        return self._weighted(executor.sum_operands(result), self._weight)

    def _weighted(self, sums: Gradients, weight: float) -> Gradients:
        """Divide finished sums by the weight of all ranks."""
        if not self._owner._is_mean and weight > 0:
            for each in sums:
                if each is not None:
                    each /= weight
        return sums


class _RankPasses(_OneRankPasses):
    """One forward pass on all ranks, and its backward passes."""

    spans_ranks = True

    def __init__(self, owner: DistributedDataParallel, sizes: Sequence[int]) -> None:
        super().__init__(owner, sizes)
        self._exchange = owner._exchange
        self._ranges = ranges_of(len(sizes), self._exchange.size)
        self._sums: RankSums | None = None  # of the backward pass that runs
        self._unmerged: Mapping[Node, PartialSum | None] = {}  # what is left in the buffers

    def statistics(self, result: RunResult) -> Statistics:
        if next(self._owner.module.buffers(), None) is None or not self._owner._in_training():
            return super().statistics(result)
        self._unmerged = self._own_sums(result)
        self._owner._unmerged = self
        return {}

    def merged_statistics(self) -> Statistics:
        """Return what all ranks have left in the buffers, without a backward pass."""
        told = self._gather_unmerged()
        self._check([sum(each) for each in zip(*(each.about for each in told), strict=True)])
        return add_statistics(told, len(self._sizes))

    def _gather_unmerged(self) -> list[RankMessage]:
        """Return what each rank has left in the buffers; the second time, nothing."""
        if self._owner._unmerged is not self:
            return []
        self._owner._unmerged = None
        message = RankMessage.of(self._sizes, [], self._unmerged)
        gathered = self._exchange.gather(message.to_bytes(), "merge buffers")
        return [RankMessage.from_bytes(each) for each in gathered]

    def _own_sums(self, result: RunResult) -> Mapping[Node, PartialSum | None]:
        return result.sums if any(self._sizes) else {}  # an empty share has run once, for nothing

    def begin_backward(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        self._sums = None
        gradients = super().begin_backward(gradients)
        if not self._owner._is_mean:
            return gradients
        return [None if each is None else each / self._exchange.size for each in gradients]

    def backward_context(
        self, executor: ThreadExecutor, context: MicrobatchContext, outputs: Sequence[Tensor]
    ) -> AbstractContextManager[object]:
        if context.index != self.only[-1] or not self._sizes[context.index]:
            return nullcontext()
        reduction = self._owner._rank_reduction_of(executor)
        self._sums = sums = reduction.begin(self._ranges)
        # Of one microbatch a gradient would have to be copied, since autograd may still read it.
        leaves_early = self._exchange.overlaps and reduction.large and context.waiting
        reached = reached_leaves(outputs) if leaves_early else None
        if reached is None or not reached.isdisjoint(map(id, executor.parameters)):
            return nullcontext()  # a gradient may come in several parts

        def put(place: int, leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            gradient = None if gradient is None else laid_out_as(leaf, gradient)
            sums.put(place, gradient, Node(0, context.index), context.waiting)

        hooks = ExitStack()
        for place in reduction.large:
            leaf = context.replica.parameters[place]
            if id(leaf) not in reached:
                put(place, leaf)
            elif leaf.device == executor.parameters[place].device:
                hook = leaf.register_post_accumulate_grad_hook(partial(put, place))
                hooks.callback(hook.remove)
        return hooks

    def of_inputs(self, gradients: Gradients) -> Gradients:
        if not self._owner._is_mean:
            return gradients
        # The caller's are those of its own loss: what computed the inputs may divide them, too.
        return [None if each is None else each * self._exchange.size for each in gradients]

    def add_gradients(self, executor: ThreadExecutor, result: RunResult) -> Gradients:
        sums = self._sums or self._owner._rank_reduction_of(executor).begin(self._ranges)
        trained = zlib.crc32(bytes(each.requires_grad for each in executor.parameters))
        sums.send(self._own_sums(result), [trained, self._weight, *self._sizes])
        told = self._gather_unmerged()
        totals, notes = sums.receive()
        trained_by_rank, weights, *rows = zip(*notes, strict=True)
        self._check([int(sum(each)) for each in rows])
        _check_trained(trained_by_rank)
        self._owner._write_buffers(add_statistics(told, len(self._sizes)))
        return self._weighted(totals, sum(weights))

    def _check(self, rows: Sequence[int]) -> None:
        """Refuse other rows of the microbatches than one rank would cut."""
        total, count = sum(rows), len(rows)
        wanted = equal_sizes(total, count)
        if self._owner._is_mean and total % count:
            raise ConfigError(
                f"A batch must have a multiple of {count} rows, its microbatches, with "
                f"reduction='mean' on several ranks, but has {total}. Leave out the last batch of "
                "an epoch (`ExactSampler(…, drop_last=True)`), or give reduction='sum'."
            )
        if rows != wanted:
            cuts = ranges_of(count, self._exchange.size)
            needed, have = ([sum(each[i] for i in own) for own in cuts] for each in (wanted, rows))
            raise ConfigError(
                f"Ranks must have the rows of their microbatches, {_told(needed)} for a batch of "
                f"{total} in {count} microbatches, but have {_told(have)}. Let "
                f"`ExactSampler(…, microbatches={count})` deal out the rows."
            )


def _check_trained(trained: Sequence[float]) -> None:
    """Refuse ranks that train other parameters than rank 0, given a checksum of each rank's."""
    for rank, each in enumerate(trained):
        if each != trained[0]:
            raise ConfigError(
                f"All ranks must train the same parameters, but rank {rank} has frozen others than "
                "rank 0. Set `requires_grad` alike on all ranks."
            )


def _told(rows: Sequence[int]) -> str:
    return " and ".join(f"{each} on rank {rank}" for rank, each in enumerate(rows))


def _check_ranks(num_ranks: int, microbatches: int, reduction: str) -> None:
    if num_ranks > microbatches:
        raise ConfigError(
            f"`microbatches` must be at least the number of ranks ({num_ranks}), but is "
            f"{microbatches}. Give more microbatches, or start fewer ranks."
        )
    fits = num_ranks & (num_ranks - 1) == 0 and microbatches % num_ranks == 0
    if reduction == "mean" and not fits:
        raise ConfigError(
            f"`reduction` must be 'sum' on {num_ranks} ranks with {microbatches} microbatches, but "
            "is 'mean': identical weights need a number of ranks that is a power of two and "
            "divides the microbatches. Give reduction='sum' and a loss that is a sum."
        )
