"""Train word vectors on real text with asynchronous workers that share two tables.

Skip-gram with negative sampling: a word's vector is to tell its neighbours from words drawn at
random. Each worker process has a part of the text. The rows of both tables (a word as the middle,
a word as a neighbour) are pulled and pushed through ``tables.TableEmbedding``; nobody waits for
anybody. Run it without a launcher, for it starts its workers itself:

    python examples/06_word_vectors.py              # Python's own library; under a minute
    python examples/06_word_vectors.py my_text.txt
    python examples/06_word_vectors.py --small      # a look; too short for its words/s to say much

Source of the method: Mikolov et al., "Distributed representations of words and phrases and their
compositionality", NIPS 2013.

Legend: B middle words of a batch, W neighbours on either side, N negatives of a batch, D width.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx import tables

DIM, WINDOW, BATCH, NEGATIVES = 64, 4, 2048, 256
LR, SUBSAMPLE, RAREST = 0.2, 1e-4, 20
ASKED = ("file", "int", "error", "socket", "thread", "first", "dict", "read", "month", "tree")


class Text(NamedTuple):
    """A text as numbers.

    Attributes:
        words: The vocabulary, most frequent first.
        counts: How often each stands in the text.
        stream: The text, word by word, rare words left out.
    """

    words: list[str]
    counts: Tensor
    stream: Tensor


def read_text(path: str | None, most_words: int) -> Text:
    """Read the words of a file, or of Python's library: ``readLine_no`` is read, line, no."""
    if path is not None:
        sources = [Path(path)]
    else:
        library = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "test", "tests", "idle_test", "encodings", "lib2to3"}
        sources = [p for p in sorted(library.rglob("*.py")) if not skipped & set(p.parts)]
    found: list[str] = []
    for source in sources:
        text = source.read_text(encoding="utf-8", errors="ignore")
        found += re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower())
        if len(found) >= most_words:
            break
    counted = [(w, c) for w, c in Counter(found).most_common() if c >= RAREST and len(w) > 1]
    number = {word: index for index, (word, _) in enumerate(counted)}
    stream = torch.tensor([number[word] for word in found if word in number])
    return Text([w for w, _ in counted], torch.tensor([c for _, c in counted]), stream)


def keep_rate(counts: Tensor) -> Tensor:
    """How often each word of the text is kept; frequent ones say little about their neighbours."""
    share = counts / counts.sum()
    return ((SUBSAMPLE / share).sqrt() + SUBSAMPLE / share).clamp(max=1)


def open_tables(world: tables.TableGroup, num_words: int) -> tuple[tables.Table, tables.Table]:
    """Open the two tables; the master's first values count."""
    rule = tables.RowwiseAdaGrad(lr=LR)
    first = torch.empty(num_words, DIM).uniform_(-0.5 / DIM, 0.5 / DIM)
    middles = world.matrix(num_words, DIM, name="middles", updater=rule, init=first)
    neighbours = world.matrix(num_words, DIM, name="neighbours", updater=rule)
    return middles, neighbours


def loss_of(middle_BD: Tensor, around_BED: Tensor, negative_ND: Tensor, kept_BE: Tensor) -> Tensor:
    """How badly the middles tell their neighbours (E of each) from the batch's negatives."""
    near_BE = (around_BED @ middle_BD.unsqueeze(2)).squeeze(2)
    far_BN = middle_BD @ negative_ND.t()
    per_word = kept_BE.sum(1, keepdim=True) * 5 / NEGATIVES  # as if each pair had five negatives
    return (nn.functional.softplus(-near_BE) * kept_BE).sum() + (
        nn.functional.softplus(far_BN) * per_word
    ).sum()


def train(world: tables.TableGroup, text: Text, epochs: int) -> tuple[float, Tensor]:
    """Train on this worker's part of the text; return the seconds it took, and the vectors."""
    torch.manual_seed(world.worker_id)
    part = text.stream.chunk(world.num_workers)[world.worker_id]
    keep, chance = keep_rate(text.counts), text.counts**0.75
    offsets = torch.tensor([o for o in range(-WINDOW, WINDOW + 1) if o])
    middles, neighbours = open_tables(world, len(text.words))
    pull_middle, pull_around = tables.TableEmbedding(middles), tables.TableEmbedding(neighbours)
    world.barrier()
    begun = time.perf_counter()
    for _ in range(epochs):
        stream = part[torch.rand(len(part)) < keep[part]]
        places = torch.randperm(len(stream) - 2 * WINDOW) + WINDOW
        batches = places.split(BATCH)
        drawn = torch.multinomial(chance, NEGATIVES * len(batches), replacement=True)
        for place_B, negative_N in zip(batches, drawn.split(NEGATIVES), strict=True):
            around_BE = stream[place_B[:, None] + offsets]
            reach_B1 = torch.randint(1, WINDOW + 1, (len(place_B), 1))  # nearer words more often
            kept_BE = (offsets.abs() <= reach_B1).float()
            pulled = pull_around(torch.cat((around_BE.view(-1), negative_N)))
            around, negative_ND = pulled.split((around_BE.numel(), NEGATIVES))
            around_BED = around.view(*around_BE.shape, DIM)
            loss_of(pull_middle(stream[place_B]), around_BED, negative_ND, kept_BE).backward()
    world.barrier()
    return time.perf_counter() - begun, middles.get()


def work(run: str, num_workers: int, text: Text, epochs: int) -> tuple[float, Tensor]:
    """Be one of the workers; return words of text per second, and the vectors."""
    torch.set_num_threads(1)
    with tables.join(run, num_workers=num_workers, timeout_s=120) as world:
        seconds, vectors = train(world, text, epochs)
    return epochs * len(text.stream) / seconds, vectors


def run_workers(num_workers: int, text: Text, epochs: int) -> tuple[float, Tensor]:
    """Be one worker, beside processes that are the others."""
    context = multiprocessing.get_context("spawn")
    what = (f"example-{os.getpid()}-{num_workers}", num_workers, text, epochs)
    others = [context.Process(target=work, args=what) for _ in range(num_workers - 1)]
    for other in others:
        other.start()
    result = work(*what)
    for other in others:
        other.join()
    if any(other.exitcode for other in others):
        raise SystemExit("a worker failed")
    return result


def nearest(word: str, text: Text, vectors: Tensor, count: int = 5) -> list[str]:
    """Return the words with the most similar vectors (cosine, from the average vector)."""
    directions = nn.functional.normalize(vectors - vectors.mean(0))
    likeness = directions @ directions[text.words.index(word)]
    likeness[text.words.index(word)] = -1
    return [text.words[i] for i in likeness.topk(count).indices.tolist()]


def main() -> None:
    """Train with one worker, with two, and show what the vectors know."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", nargs="?", help="a text; Python's library if none")
    parser.add_argument("--small", action="store_true", help="less text, one epoch")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    text = read_text(arguments.path, 150_000 if arguments.small else 10_000_000)
    epochs = 1 if arguments.small else arguments.epochs
    print(f"{len(text.stream)} words of text, {len(text.words)} different ones")
    alone, _ = run_workers(1, text, 1)
    print(f"1 worker:  {alone:8.0f} words/s")
    together, vectors = run_workers(2, text, epochs)
    print(f"2 workers: {together:8.0f} words/s")
    for word in ASKED if arguments.path is None else text.words[20:30]:
        if word in text.words:
            print(f"  {word:8} {', '.join(nearest(word, text, vectors))}")


if __name__ == "__main__":  # worker processes import this file; without it they would start more
    main()
