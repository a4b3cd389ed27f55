"""How long a read or a write on a connection may wait for the process at its other end."""

from __future__ import annotations

import os
import socket
import struct
from multiprocessing.connection import Connection

__all__ = ["LONGEST_S", "set_timeouts"]

LONGEST_S = 2e6  # 23 days: `poll` counts milliseconds in 31 bits, and infinity is no number to it


def set_timeouts(connection: Connection, seconds: float) -> None:
    """Make a read or a write that gets nothing done for ``seconds`` raise `BlockingIOError`.

    Asking whether there is something to read is not enough: a process may stop in the middle of a
    message, or, before one that is larger than the kernel's buffer, without reading any of it.

    Args:
        connection: One end of a ``multiprocessing.Pipe(duplex=True)``.
    """
    whole, fraction = divmod(max(seconds, 1e-6), 1.0)  # the kernel takes 0 for "for ever"
    value = struct.pack("@ll", int(whole), int(fraction * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setblocking(True)  # whatever the process's default is: that flag is the connection's
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, value)
