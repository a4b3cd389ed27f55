"""The limits of control groups, read from made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.ipc.control_groups import cores_allowed

V2 = {"proc/self/cgroup": "0::/a/b\n"}
V1 = {"proc/self/cgroup": "9:name=systemd:/\n4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n"}


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        (V2, None),
        (V2 | {"sys/fs/cgroup/a/cpu.max": "max 100000\n"}, None),
        (V2 | {"sys/fs/cgroup/a/cpu.max": ""}, None),
        (V2 | {"sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        (
            V2
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
