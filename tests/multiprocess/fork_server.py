"""The process that others are forked from: it has imported what they need, so each costs little.

It is started by the first of them and ends with us. It has modules, but neither threads nor groups,
and the environment variables of its own start.
"""

from __future__ import annotations

import multiprocessing

__all__ = ["context"]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",  # which the first optimizer of a process would import
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torchmetrics",
        "pytest",
        "phalanx.tables",
    ]
)
