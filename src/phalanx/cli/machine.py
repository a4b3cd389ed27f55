"""What `phalanx doctor` knows of this machine: read here, judged in `diagnosis.py`."""

from __future__ import annotations

import os
import platform
import resource
import socket
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import which

import torch

from phalanx import __version__
from phalanx.distributed import available_cores, interfaces_up, nccl_is_here, network_interfaces
from phalanx.errors import PhalanxError
from phalanx.ipc import (
    KEEPS_ORDER,
    Region,
    available_memory_bytes,
    cores_allowed,
    memory_limit_bytes,
)
from phalanx.memory import is_compiled

__all__ = ["Machine", "read_machine"]

_SHARED = Path("/dev/shm")
_NVIDIA = Path("/proc/driver/nvidia/version")
_TRIAL_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts; None for what there is not.

    Attributes:
        phalanx: Its version, as the next ones.
        system: The kernel, such as "Linux 6.1".
        processor: Such as "x86_64".
        keeps_order: Whether its stores are seen in their order, as x86's are.
        cpu_capability: What torch's kernels use of it, such as "AVX2".
        cores: That this process may run on.
        machine_cores: That there are.
        quota_cores: How many cores' time its control groups allow.
        available_bytes: Memory that is left to this process.
        limit_bytes: That its control groups allow it.
        shared_bytes: Size of /dev/shm.
        shared_free_bytes: What is left of it.
        shared_is_writable: Whether files can be made there.
        region_error: Why no memory can be shared with other processes.
        threads: Inside torch's operators, as torch has been told.
        omp_num_threads: The variable OMP_NUM_THREADS.
        devices: Accelerators that torch sees, by name.
        cuda: The version of CUDA that torch was built for.
        nvidia_driver: Whether there is one.
        nccl: Whether torch has it, and a GPU for it.
        interfaces: Network interfaces in use.
        named_interfaces: Those that GLOO_SOCKET_IFNAME names.
        host_address: What the host's name stands for.
        ray: Its version.
        zmq: Version of pyzmq.
        zmq_encrypts: Whether it has CURVE.
        compiler: A compiler of C.
        compiled: Whether phalanx's files of C were compiled.
        open_files: How many this process may have open.
        most_open_files: Up to which it may raise that itself.
    """

    phalanx: str
    python: str
    torch: str
    system: str
    processor: str
    keeps_order: bool
    cpu_capability: str
    cores: int
    machine_cores: int
    quota_cores: float | None
    available_bytes: int | None
    limit_bytes: int | None
    shared_bytes: int | None
    shared_free_bytes: int | None
    shared_is_writable: bool
    region_error: str | None
    threads: int
    omp_num_threads: str | None
    devices: tuple[str, ...]
    cuda: str | None
    nvidia_driver: bool
    nccl: bool
    interfaces: tuple[str, ...]
    named_interfaces: tuple[str, ...]
    host_address: str | None
    ray: str | None
    zmq: str | None
    zmq_encrypts: bool
    compiler: str | None
    compiled: bool
    open_files: int
    most_open_files: int


def read_machine() -> Machine:
    """Read the facts of this machine, as this process sees it."""
    shared = _room_in(_SHARED)
    zmq, zmq_encrypts = _read_zmq()
    open_files, most_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        phalanx=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        system=f"{platform.system()} {platform.release()}",
        processor=platform.machine(),
        keeps_order=KEEPS_ORDER,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cores=available_cores(),
        machine_cores=os.cpu_count() or 1,
        quota_cores=cores_allowed(),
        available_bytes=available_memory_bytes(),
        limit_bytes=memory_limit_bytes(),
        shared_bytes=None if shared is None else shared[0],
        shared_free_bytes=None if shared is None else shared[1],
        shared_is_writable=os.access(_SHARED, os.W_OK | os.X_OK),
        region_error=_try_region(),
        threads=torch.get_num_threads(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        devices=_accelerators(),
        cuda=torch.version.cuda,
        nvidia_driver=_NVIDIA.exists(),
        nccl=nccl_is_here(),
        interfaces=tuple(interfaces_up()),
        named_interfaces=tuple(network_interfaces()),
        host_address=_host_address(),
        ray=_version_of("ray"),
        zmq=zmq,
        zmq_encrypts=zmq_encrypts,
        compiler=which("cc"),
        compiled=is_compiled(),
        open_files=open_files,
        most_open_files=most_open_files,
    )


def _room_in(folder: Path) -> tuple[int, int] | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _try_region() -> str | None:
    try:
        Region.create(_TRIAL_BYTES, label="trial").close()
    except (OSError, PhalanxError) as error:
        return str(error)
    return None


def _accelerators() -> tuple[str, ...]:
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return ()
    indices = range(torch.accelerator.device_count())
    if kind.type == "cuda":
        return tuple(f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in indices)
    return tuple(f"{kind.type}:{index}" for index in indices)


def _host_address() -> str | None:
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    except (OSError, UnicodeError):  # UnicodeError: the name can be none
        return None


def _read_zmq() -> tuple[str | None, bool]:
    try:
        import zmq  # optional: in the extras `cluster` and `ray`
    except ImportError:
        return None, False
    return zmq.__version__, bool(zmq.has("curve"))


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
