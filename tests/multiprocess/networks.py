"""Hosts as namespaces of the network, each with a cable to a switch; needs root.

host 0  10.213.9.1 ──┐
host 1  10.213.9.2 ──┼── switch
host 2  10.213.9.3 ──┘
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

import pytest

_CLONE_NEWNET = 0x40000000


class Networks:
    """Namespaces of the network, one for each host.

    Attributes:
        names: Of the namespaces.
        addresses: Of the hosts, which see each other.
    """

    def __init__(self, num_hosts: int) -> None:
        self.names = [f"phx{os.getpid()}-{host}" for host in range(num_hosts)]
        self.addresses = [f"10.213.9.{1 + host}" for host in range(num_hosts)]
        self.switch = f"phx{os.getpid()}-s"

    def lay(self) -> None:
        """Make the namespaces and their cables."""
        for name in (self.switch, *self.names):
            _ip("netns", "add", name)
        _ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "switch", "up")
        for host, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"port{host}"
            _ip("-n", name, "link", "set", "lo", "up")
            _ip(
                *("link", "add", "phx0", "netns", name, "type", "veth"),
                *("peer", port, "netns", self.switch),
            )
            _ip("-n", self.switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "phx0")
            _ip("-n", name, "link", "set", "phx0", "up")

    def remove(self) -> None:
        """Remove the namespaces, and with them the cables."""
        for name in (self.switch, *self.names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def cut(self, host: int) -> None:
        """Pull a host's cable."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Put it back."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "up")

    def limit(self, host: int, rate: str) -> None:
        """Let a host send no faster than ``rate``, as `tc` writes it."""
        words = ("tc", "-n", self.names[host])
        _run(
            *words, *("qdisc", "add", "dev", "phx0", "root", "handle", "1:", "htb", "default", "1")
        )
        _run(
            *(*words, "class", "add", "dev", "phx0", "parent", "1:"),
            *("classid", "1:1", "htb", "rate", rate),
        )

    def words(self, host: int) -> list[str]:
        """Return what runs a command on a host, with a /dev/shm of its own."""
        own_memory = 'mount -t tmpfs tmpfs /dev/shm && hostname "$0" && exec "$@"'
        name = self.names[host]
        # Who opens the store at an endpoint is decided by a host's name, so theirs are addresses.
        return [
            *("ip", "netns", "exec", name, "unshare", "--uts"),
            *("sh", "-c", own_memory, self.addresses[host]),
        ]


def enter(name: str) -> None:
    """Put this thread, and what it starts, into a namespace."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(descriptor)


@contextlib.contextmanager
def networks_of_hosts(num_hosts: int) -> Iterator[Networks]:
    """Make namespaces; skip the test where that is not allowed."""
    networks = Networks(num_hosts)
    try:
        try:
            networks.lay()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs the right to make namespaces of the network: {error}")
        yield networks
    finally:
        networks.remove()


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
