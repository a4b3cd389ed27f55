"""Calls of the backend `phalanx` beyond what gloo offers to compare with: order, tags, errors."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist

import phalanx  # noqa: F401
from phalanx.errors import ConfigError, PeerError, StateError, UnsupportedError
from tests.multiprocess.ranks import Ranks


@pytest.fixture(scope="module", params=["one host", "two hosts"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(3, hosts="" if request.param == "one host" else "aba") as ranks:
        yield ranks


def make(timeout_s: float = 60.0, ranks: list[int] | None = None) -> dist.ProcessGroup:
    group = dist.new_group(ranks, datetime.timedelta(seconds=timeout_s), "phalanx")
    dist.barrier()  # else a rank may give up or leave while another still connects
    return group


def messages_from_anybody(rank: int) -> list[int]:
    group = make()
    senders = []
    if rank == 2:
        for _ in range(4):
            tensor = torch.empty(3)
            sender = dist.recv(tensor, None, group)
            assert tensor.tolist() == [sender] * 3
            senders.append(sender)
    else:
        for _ in range(2):
            dist.send(torch.full((3,), float(rank)), 2, group)
    dist.destroy_process_group(group)
    return senders


def test_a_message_from_anybody_names_its_sender(ranks):
    assert sorted(ranks.run(messages_from_anybody)[2]) == [0, 0, 1, 1]


def groups_in_another_order(rank: int) -> list[float]:
    """Asynchronous calls on two groups, begun in opposite orders: legal, as nobody waits yet."""
    groups = [make(), make()]
    tensors = [torch.full((70_000,), float(rank + 1)) for _ in groups]
    order = (0, 1) if rank else (1, 0)
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    done = [work.get_future().then(lambda f: f.value()[0].sum().item()) for work in works]
    for work in works:
        work.wait()
        assert work.is_completed()
    sums = [future.wait() for future in done]
    for group in groups:
        dist.destroy_process_group(group)
    return sums


def test_asynchronous_calls_on_two_groups_may_begin_in_any_order(ranks):
    assert ranks.run(groups_in_another_order) == [[6.0 * 70_000] * 2] * 3


def many_at_once(rank: int) -> list[float]:
    group = make()
    tensors = [torch.full((length,), float(rank)) for length in (3, 70_000, 0, 17)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    dist.barrier(group=group)
    assert all(work.is_success() for work in works)
    with dist._coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    return [tensor.sum().item() for tensor in tensors]


def test_calls_of_one_group_go_in_the_order_of_the_calls(ranks):
    assert ranks.run(many_at_once) == [[27.0, 630_000.0, 0.0, 153.0]] * 3


def some_of_the_ranks(rank: int) -> int:
    group = make(ranks=[0, 2])
    if rank == 1:
        return -1
    total = torch.tensor(rank + 5)
    dist.all_reduce(total, group=group)
    dist.destroy_process_group(group)
    return int(total)


def test_a_group_of_some_ranks_works(ranks):
    assert ranks.run(some_of_the_ranks) == [12, -1, 12]


def error_of(call: Callable[[dist.ProcessGroup, int], object], rank: int) -> tuple[str, str]:
    group = make()
    try:
        call(group, rank)
    except Exception as exc:
        return type(exc).__name__, str(exc)
    finally:
        dist.destroy_process_group(group)
    return "nothing", ""


def different_calls(group: dist.ProcessGroup, rank: int) -> None:
    if rank == 1:
        dist.broadcast(torch.ones(4), 0, group=group)
    else:
        dist.all_reduce(torch.ones(70_000), group=group)


def test_ranks_in_different_calls_are_told_so(ranks):
    answers = ranks.run(partial(error_of, different_calls))
    assert {name for name, _ in answers} <= {"StateError", "GroupAborted"}
    told = [text for name, text in answers if name == "StateError"]
    assert told
    for text in told:
        assert "all_reduce #1 (SUM of 70000 × float32)" in text
        assert "broadcast #1 (4 × float32, root 0)" in text


def different_sizes(group: dist.ProcessGroup, rank: int) -> None:
    dist.all_reduce(torch.ones(70_000 + rank), group=group)


def test_ranks_in_one_call_with_different_sizes_are_told_so(ranks):
    errors = ranks.run(partial(error_of, different_sizes))
    told = [text for name, text in errors if name == "StateError"]
    assert told
    assert all("tensors of the same sizes and dtype" in text for text in told)
    assert not any("only some ranks" in text for text in told)


def other_parts(rank: int) -> list[str]:
    """Rank 1 cuts as many elements otherwise."""
    found, sizes = [], [1, 2, 4] if rank == 1 else [0, 3, 4]
    parts = [torch.ones(size) for size in sizes]
    for call in (
        lambda group: dist.all_gather(parts, torch.ones(sizes[rank]), group),
        lambda group: dist.reduce_scatter(torch.ones(sizes[rank]), parts, group=group),
    ):
        group = make()
        with pytest.raises((StateError, PeerError)) as caught:
            call(group)
        found.append(str(caught.value))
        dist.barrier()  # of gloo: a rank that was told early stays while others still connect
        dist.destroy_process_group(group)
    return found


def test_ranks_whose_parts_differ_but_for_their_sum_are_told_so(ranks):
    gathered, scattered = zip(*ranks.run(other_parts), strict=True)
    for texts, words in ((gathered, "all_gather #1 ("), (scattered, "reduce_scatter #1 (SUM of ")):
        told = [text for text in texts if "must make the same calls" in text]
        assert told
        assert all(f"{words}7 × float32)" in text for text in told)
        assert all("tensors of the same sizes" in text for text in told)


def one_does_not_come(rank: int, absent: int) -> tuple[str, str, int | None]:
    group = make(timeout_s=1.0)
    dist.barrier(group=group)
    caught: BaseException | None = None
    if rank != absent:
        try:
            dist.all_gather_into_tensor(torch.empty(9), torch.ones(3), group=group)
        except Exception as exc:
            caught = exc
    dist.barrier()  # of gloo: the absent rank stays until the others have given up
    dist.destroy_process_group(group)
    return type(caught).__name__, str(caught), getattr(caught, "rank", None)


@pytest.mark.promise("every-wait-ends")
@pytest.mark.parametrize("absent", [1, 2])
def test_who_does_not_come_is_named_at_the_timeout(ranks, absent):
    """Every rank that waits names it. What it began last, only a rank of its own host can see."""
    answers = ranks.run(one_does_not_come, absent)
    assert [rank for _, _, rank in answers] == [None if r == absent else absent for r in range(3)]
    late = [text for name, text, _ in answers if name == "PeerTimeout"]
    assert late
    assert f"Rank {absent} of 3 did not come to all_gather of group" in late[0]
    beside_others = not ranks.hosts or ranks.hosts.count(ranks.hosts[absent]) > 1
    assert (f"rank {absent}: barrier #" in late[0]) is beside_others
    assert ("over the network" in late[0]) is not beside_others


def refused(rank: int) -> list[str]:
    """What cannot be is refused at once and by the caller alone; the group goes on."""
    group = make()
    calls = [
        (UnsupportedError, lambda: dist.all_reduce(torch.eye(3).to_sparse_csr(), group=group)),
        (ConfigError, lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND, group=group)),
        (ConfigError, lambda: dist.all_reduce(torch.ones(3, dtype=torch.uint16), group=group)),
        (ConfigError, lambda: dist.send(torch.ones(3), (rank + 1) % 3, group, -1)),
        (ConfigError, lambda: dist.all_gather_into_tensor(torch.ones(4), torch.ones(3), group)),
    ]
    words = []
    for kind, call in calls:
        with pytest.raises(kind) as caught:
            call()
        words.append(str(caught.value))
    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [3.0, 3.0]
    dist.destroy_process_group(group)
    return words


def test_what_cannot_be_is_refused_and_the_group_goes_on(ranks):
    sparse, bits, unsigned, tag, length = ranks.run(refused)[1]
    assert "`tensor` must be dense" in sparse
    assert "`op` must be one that torch has for torch.float32, but is BAND" in bits
    assert "`op` must be one that torch has for torch.uint16, but is SUM" in unsigned
    assert "`tag` must be 0 or more, but is -1" in tag
    assert "`output` must hold 3 times the elements of `input` (3 × torch.float32)" in length


def reduced_in_inference_mode(rank: int) -> list[float]:
    """Calls inside and outside of the mode in turn: what one leaves behind serves the other."""
    group, sums = make(), []
    for inside in (True, False, True):
        for numbers in (torch.ones(5), torch.ones(600_001), torch.ones(7, 9).t()):
            with torch.inference_mode(inside):
                tensor = numbers * (rank + 1)
                work = dist.all_reduce(tensor, group=group, async_op=True)
                work.wait()
            sums.append(tensor.mean().item())
    with torch.inference_mode():
        tensors = [torch.ones(5), torch.ones(4, 3).t()]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.mean().item())
    dist.destroy_process_group(group)
    return sums


def test_tensors_of_inference_mode_are_reduced_in_it_and_out_of_it(ranks):
    assert ranks.run(reduced_in_inference_mode) == [[6.0] * 9 + [3.0] * 2] * 3


def expanded_outputs(rank: int) -> list[str]:
    group = make()
    apart, expanded = torch.ones(3, 5), torch.ones(5).expand(3, 5)
    said = []
    for call in (
        lambda: dist.all_reduce(expanded, group=group),
        lambda: dist.all_gather([apart, expanded, apart], apart, group=group),
        lambda: dist.recv(expanded, (rank + 1) % 3, group),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        said.append(str(caught.value))
    dist.broadcast(expanded if rank == 0 else apart, 0, group)
    dist.all_gather([apart, apart.clone(), apart.clone()], expanded, group=group)
    dist.all_reduce(apart, group=group)
    assert torch.equal(apart, torch.full((3, 5), 3.0))
    assert torch.equal(expanded, torch.ones(3, 5))
    strided = torch.zeros(6, 2)[:, 0]
    negative = torch._neg_view(torch.full((2,), rank + 0.5))
    dist.all_gather_into_tensor(strided, negative, group)
    assert strided.tolist() == [-0.5, -0.5, -1.5, -1.5, -2.5, -2.5]
    dist.destroy_process_group(group)
    return said


def test_an_expanded_tensor_is_refused_as_output_and_taken_as_input(ranks):
    for said in ranks.run(expanded_outputs):
        assert said == [
            f"`{name}` must have memory for each of its elements, but is expanded (shape (3, 5), "
            "strides (0, 1)). Give `.contiguous()` and keep it."
            for name in ("tensor", "output", "tensor")
        ]


def destroyed_too_early(rank: int) -> None:
    """Rank 0 goes before its call has ended; the others, who never made it, go after it."""
    group = make()
    if rank != 0:
        dist.barrier()
    message = dist.irecv(torch.empty(1), 1, group) if rank == 0 else None
    work = dist.all_reduce(torch.ones(600_001), group=group, async_op=True) if rank == 0 else None
    dist.destroy_process_group(group)
    if work is not None and message is not None:
        with pytest.raises(PeerError):
            work.wait()
        dist.barrier()
        with pytest.raises(PeerError):
            message.wait()


def test_what_has_not_ended_when_a_group_is_destroyed_fails(ranks):
    ranks.run(destroyed_too_early)
