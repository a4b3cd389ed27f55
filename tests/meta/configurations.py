"""Draw the README's picture: hashes of the weights from eight configurations, and from two DDPs.

``python -m tests.meta.configurations docs/configurations.svg`` trains the small mlp of
`tests.meta.bits` in each of its configurations, and the same net on the same batches by our
`DistributedDataParallel` and by torch's, over gloo on 1, 2 and 4 ranks.
The gradient of torch's is the whole batch's, too: rows are weighed, and nothing is drawn. Only sums
are made in another order.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from phalanx import DistributedDataParallel, ExactSampler
from tests.meta import bits

WIDTH, LINE, TOP = 592, 25, 74  # narrow: it is read on phones, too
PANEL, INK, DIM, GOOD, BAD = "#17212f", "#e6ebf2", "#93a1b3", "#7fd6b5", "#f0a58a"
NUMBERS = ("", "one", "two", "three", "four")
DDP_RANKS = (1, 2, 4)


def train_by_ddp(rank: int, ranks: int, is_ours: bool, folder: str) -> None:
    """Train as one rank; the first one leaves the hash."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    net, batches = bits.open_model("mlp")
    model = DistributedDataParallel(net, reduction="sum") if is_ours else TorchDDP(net)
    optimizer = bits.adamw(net.parameters())
    for inputs, targets in batches:
        sampler = ExactSampler(targets, len(targets), rank=rank, num_ranks=ranks, shuffle=False)
        (rows,) = sampler
        loss = F.cross_entropy(model(inputs[rows]), targets[rows], reduction="sum")
        optimizer.zero_grad()
        (loss if is_ours else loss * ranks / len(targets)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    if rank == 0:
        Path(folder, "hash").write_text(bits.hash_of(net))
    dist.destroy_process_group()


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
        f'<rect x="{x + 12 * place}" y="{y - 12}" width="12" height="15" '
        f'fill="hsl({int(digest[2 * place : 2 * place + 2], 16) * 360 // 256} 62% 60%)"/>'
        for place in range(6)
    )
    return f'{cells}<text x="{x + 80}" y="{y}" class="m">{digest[:8]}</text>'


def column(
    title: str, colour: str, rows: list[tuple[str, str]], x: int, offset: int, top: int = TOP
) -> str:
    """Draw the configurations of one way to train, and their hashes ``offset`` to the right."""
    title = f"{title}: {number_of_hashes(rows)}"
    lines = [f'<text x="{x}" y="{top - 26}" class="t" fill="{colour}">{title}</text>']
    for place, (name, digest) in enumerate(rows):
        y = top + LINE * place
        lines.append(f'<text x="{x}" y="{y}" class="n">{name}</text>{strip(digest, x + offset, y)}')
    return "\n".join(lines)


def number_of_hashes(rows: list[tuple[str, str]]) -> str:
    """Say how many hashes there are."""
    count = len({digest for _, digest in rows})
    return "one hash" if count == 1 else f"{count} hashes"


def draw(
    trainers: list[tuple[str, str]],
    ours: list[tuple[str, str]],
    theirs: list[tuple[str, str]],
    note: str,
) -> str:
    """Return the picture as SVG, on a panel of its own, for light pages and dark ones."""
    height = TOP + LINE * len(trainers) + 30
    second = TOP + LINE * (len(trainers) - len(theirs))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">
<title>Weights of one net after {bits.STEPS} steps: Trainer in {len(trainers)} configurations,
{number_of_hashes(trainers)}; on 1, 2 and 4 ranks, our DistributedDataParallel
{number_of_hashes(ours)}, torch's {number_of_hashes(theirs)}</title>
<style>
text {{ font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif }}
.n {{ fill: {INK} }} .t {{ font-weight: 600; font-size: 15px }}
.m {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: {INK} }}
.s {{ font-size: 11px; fill: {DIM} }}
</style>
<rect width="{WIDTH}" height="{height}" rx="10" fill="{PANEL}"/>
{column("Trainer(microbatches=4)", GOOD, trainers, 16, 168)}
{column("our DDP", GOOD, ours, 346, 84)}
{column("torch's DDP", BAD, theirs, 346, 84, second)}
<text x="16" y="{height - 18}" class="s">{note}</text>
</svg>
"""


def main() -> None:
    """Train everywhere and write the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("picture", type=Path)
    picture = parser.parse_args().picture
    trainers = [
        (name_of(executor, count), bits.train("mlp", executor, count))
        for executor, count in bits.CONFIGURATIONS
    ]
    trainers.append((name_of("ranks", 2), bits.spawned(bits.train_as_rank, 2, "mlp")))
    ours, theirs = (
        [(name_of("ranks", n), bits.spawned(train_by_ddp, n, n, is_ours)) for n in DDP_RANKS]
        for is_ours in (True, False)
    )
    words = ["git", "log", "-1", "--format=%h", "--abbrev=7", "--", "src"]
    commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    note = f"hash of all weights after {bits.STEPS} steps over gloo; {platform.machine()}, torch"
    version = torch.__version__.partition("+")[0]
    picture.write_text(draw(trainers, ours, theirs, f"{note} {version}, commit {commit}"))
    for name, digest in (*trainers, *ours, *theirs):
        print(f"{name:20} {digest}")


if __name__ == "__main__":
    main()
