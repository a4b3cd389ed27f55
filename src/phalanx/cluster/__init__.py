"""Connections from workers to the servers of other hosts: encryption and messages."""

from __future__ import annotations

from phalanx.cluster.connection import Connection, Endpoint, RemoteCall
from phalanx.cluster.frames import MAX_BYTES, Message, Stream, tag_of
from phalanx.cluster.secret import Secret, draw_secret, make_secret
from phalanx.cluster.server import Answer, Server, Service

__all__ = [
    "MAX_BYTES",
    "Answer",
    "Connection",
    "Endpoint",
    "Message",
    "RemoteCall",
    "Secret",
    "Server",
    "Service",
    "Stream",
    "draw_secret",
    "make_secret",
    "tag_of",
]
