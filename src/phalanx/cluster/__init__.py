"""How workers reach the servers of other hosts: sealed connections, and what goes over them.

And how Ray starts workers on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.cluster.connection import Connection, Endpoint, RemoteCall
from phalanx.cluster.frames import MAX_ARRAY_BYTES, Array, Message, Stream, tag_of
from phalanx.cluster.secret import Secret, make_secret
from phalanx.cluster.server import Answer, Link, Server, Service

if TYPE_CHECKING:
    from phalanx.cluster.ray_launcher import RayJob, launch_script_on_ray, on_ray

__all__ = [
    "MAX_ARRAY_BYTES",
    "Answer",
    "Array",
    "Connection",
    "Endpoint",
    "Link",
    "Message",
    "RayJob",
    "RemoteCall",
    "Secret",
    "Server",
    "Service",
    "Stream",
    "launch_script_on_ray",
    "make_secret",
    "on_ray",
    "tag_of",
]

_OF_THE_LAUNCHER = {"RayJob", "launch_script_on_ray", "on_ray"}


def __getattr__(name: str) -> object:
    """Import the launcher when it is used: it needs torch, which actors of Ray do without."""
    if name not in _OF_THE_LAUNCHER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from phalanx.cluster import ray_launcher  # late: see above

    return getattr(ray_launcher, name)
