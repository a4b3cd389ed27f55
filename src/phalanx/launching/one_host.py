"""The rendezvous of a launcher without others, for torch's agent: a store of its ranks alone.

torch's own opens its store at all addresses of the host, and lends one to all attempts, where the
ranks of the next one find the addresses of their predecessors.
"""

from __future__ import annotations

import socket

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

__all__ = ["ONE_HOST"]

ONE_HOST = "phalanx-one-host"
_LOOPBACK = "127.0.0.1"


class _OneHost(StaticTCPRendezvous):
    """Every attempt to run the ranks gets its own store, at the loopback address only."""

    def get_backend(self) -> str:
        return ONE_HOST

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((_LOOPBACK, 0))
        port, fd = listener.getsockname()[1], listener.detach()
        self._store = TCPStore(
            _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd
        )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_LOOPBACK, port))


rendezvous_handler_registry.register(
    ONE_HOST, lambda parameters: _OneHost(_LOOPBACK, 0, 0, 1, parameters.run_id, 0)
)
