"""Draw the README's picture: hashes of the weights from eight configurations, and from DDP.

``python -m tests.meta.configurations docs/configurations.svg`` trains the small mlp of
`tests.meta.bits` in each of its configurations, and the same net on the same batches by DDP over
gloo, on 1, 2 and 3 ranks.
DDP's gradient is the whole batch's, too: rows are weighed, and nothing is drawn. Only sums are made
in another order.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.meta import bits

WIDTH, LINE, TOP = 720, 25, 74
PANEL, INK, DIM, GOOD, BAD = "#17212f", "#e6ebf2", "#93a1b3", "#7fd6b5", "#f0a58a"
NUMBERS = ("", "one", "two", "three")


def train_by_ddp(rank: int, ranks: int, folder: str) -> None:
    """Train as one rank; the first one leaves the hash."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    net, batches = bits.open_model("mlp")
    model = DistributedDataParallel(net)
    optimizer = bits.adamw(net.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        mine = inputs.tensor_split(ranks)[rank], targets.tensor_split(ranks)[rank]
        loss = F.cross_entropy(model(mine[0]), mine[1])
        (loss * ranks * len(mine[1]) / len(targets)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    if rank == 0:
        Path(folder, "hash").write_text(bits.hash_of(net))
    dist.destroy_process_group()


def train_as_rank(rank: int, folder: str) -> None:
    """Train as one of two ranks of a `Trainer`; the first one leaves the hash."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = bits.train("mlp", "ranks", 2)
    if rank == 0:
        Path(folder, "hash").write_text(found)
    dist.destroy_process_group()


def spawned(function: Any, ranks: int, *args: object) -> str:  # Any: a function for `mp.spawn`
    """Return the hash that a function's first rank leaves."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(function, (*args, folder), nprocs=ranks)
        return Path(folder, "hash").read_text()


def name_of(executor: str, count: int) -> str:
    """Return a configuration in words."""
    if executor == "inline":
        return "the caller's thread"
    kind = {"threads": "thread", "processes": "worker process", "ranks": "rank"}[executor]
    plural = "" if count == 1 else "es" if kind.endswith("s") else "s"
    return f"{NUMBERS[count]} {kind}{plural}"


def strip(digest: str, x: int, y: int) -> str:
    """Draw a hash as colours and as text: equal ones are seen to be equal."""
    cells = "".join(
        f'<rect x="{x + 13 * place}" y="{y - 12}" width="13" height="15" '
        f'fill="hsl({int(digest[2 * place : 2 * place + 2], 16) * 360 // 256} 62% 60%)"/>'
        for place in range(6)
    )
    return f'{cells}<text x="{x + 90}" y="{y}" class="m">{digest[:8]}</text>'


def column(title: str, colour: str, rows: list[tuple[str, str]], x: int, offset: int) -> str:
    """Draw the configurations of one way to train, and their hashes ``offset`` to the right."""
    lines = [f'<text x="{x}" y="48" class="t" fill="{colour}">{title}</text>']
    for place, (name, digest) in enumerate(rows):
        y = TOP + LINE * place
        lines.append(f'<text x="{x}" y="{y}" class="n">{name}</text>{strip(digest, x + offset, y)}')
    return "\n".join(lines)


def draw(ours: list[tuple[str, str]], theirs: list[tuple[str, str]], note: str) -> str:
    """Return the picture as SVG, on a panel of its own, for light pages and dark ones."""
    height = TOP + LINE * len(ours) + 30
    same = len({digest for _, digest in ours})
    differ = len({digest for _, digest in theirs})
    say = lambda count: "one hash" if count == 1 else f"{count} hashes"  # noqa: E731
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">
<title>Weights of one net after {bits.STEPS} steps: Trainer in {len(ours)} configurations,
{say(same)}; DDP on 1, 2 and 3 ranks, {say(differ)}</title>
<style>
text {{ font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif }}
.n {{ fill: {INK} }} .t {{ font-weight: 600; font-size: 15px }}
.m {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: {INK} }}
.s {{ font-size: 11px; fill: {DIM} }}
</style>
<rect width="{WIDTH}" height="{height}" rx="10" fill="{PANEL}"/>
{column(f"Trainer(microbatches=4): {say(same)}", GOOD, ours, 24, 176)}
{column(f"DDP over gloo: {say(differ)}", BAD, theirs, 400, 100)}
<text x="400" y="{TOP + LINE * 4}" class="n">The same net, batches and optimizer;</text>
<text x="400" y="{TOP + LINE * 5}" class="n">only sums are made in another order.</text>
<text x="24" y="{height - 18}" class="s">{note}</text>
</svg>
"""


def main() -> None:
    """Train everywhere and write the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("picture", type=Path)
    picture = parser.parse_args().picture
    ours = [
        (name_of(executor, count), bits.train("mlp", executor, count))
        for executor, count in bits.CONFIGURATIONS
    ]
    ours.append((name_of("ranks", 2), spawned(train_as_rank, 2)))
    theirs = [(name_of("ranks", n), spawned(train_by_ddp, n, n)) for n in (1, 2, 3)]
    words = ["git", "log", "-1", "--format=%h", "--abbrev=7", "--", "src"]
    commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    note = f"hash of all weights after {bits.STEPS} steps; {platform.machine()}, torch"
    version = torch.__version__.partition("+")[0]
    picture.write_text(draw(ours, theirs, f"{note} {version}, commit {commit}"))
    for name, digest in (*ours, *theirs):
        print(f"{name:20} {digest}")


if __name__ == "__main__":
    main()
