"""The rendezvous of a launcher without others, for torch's agent: a store that nobody else reaches.

torch's own opens its store at all addresses of the host, and lends one to all attempts, where the
ranks of the next one find the addresses of their predecessors.
"""

from __future__ import annotations

import socket

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

__all__ = ["ONE_HOST"]

ONE_HOST = "phalanx-one-host"
_LOOPBACK = "127.0.0.1"


class _OneHost(RendezvousHandler):
    """Every attempt to run the ranks gets a store of its own, at the loopback address only."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: Store

    def get_backend(self) -> str:
        return ONE_HOST

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((_LOOPBACK, 0))
        port = listener.getsockname()[1]
        fd = listener.detach()
        self._store = TCPStore(
            _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd
        )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(ONE_HOST, lambda parameters: _OneHost(parameters.run_id))
