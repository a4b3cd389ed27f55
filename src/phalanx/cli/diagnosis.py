"""What `phalanx doctor` says of a machine: pure decisions from the facts in `machine.py`."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from phalanx.cli.machine import Machine
from phalanx.train import candidates

__all__ = ["Choice", "Finding", "choose", "describe_machine", "examine", "is_well"]

_OLDEST_TORCH = (2, 8)
_LEAST_MEMORY_BYTES = 256 << 20  # torch itself, with one small model
_SMALL_SHARED_BYTES = 256 << 20  # a container's usual 64 MiB are less
_FEW_FILES = 256
_LOOPBACK = "lo"


@dataclass(frozen=True)
class Choice:
    """What phalanx takes where the user names nothing.

    Attributes:
        topic: For which call.
        choice: What it takes.
        why: For which reason.
    """

    topic: str
    choice: str
    why: str


@dataclass(frozen=True)
class Finding:
    """Something that will not work, or not as one would think.

    Attributes:
        severity: "error": phalanx itself will not work; "warning": a part of it, or it will be
            slow; "note": nothing is wrong, but somebody may wonder.
        topic: What is concerned.
        text: What was found, and what follows.
        way_out: What helps; empty where nothing has to be done.
    """

    severity: Literal["error", "warning", "note"]
    topic: str
    text: str
    way_out: str = ""


def is_well(findings: list[Finding]) -> bool:
    """Tell whether all that phalanx itself needs is there.

    Example:
        >>> is_well([Finding("warning", "Ray", "It is not installed.")])
        True
    """
    return all(finding.severity != "error" for finding in findings)


def examine(machine: Machine) -> list[Finding]:
    """Return what will not work here, the worst first."""
    found = [
        *_of_software(machine),
        *_of_memory(machine),
        *_of_cores(machine),
        *_of_accelerators(machine),
        *_of_network(machine),
        *_of_extras(machine),
    ]
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def choose(machine: Machine) -> list[Choice]:
    """Return what phalanx takes here where the user names nothing."""
    cores = machine.cores
    formations = [str(each) for each in candidates(torch.device("cpu"), 4, cores=cores)]
    trainer = (
        Choice("Trainer, phalanx train", f"threads, {formations[0]}", "there is one core")
        if len(formations) == 1
        else Choice(
            "Trainer, phalanx train",
            f"threads, the fastest of {', '.join(formations)}",
            f"{_cores(cores)}; the first batch is measured, which takes some two seconds",
        )
    )
    fixed = Choice(
        "… with microbatches=None",
        f"1 replica × {_count(cores, 'thread')}",
        "the number of replicas decides the bits, so it is not measured",
    )
    given = machine.omp_num_threads
    threads = 1 if given is None else _read_threads(given) or machine.threads
    ranks = Choice(
        "phalanx launch",
        f"{_count(cores, 'rank')} × {_count(threads, 'thread')}",
        "one for each core" + ("" if given is None else f"; OMP_NUM_THREADS={given}"),
    )
    return [trainer, fixed, *_choose_device(machine), ranks, *_choose_network(machine)]


def _choose_device(machine: Machine) -> Iterator[Choice]:
    if machine.devices:
        kind, count = machine.devices[0].partition(":")[0], len(machine.devices)
        yield Choice(
            f"DataParallel of a model on {kind}",
            _count(count, "replica"),
            f"one for each device; a Trainer takes replicas={_names_of(kind, count)}",
        )


def _choose_network(machine: Machine) -> Iterator[Choice]:
    if machine.nccl:
        backend, why = "torch's own choice", "there are GPUs; 'phalanx' gives their tensors to NCCL"
    else:
        backend, why = "phalanx", "no GPU: shared memory on one host"
    yield Choice("init_process_group()", backend, why)
    if machine.named_interfaces:
        where, why = ", ".join(machine.named_interfaces), "GLOO_SOCKET_IFNAME names it"
    elif machine.host_address is None:
        where, why = _LOOPBACK, "the host's name has no address"
    else:
        where, why = machine.host_address, "the host's name stands for it"
    yield Choice("Between hosts", where, why)


def _of_software(machine: Machine) -> Iterator[Finding]:
    if not machine.system.startswith("Linux"):
        yield Finding(
            "error",
            "System",
            f"Phalanx needs Linux, but this is {machine.system}: worker processes and ranks share "
            "memory by its means.",
            "Use a container or a virtual machine with Linux.",
        )
    numbers = tuple(int(number) for number in re.findall(r"\d+", machine.torch)[:2])
    if numbers < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        yield Finding(
            "error",
            "torch",
            f"torch must be {oldest} or newer, but is {machine.torch}.",
            f"pip install 'torch>={oldest}'",
        )
    if not machine.compiled:
        build = "Install phalanx again: pip install --force-reinstall --no-deps phalanx"
        yield Finding(
            "warning",
            "Compiled rows",
            "Nothing was compiled when phalanx was installed. Tables, ranks and worker processes "
            "do the same with torch's operators, in up to twice the time.",
            build if machine.compiler else f"Install a compiler of C (cc). {build}",
        )


def _of_memory(machine: Machine) -> Iterator[Finding]:
    available = machine.available_bytes
    if available is not None and available < _LEAST_MEMORY_BYTES:
        limit = machine.limit_bytes
        yield Finding(
            "error",
            "Memory",
            f"Only {_size(available)} are left to this process.",
            "End other programs."
            if limit is None
            else f"Raise the container's limit of {_size(limit)}, or end what else runs in it.",
        )
    if machine.region_error is not None:
        yield Finding(
            "error",
            "Shared memory",
            f"No memory can be shared with other processes: {machine.region_error}",
            "executor='threads' does without. Let the container call memfd_create, and see to its "
            "limits on files.",
        )
    size, free = machine.shared_bytes, machine.shared_free_bytes
    what = "Tables lie there, and what workers of a DataLoader send"
    if size is None or free is None or not machine.shared_is_writable:
        yield Finding(
            "warning",
            "/dev/shm",
            f"/dev/shm is {'not there' if size is None else 'not writable'}. {what}.",
            "Mount a tmpfs there; worker processes and ranks of a Trainer do without.",
        )
    elif free < _SMALL_SHARED_BYTES:
        yield Finding(
            "warning",
            "/dev/shm",
            f"/dev/shm has {_size(free)} free of {_size(size)}. {what}; worker processes and "
            "ranks of a Trainer do not need it.",
            "Remove what is left there, or give a container more: docker run --shm-size=4g",
        )
    if machine.open_files < _FEW_FILES:
        within = min(4096, machine.most_open_files)
        yield Finding(
            "warning",
            "Open files",
            f"This process may have {machine.open_files} files open. Worker processes and ranks "
            "need some ten each.",
            f"ulimit -n {within}"
            if within > machine.open_files
            else "Have the administrator raise the limit (ulimit -Hn).",
        )


def _of_cores(machine: Machine) -> Iterator[Finding]:
    quota, cores = machine.quota_cores, machine.cores
    if quota is not None and quota < cores:
        whole = max(1, math.floor(quota))
        yield Finding(
            "warning",
            "Cores",
            f"A control group allows the time of {quota:g} cores, but phalanx and torch count "
            f"{cores}: threads beyond the quota are halted in the middle of a step.",
            f"taskset -c 0-{whole - 1} phalanx …, or replicas={whole}, or phalanx launch -n "
            f"{whole}",
        )
    elif cores == 1:
        yield Finding(
            "note",
            "Cores",
            "There is one core. Replicas on the CPU give the same numbers, but no speed.",
        )
    given = machine.omp_num_threads
    if given is not None and _read_threads(given) is None:
        yield Finding(
            "warning",
            "Threads",
            f"OMP_NUM_THREADS must be a positive number, but is {given!r}: it is not followed, and "
            f"each rank takes {_count(machine.threads, 'thread')}.",
            "unset OMP_NUM_THREADS, or export OMP_NUM_THREADS=1",
        )
    if not machine.keeps_order:
        yield Finding(
            "warning",
            "Processor",
            f"On {machine.processor} nothing was tried: other processors than x86 may see memory "
            "in another order, for which there are locks.",
            "Run the tests first: make test",
        )
    elif machine.cpu_capability in ("DEFAULT", "NO AVX"):
        yield Finding(
            "warning",
            "Processor",
            "torch finds no AVX2 here, and computes several times slower than it might.",
            "Use a newer processor, or let the virtual machine show its own (-cpu host).",
        )


def _of_accelerators(machine: Machine) -> Iterator[Finding]:
    if machine.devices and machine.devices[0].startswith("cuda") and not machine.nccl:
        yield Finding(
            "warning",
            "NCCL",
            "There are GPUs, but this torch has no NCCL: ranks cannot exchange tensors on them.",
            "Install torch's own build for CUDA: https://pytorch.org/get-started/locally",
        )
    if machine.nvidia_driver and not machine.devices:
        yield Finding(
            "warning",
            "GPU",
            "There is a driver of NVIDIA's, but "
            + (
                f"this torch ({machine.torch}) was built without CUDA."
                if machine.cuda is None
                else f"torch sees no GPU by it: it may be too old for CUDA {machine.cuda}."
            ),
            "Install torch's build for the driver's CUDA (nvidia-smi tells it): "
            "https://pytorch.org/get-started/locally",
        )


def _of_network(machine: Machine) -> Iterator[Finding]:
    others = [name for name in machine.interfaces if name != _LOOPBACK]
    unknown = [name for name in machine.named_interfaces if name not in machine.interfaces]
    if unknown:
        yield Finding(
            "warning",
            "Network",
            f"GLOO_SOCKET_IFNAME names {', '.join(unknown)}, but in use are "
            f"{', '.join(machine.interfaces) or 'none'}. Ranks on several hosts cannot connect.",
            f"export GLOO_SOCKET_IFNAME={(others or [_LOOPBACK])[0]}",
        )
    elif others and not machine.named_interfaces and not _is_reached(machine.host_address):
        address = machine.host_address or "no address"
        yield Finding(
            "warning",
            "Network",
            f"The host's name stands for {address}, which no other host reaches. Jobs on one host "
            "work; ranks on several cannot connect.",
            f"export GLOO_SOCKET_IFNAME={others[0]}",
        )


def _of_extras(machine: Machine) -> Iterator[Finding]:
    if machine.zmq is None:
        yield Finding(
            "note",
            "ZeroMQ",
            "pyzmq is not installed. Tables on several hosts need it, and so does Ray.",
            "pip install 'phalanx[cluster]'",
        )
    elif not machine.zmq_encrypts:
        yield Finding(
            "warning",
            "ZeroMQ",
            "This ZeroMQ was built without CURVE: tables on several hosts cannot use a secret.",
            "Install pyzmq's own build: pip install --force-reinstall pyzmq",
        )
    if machine.ray is None:
        yield Finding(
            "note",
            "Ray",
            "Ray is not installed. Only phalanx launch --ray needs it.",
            "pip install 'phalanx[ray]'",
        )


def describe_machine(machine: Machine) -> list[tuple[str, str]]:
    """Return the facts as rows of a table."""
    cores = f"{machine.cores} of {machine.machine_cores}"
    if machine.quota_cores is not None:
        cores += f", quota {machine.quota_cores:g}"
    limit = "" if machine.limit_bytes is None else f", limit {_size(machine.limit_bytes)}"
    threads = f"{_count(machine.threads, 'thread')} in an operator"
    if machine.omp_num_threads is not None:
        threads += f" (OMP_NUM_THREADS={machine.omp_num_threads})"
    built_for = "the CPU" if machine.cuda is None else f"CUDA {machine.cuda}"
    shared = (
        "not there"
        if machine.shared_bytes is None or machine.shared_free_bytes is None
        else f"{_size(machine.shared_free_bytes)} free of {_size(machine.shared_bytes)}"
    )
    zmq = machine.zmq and f"{machine.zmq}, {'with' if machine.zmq_encrypts else 'without'} CURVE"
    address = machine.host_address or "no address"
    return [
        ("phalanx", f"{machine.phalanx}, Python {machine.python}, {machine.system}"),
        ("Processor", f"{machine.processor}, torch uses {machine.cpu_capability}"),
        ("Cores", cores),
        ("Memory", f"{_size(machine.available_bytes)} left{limit}"),
        ("/dev/shm", shared),
        ("torch", f"{machine.torch}, built for {built_for}, {threads}"),
        ("Accelerators", ", ".join(machine.devices) or "none"),
        ("NCCL", "yes" if machine.nccl else "no"),
        ("Interfaces", f"{', '.join(machine.interfaces) or 'none'}; host's name: {address}"),
        ("ZeroMQ", zmq or "not installed"),
        ("Ray", machine.ray or "not installed"),
        (
            "Compiled rows",
            f"{'yes' if machine.compiled else 'no'}; compiler: {machine.compiler or 'none'}",
        ),
        ("Open files", f"{machine.open_files}, at most {machine.most_open_files}"),
    ]


def _is_reached(address: str | None) -> bool:
    return address is not None and not ipaddress.ip_address(address).is_loopback


def _names_of(kind: str, count: int) -> list[str]:
    names = [f"{kind}:{index}" for index in range(min(count, 2))]
    return names if count <= 2 else [*names, "…"]


def _cores(count: int) -> str:
    return _count(count, "core")


def _read_threads(text: str) -> int | None:
    """Read OMP_NUM_THREADS, a number or one for each level of nesting; None where it is neither."""
    found = re.fullmatch(r"\s*0*([1-9][0-9]{0,8})\s*(,[\s0-9,]*)?", text, flags=re.ASCII)
    return None if found is None else int(found[1])


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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
