"""Where Phalanx is installed, torch knows the backend without `import phalanx`."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.meta.source import ROOT

SCRIPT = """
import sys, torch, torch.distributed as dist
assert "phalanx" not in sys.modules
dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
print(dist.get_backend(), tensor.tolist())
dist.destroy_process_group()
"""


def test_the_entry_point_of_the_project_is_enough(tmp_path: Path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"]["torch.backends"]
    metadata = tmp_path / "phalanx-0.dist-info"  # as an installation leaves it
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: phalanx\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines, ""]))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"},
        check=False,
    )
    assert done.stdout == "phalanx [1.0, 1.0, 1.0]\n", done.stderr
