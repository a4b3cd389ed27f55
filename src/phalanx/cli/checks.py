"""The checks of `phalanx doctor`: each reads one fact of this machine and judges it."""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from phalanx import __version__
from phalanx.distributed import nccl_is_here
from phalanx.errors import PhalanxError
from phalanx.ipc import Region, available_memory_bytes, cores_allowed
from phalanx.native import is_compiled
from phalanx.replicas import num_cores

_OLDEST_TORCH = (2, 8)
_LEAST_MEMORY_BYTES = 256 << 20  # torch itself, with one small model
_LEAST_SHARED_BYTES = 256 << 20  # a container's usual 64 MiB are less
_LEAST_FILES = 256
_SHARED = Path("/dev/shm")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_TRIAL_BYTES = 1 << 16


@dataclass(frozen=True)
class Check:
    """One fact about this machine, and the verdict on it.

    Attributes:
        topic: The part of the machine.
        value: The fact.
        verdict: "ok"; "warning" if a part of phalanx will not work or will be slow; "error" if
            phalanx itself will not work.
        advice: The consequence and the remedy; empty for "ok".
    """

    topic: str
    value: str
    verdict: Literal["ok", "warning", "error"] = "ok"
    advice: str = ""


def _system() -> Check:
    value = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() != "Linux":
        return Check("System", value, "error", "Phalanx needs Linux: use a container with Linux.")
    return Check("System", value)


def _versions() -> Check:
    built_for = "the CPU" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    value = (
        f"phalanx {__version__}, Python {platform.python_version()}, torch {torch.__version__} "
        f"for {built_for}"
    )
    numbers = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if numbers < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        return Check("Versions", value, "error", f"Run pip install 'torch>={oldest}'.")
    return Check("Versions", value)


def _cores() -> Check:
    cores, quota = num_cores(), cores_allowed()
    threads = f"{torch.get_num_threads()} threads in an operator"
    value = f"{cores} of {os.cpu_count()}, {threads}, {torch.backends.cpu.get_cpu_capability()}"
    if quota is not None and quota < cores:
        return Check(
            "Cores",
            f"{value}, quota {quota:g}",
            "warning",
            "A control group allows less time than there are cores, so threads are halted in the "
            f"middle of a step. Give replicas={max(1, int(quota))}, or run under `taskset`.",
        )
    return Check("Cores", value)


def _memory() -> Check:
    available = available_memory_bytes()
    value = f"{_size(available)} left"
    if available is not None and available < _LEAST_MEMORY_BYTES:
        return Check("Memory", value, "error", "End other programs, or raise the limit.")
    return Check("Memory", value)


def _shared_memory() -> Check:
    try:
        Region.create(_TRIAL_BYTES, label="trial")
    except (OSError, PhalanxError) as error:
        return Check(
            "Shared memory",
            str(error),
            "error",
            "Processes cannot share memory. Let the container call memfd_create, or train with "
            "executor='threads'.",
        )
    return Check("Shared memory", "works")


def _shared_folder() -> Check:
    what = "Tables need it, and so do workers of a DataLoader. Run the container with --shm-size=4g"
    try:
        found = os.statvfs(_SHARED)
    except OSError as error:
        return Check(str(_SHARED), str(error), "warning", f"{what}.")
    free = found.f_bavail * found.f_frsize
    value = f"{_size(free)} free"
    if free < _LEAST_SHARED_BYTES or not os.access(_SHARED, os.W_OK | os.X_OK):
        return Check(str(_SHARED), value, "warning", f"{what}, and let this user write there.")
    return Check(str(_SHARED), value)


def _open_files() -> Check:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{files}, at most {most}"
    if files < _LEAST_FILES:
        advice = "Worker processes and ranks need about ten each. Run `ulimit -n 4096`."
        return Check("Open files", value, "warning", advice)
    return Check("Open files", value)


def _accelerators() -> Check:
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        if _NVIDIA_DRIVER.exists():
            advice = "Install torch's build for the CUDA that nvidia-smi shows."
            return Check("Accelerators", "a driver of NVIDIA, no GPU for torch", "warning", advice)
        return Check("Accelerators", "none")
    count = torch.accelerator.device_count()
    is_cuda = kind.type == "cuda"
    names = [torch.cuda.get_device_name(i) if is_cuda else kind.type for i in range(count)]
    value = f"{', '.join(names)}; NCCL: {'yes' if nccl_is_here() else 'no'}"
    if is_cuda and not nccl_is_here():
        advice = "Ranks exchange tensors on GPUs slowly. Install torch's own build for CUDA."
        return Check("Accelerators", value, "warning", advice)
    return Check("Accelerators", value)


def _compiled() -> Check:
    if is_compiled():
        return Check("C library", "yes")
    advice = "Tables cannot run, and ranks are slower. Install a C compiler, then phalanx again."
    return Check("C library", "no", "warning", advice)


def run_checks() -> list[Check]:
    """Run all checks on this machine, as this process sees it."""
    return [
        _versions(),
        _system(),
        _cores(),
        _memory(),
        _shared_memory(),
        _shared_folder(),
        _open_files(),
        _accelerators(),
        _compiled(),
    ]


def _size(count: int | None) -> str:
    """Write a number of bytes.

    Example:
        >>> _size(3 << 29), _size(64 << 20), _size(None)
        ('1.5 GiB', '64 MiB', 'unknown')
    """
    if count is None:
        return "unknown"
    if count < 1 << 30:
        return f"{count / (1 << 20):.0f} MiB"
    return f"{count / (1 << 30):.1f} GiB"
