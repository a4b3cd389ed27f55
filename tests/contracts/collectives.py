"""Collective calls with inputs of every kind, made over two groups and compared, inside each rank.

Imported by the ranks' processes; `test_backend.py` says which cases there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from tests.multiprocess.ranks import PLAYED_HOSTS

SIZES = (0, 1, 5, 4096, 70_003)  # the last beyond what is published whole, and no round number
LAYOUTS = ("plain", "strided", "scalar", "transposed")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
MOVED = (*FLOATS, *INTEGERS, torch.bool, torch.int16, torch.complex64)
# What gloo does not know goes through it under another name of as many bytes.
GLOOS_DTYPE = {
    torch.bool: torch.uint8,
    torch.int16: torch.float16,
    torch.complex64: torch.float64,
}

_groups: dict[str, dist.ProcessGroup] = {}


def group(backend: str) -> dist.ProcessGroup:
    """Return this process's group of all ranks on ``backend``, made at the first call."""
    import phalanx  # noqa: F401

    if backend not in _groups:
        _groups[backend] = dist.new_group(backend=backend)
    return _groups[backend]


def draw(rank: int, size: int, dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    """Draw ``size`` numbers, other ones in every rank, laid out in one of four ways."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    rows = 2 * size if layout == "strided" else size
    if dtype.is_floating_point or dtype.is_complex:
        numbers = torch.randn(rows, generator=generator, dtype=torch.float64).to(dtype)
    elif dtype is torch.bool:
        numbers = torch.rand(rows, generator=generator) < 0.5
    else:
        numbers = torch.randint(0, 5, (rows,), generator=generator).to(dtype)
    if layout == "strided":
        return numbers[::2]
    if layout == "scalar":
        return numbers[0] if size else numbers
    if layout == "transposed" and size > 5:
        return numbers[: size // 5 * 5].view(5, -1).t()
    return numbers


def cases(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[int, torch.dtype, int, str]]:
    """Yield a seed, dtype, size and layout: every size with every dtype and every layout."""
    for seed, (dtype, length) in enumerate((d, s) for d in dtypes for s in SIZES):
        yield seed, dtype, length, LAYOUTS[(seed + seed // len(SIZES)) % len(LAYOUTS)]


def in_rank_order(parts: list[Tensor], op: object) -> Tensor:
    """Reduce as we promise: sums by rank on each host, then by host; halves in float32."""
    dtype = parts[0].dtype
    halves = dtype in (torch.float16, torch.bfloat16)
    parts = [part.float() for part in parts] if halves else parts
    combine = {
        dist.ReduceOp.SUM: torch.add,
        dist.ReduceOp.AVG: torch.add,
        dist.ReduceOp.PRODUCT: torch.mul,
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }[op]
    hosts = ["a"] * len(parts)
    if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        hosts = os.environ.get(PLAYED_HOSTS, ",".join(hosts)).split(",")
    on_hosts = [
        [p for p, at in zip(parts, hosts, strict=True) if at == host]
        for host in dict.fromkeys(hosts)
    ]
    total = reduce(combine, [reduce(combine, on_host) for on_host in on_hosts]).clone()
    if op == dist.ReduceOp.AVG:
        total = total / len(parts)
    return total.to(dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype is torch.bfloat16:  # which numpy does not know; float32 holds it exactly
        left, right = left.float(), right.float()
    return left.numpy().tobytes() == right.numpy().tobytes()


def near(left: Tensor, right: Tensor) -> bool:
    if not (left.is_floating_point() or left.is_complex()):
        return torch.equal(left, right)
    rtol = {torch.float16: 1e-2, torch.bfloat16: 4e-2, torch.float64: 1e-12}.get(left.dtype, 1e-5)
    return torch.allclose(left, right, rtol=rtol, atol=rtol)


def reductions(rank: int, kind: str, op_name: str, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """all_reduce or reduce: against gloo, and bit for bit against what rank order gives."""
    ours, gloo = group("phalanx"), group("gloo")
    size = dist.get_world_size()
    op = getattr(dist.ReduceOp, op_name)
    wrong = []
    for seed, dtype, length, layout in cases(dtypes):
        case = f"{kind} {op_name} {dtype} {length} {layout}"
        everybody = [draw(r, length, dtype, layout, seed) for r in range(size)]
        expected = in_rank_order(everybody, op)
        mine = everybody[rank].clone(memory_format=torch.preserve_format)
        theirs = everybody[rank].contiguous().clone()
        root = length % size
        if kind == "all_reduce":
            dist.all_reduce(mine, op, group=ours)
            asked = True
        else:
            dist.reduce(mine, root, op, group=ours)
            asked = rank == root
        if not same_bits(mine, expected if asked else everybody[rank]):
            wrong.append(f"{case}: not what rank order gives")
        if op_name == "AVG":
            continue  # this gloo has no average
        if kind == "all_reduce":
            dist.all_reduce(theirs, op, group=gloo)
        else:
            dist.reduce(theirs, root, op, group=gloo)
        if asked and not near(mine.contiguous(), theirs):
            wrong.append(f"{case}: not what gloo gives")
    return wrong


def edges_of_bfloat16(rank: int) -> list[str]:
    """Sums that are halfway between two numbers, overflow, underflow or are none, at any size."""
    infinity = float("inf")
    edges = torch.tensor([0.0, 1.0, -1.0, 1 + 2**-7, 2**-8, 3 * 2**-9, 3.3e38, -3.3e38, 1.7e36])
    edges = torch.cat([edges, torch.tensor([1e-39, -9e-41, infinity, -infinity, float("nan")])])
    wrong = []
    for length in (len(edges), 4097, 300_001):
        everybody = [
            edges[torch.randint(len(edges), (length,), generator=torch.Generator().manual_seed(r))]
            for r in range(dist.get_world_size())
        ]
        everybody = [numbers.bfloat16() for numbers in everybody]
        expected = in_rank_order(everybody, dist.ReduceOp.SUM)
        dist.all_reduce(everybody[rank], group=group("phalanx"))
        found = everybody[rank]
        alike = found.isnan() == expected.isnan()
        known = ~expected.isnan()
        if not (alike.all() and same_bits(found[known], expected[known])):
            wrong.append(f"{length} of bfloat16's edges")
    return wrong


def sparse_sums(rank: int) -> list[str]:
    """Sums of sparse tensors, which share some of their places, waited for and begun."""
    results = []
    for backend, begins in (("phalanx", False), ("gloo", False), ("phalanx", True)):
        mine = torch.sparse_coo_tensor(torch.tensor([[rank, 4]]), torch.tensor([1.0, 2.0]), (9,))
        work = dist.all_reduce(mine, group=group(backend), async_op=begins)
        if begins:
            work.wait()
        results.append(mine.to_dense())
    same = all(torch.equal(each, results[0]) for each in results)
    return [] if same else [f"sums of sparse tensors: {results}"]


def moves(rank: int, kind: str, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """Everything that only moves: bit for bit what gloo gives, which takes one layout only."""
    wrong = []
    for seed, dtype, length, layout in cases(dtypes):
        mine = draw(rank, length, dtype, layout, seed)
        root = length % dist.get_world_size()
        results = [
            MOVES[kind](rank, mine, root, group(backend), backend)
            for backend in ("phalanx", "gloo")
        ]
        if not all(same_bits(left, right) for left, right in zip(*results, strict=True)):
            wrong.append(f"{kind} {dtype} {length} {layout}")
    return wrong


def _fit(tensor: Tensor, backend: str) -> Tensor:
    """Give gloo what it takes."""
    if backend == "phalanx":
        return tensor.clone(memory_format=torch.preserve_format)
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(GLOOS_DTYPE.get(tensor.dtype, tensor.dtype))


def _broadcast(rank, tensor, root, group, backend):
    tensor = _fit(tensor, backend)
    dist.broadcast(tensor, root, group=group)
    return [tensor]


def _all_gather(rank, tensor, root, group, backend):
    tensor = _fit(tensor, backend)
    results = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(results, tensor, group=group)
    return results


def _all_gather_into(rank, tensor, root, group, backend):
    tensor = _fit(tensor, backend).contiguous().view(-1)
    result = tensor.new_empty(dist.get_world_size() * tensor.numel())
    dist.all_gather_into_tensor(result, tensor, group=group)
    return [result]


def _gather(rank, tensor, root, group, backend):
    tensor = _fit(tensor, backend)
    results = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.gather(tensor, results if rank == root else None, root, group=group)
    return results if rank == root else []


def _scatter(rank, tensor, root, group, backend):
    size = dist.get_world_size()
    tensor = _fit(tensor, backend)
    parts = [tensor.roll(r) for r in range(size)]
    result = torch.empty_like(tensor)
    dist.scatter(result, parts if rank == root else None, root, group=group)
    return [result]


def _all_to_all_single(rank, tensor, root, group, backend):
    """Uneven: rank i sends i + j + 1 rows to rank j, of one element each."""
    size = dist.get_world_size()
    counts = [rank + other + 1 for other in range(size)]
    tensor = _fit(tensor, backend).contiguous().view(-1)
    row = 1 + tensor.numel() // 100
    if not tensor.numel():
        counts = [0] * size
    source = tensor[: sum(counts)].repeat(row * sum(counts))[: row * sum(counts)].view(-1, row)
    result = torch.empty_like(source)
    dist.all_to_all_single(result, source, counts, counts, group=group)
    return [result]


def _messages(rank, tensor, root, group, backend):
    """Everybody sends to the next rank and receives from the one before."""
    size = dist.get_world_size()
    tensor = _fit(tensor, backend)
    result = torch.empty_like(tensor)
    sent = dist.isend(tensor, (rank + 1) % size, group=group, tag=7)
    dist.recv(result, (rank - 1) % size, group=group, tag=7)
    sent.wait()
    return [result]


MOVES = {
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all_single": _all_to_all_single,
    "send and recv": _messages,
}


def scattered_reductions(rank: int, op_name: str, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """reduce_scatter, of a tensor and of a list with parts of unequal lengths."""
    ours, size = group("phalanx"), dist.get_world_size()
    op = getattr(dist.ReduceOp, op_name)
    wrong = []
    for seed, (dtype, length) in enumerate((d, s) for d in dtypes for s in SIZES):
        everybody = [draw(r, size * length, dtype, "plain", seed) for r in range(size)]
        parts = [one.view(size, length)[rank] for one in everybody]
        result = torch.empty(length, dtype=dtype)
        dist.reduce_scatter_tensor(result, everybody[rank], op, group=ours)
        if not same_bits(result, in_rank_order(parts, op)):
            wrong.append(f"reduce_scatter_tensor {op_name} {dtype} {length}")
        lengths = [max(0, length - r) for r in range(size)]
        lists = [list(one[: sum(lengths)].split(lengths)) for one in everybody]
        result = torch.empty(lengths[rank], dtype=dtype)
        dist.reduce_scatter(result, lists[rank], op, group=ours)
        if not same_bits(result, in_rank_order([one[rank] for one in lists], op)):
            wrong.append(f"reduce_scatter {op_name} {dtype} {length}")
    return wrong


def very_large(rank: int, num_elements: int) -> list[str]:
    """Through slots that are much smaller; the last piece is three elements long."""
    ours, size = group("phalanx"), dist.get_world_size()
    numbers = torch.arange(num_elements, dtype=torch.int32)
    mine = numbers + rank
    dist.all_reduce(mine, group=ours)
    wrong = [] if torch.equal(mine, numbers * size + sum(range(size))) else ["all_reduce"]
    mine = numbers * (rank + 1)
    dist.broadcast(mine, size - 1, group=ours)
    return wrong if torch.equal(mine, numbers * size) else [*wrong, "broadcast"]
