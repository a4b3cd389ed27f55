"""Freed memory that stays in the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Touches 48 MiB in blocks above glibc's first threshold, frees them, and does it again.
FAULTS_OF_20_ROUNDS = """
import ctypes, resource
from phalanx.memory import keep_freed_memory
{call}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def work():
    blocks = [libc.malloc(8 << 20) for _ in range(6)]
    for block in blocks:
        ctypes.memset(block, 1, 8 << 20)
    for block in reversed(blocks):
        libc.free(block)
work()
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def num_faults(call: str) -> int:
    code = FAULTS_OF_20_ROUNDS.format(call=call)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(ran.stdout)


def test_memory_that_was_freed_is_not_mapped_anew():
    if num_faults("pass") < 1000:
        pytest.skip("this C library keeps freed memory by itself, or is told so by its variables")
    assert num_faults("keep_freed_memory()") < 100
