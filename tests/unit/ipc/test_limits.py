"""What machines and control groups leave to a process, read from made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.ipc.limits import available_memory_bytes, cores_allowed


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    1000 kB\nSwapFree:  24 kB\n"}
UNLIMITED = 9223372036854771712


def version_2(limit: object, used: int, cached: int = 0, group: str = "a") -> dict[str, str]:
    where = f"sys/fs/cgroup/{group}/" if group else "sys/fs/cgroup/"
    return {
        where + "memory.max": f"{limit}\n",
        where + "memory.current": f"{used}\n",
        where + "memory.stat": f"anon 5\ninactive_file {cached}\nactive_file 7\n",
    }


def version_1(limit: int, used: int, cached: int = 0) -> dict[str, str]:
    where = "sys/fs/cgroup/memory/job/"
    return {
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/job\n3:cpuset:/\n0::/\n",
        where + "memory.limit_in_bytes": f"{limit}\n",
        where + "memory.usage_in_bytes": f"{used}\n",
        where + "memory.stat": f"inactive_file 3\ntotal_inactive_file {cached}\n",
    }


IN_A_B = {"proc/self/cgroup": "0::/a/b\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 5 kB\n"}, None),
        (MACHINE, 1024 << 10),
        (MACHINE | IN_A_B, 1024 << 10),  # groups without limits
        (MACHINE | IN_A_B | version_2("max", 50), 1024 << 10),
        (MACHINE | IN_A_B | version_2(5000, 2000), 3000),
        (MACHINE | IN_A_B | version_2(5000, 2000, 500), 3500),
        (MACHINE | IN_A_B | version_2(5000, 2000) | version_2(900, 100, group="a/b"), 800),
        (MACHINE | IN_A_B | version_2(700, 0, group="") | version_2(900, 0, group="a/b"), 700),
        (MACHINE | IN_A_B | version_2(100, 200), 0),
        (IN_A_B | version_2(5000, 2000), 3000),
        (MACHINE | version_1(5000, 2000, 10), 3010),
        (MACHINE | version_1(UNLIMITED, 2000), 1024 << 10),
    ],
)
def test_the_tightest_bound_of_memory_counts(tmp_path, files, expected):
    assert available_memory_bytes(machine(tmp_path, files)) == expected


V1 = {"proc/self/cgroup": "9:name=systemd:/\n4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        (IN_A_B, None),
        (IN_A_B | {"sys/fs/cgroup/a/cpu.max": "max 100000\n"}, None),
        (IN_A_B | {"sys/fs/cgroup/a/cpu.max": ""}, None),
        (IN_A_B | {"sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        (
            IN_A_B
            | {
                "sys/fs/cgroup/a/cpu.max": "150000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "50000 100000",
            },
            0.5,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
    ],
)
def test_the_tightest_quota_of_cores_counts(tmp_path, files, cores):
    assert cores_allowed(machine(tmp_path, files)) == cores
