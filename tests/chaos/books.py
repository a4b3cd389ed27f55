"""Books in tables, in which each add of a client counts itself, on one host or several.

The q-th add of a client adds a line that begins with (1, q, q²). A lost add and a doubled one
cannot cancel in the three sums. Every add changes other rows as well, by which half of an add
would be seen. There are three books:

    rows     int64 matrix; on each host the client's row twice over, a row whose sum stays 0, and
             a tail that every add raises by 1
    whole    int64 array: the client's line, and a tail that every add raises by 1
    keys     int64 by key: the client's key twice over, a key of its own for each q, and two that
             every add raises by 1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx import tables

WHOLE_TAIL = 40
PAIR = [0, 1]  # keys


class Books:
    """The tables, as one client has them open.

    Args:
        world: Where they are.
        clients: How many clients add, on all hosts.
        hosts: How many hosts share the rows.
        tail: Rows of a host's tail.
    """

    def __init__(
        self,
        world: tables.TableGroup,
        clients: int,
        hosts: int = 1,
        tail: int = 0,
    ) -> None:
        self._clients, self._tail = clients, tail
        size = clients + 1 + tail
        self._starts = range(0, hosts * size, size)
        self._size = size
        self.rows = world.matrix(hosts * size, 4, torch.int64, name="rows", init=0)
        self.whole = world.array(3 * clients + WHOLE_TAIL, torch.int64, name="whole")
        self.keys = world.keys(3, torch.int64, name="keys")

    def add(self, book: str, client: int, q: int) -> None:
        """Add the client's q-th line."""
        line = [1, q, q * q]
        if book == "rows":
            zero = self._clients
            shares = [[*line, 7], [0, 0, 0, 5], [*line, 7], [0, 0, 0, -14], [0, 0, 0, -5]]
            places = [client, zero, client, client, zero, *range(zero + 1, self._size)]
            delta = torch.tensor(shares + [[1] * 4] * self._tail).repeat(len(self._starts), 1)
            rows = [start + place for start in self._starts for place in places]
            self.rows.add(delta, rows=rows)
        elif book == "whole":
            delta = torch.ones(3 * self._clients + WHOLE_TAIL, dtype=torch.int64)
            delta[: 3 * self._clients] = 0
            delta[3 * client : 3 * client + 3] = torch.tensor(line)
            self.whole.add(delta)
        else:
            own = own_key(client, q)
            keys = [-1 - client, own, *PAIR, -1 - client, own]
            self.keys.add([line, line, [1] * 3, [1] * 3, line, [0] * 3], rows=keys)

    def count(self, book: str, client: int) -> list[int]:
        """Return how many adds of a client are there, by host; fail unless each is once, whole."""
        if book == "rows":
            zero = self._clients
            found = self.rows.get([start + at for start in self._starts for at in (client, zero)])
            assert not found[::2, 3].any(), f"half of an add: {found.tolist()}"
            assert not found[1::2].any(), f"half of an add: {found.tolist()}"
            return [_count(book, client, line, 2) for line in found[::2, :3].tolist()]
        if book == "whole":
            values = self.whole.get()
            lines, tail = values[: 3 * self._clients].view(-1, 3), values[3 * self._clients :]
            assert bool((tail == lines[:, 0].sum()).all()), f"half of an add: {values.tolist()}"
            return [_count(book, client, lines[client].tolist(), 1)]
        line, one, other = self.keys.get([-1 - client, *PAIR]).tolist()
        assert one == other, f"half of an add: {one}, {other}"
        return [_count(book, client, line, 2)]

    def count_tail(self, host: int) -> int:
        """Return how many adds the tail of a host shows; fail where it shows half of one."""
        start = self._starts[host]
        seen = self.rows.get(range(start + self._clients + 1, start + self._size)).unique()
        assert len(seen) == 1, f"half of an add on host {host}: {seen.tolist()}"
        return int(seen)

    def check_own_keys(self, counts: Sequence[int]) -> None:
        """Fail unless every key is there that an add has brought, with its line, and no other."""
        clients = [-1 - client for client, n in enumerate(counts) if n]
        own = {
            own_key(client, q): [1, q, q * q]
            for client, n in enumerate(counts)
            for q in range(1, n + 1)
        }
        there = self.keys.keys().tolist()
        assert there == sorted([*clients, *PAIR, *own]), "a key is lost, or there without its add"
        lines = self.keys.get(list(own)).tolist() if own else []
        assert lines == list(own.values()), "a key's row is not what was added to it"


def own_key(client: int, q: int) -> int:
    return (client + 1 << 40) + 977 * q


def _count(book: str, client: int, line: list[int], times: int) -> int:
    n = line[0] // times
    expected = [times * s for s in (n, n * (n + 1) // 2, n * (n + 1) * (2 * n + 1) // 6)]
    assert line == expected, f"{book} of client {client}: an add is there twice, or another lost"
    return n
