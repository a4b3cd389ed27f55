"""How workers reach the servers of other hosts: sealed connections, and what goes over them."""

from phalanx.cluster.connection import Connection, Endpoint, PendingCall, Reply
from phalanx.cluster.frames import Caps, Head
from phalanx.cluster.secret import CurveKeys, Secret, make_secret
from phalanx.cluster.server import Answer, Request, Server, Service

__all__ = [
    "Answer",
    "Caps",
    "Connection",
    "CurveKeys",
    "Endpoint",
    "Head",
    "PendingCall",
    "Reply",
    "Request",
    "Secret",
    "Server",
    "Service",
    "make_secret",
]
