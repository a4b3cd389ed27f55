"""One door for each side effect: DOORS says which files may do what; no others may."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.meta.source import Module, is_within

Finding = tuple[int, str]
Matcher = Callable[[Module], Iterator[Finding]]


@dataclass(frozen=True)
class Door:
    """A side effect: how it is found, which files or folders ("/" last) may have it, controls."""

    finds: Matcher
    allowed: tuple[str, ...]
    caught: tuple[str, ...]
    passed: tuple[str, ...] = ()

    def admits(self, path: str) -> bool:
        return any(
            path.startswith(place) if place.endswith("/") else path == place
            for place in self.allowed
        )


def names(*prefixes: str, but: tuple[str, ...] = ()) -> Matcher:
    """Match every mention of these outside names or of anything inside them, a few excepted."""

    def find(module: Module) -> Iterator[Finding]:
        for use in module.uses:
            if any(is_within(use.dotted, harmless) for harmless in but):
                continue
            if any(is_within(use.dotted, prefix) for prefix in prefixes):
                yield use.line, use.dotted

    return find


def calls(*functions: str) -> Matcher:
    """Match calls of exactly these; naming one, as in an annotation, is no side effect."""

    def find(module: Module) -> Iterator[Finding]:
        for use in module.uses:
            if use.call is not None and use.dotted in functions:
                yield use.line, f"{use.dotted}()"

    return find


def methods(*attributes: str) -> Matcher:
    """Match calls of a method by its name alone, for objects whose type the text does not tell."""

    def find(module: Module) -> Iterator[Finding]:
        imported = {id(use.call) for use in module.uses if use.call is not None}
        for node in ast.walk(module.tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in attributes
                and id(node) not in imported
            ):
                yield node.lineno, f".{node.func.attr}()"

    return find


def keywords(**values: object) -> Matcher:
    """Match calls that pass one of these keywords with this value, or one unknown from the text."""

    def find(module: Module) -> Iterator[Finding]:
        for node in ast.walk(module.tree):
            for word in node.keywords if isinstance(node, ast.Call) else ():
                told = isinstance(word.value, ast.Constant)
                if word.arg in values and (not told or word.value.value == values[word.arg]):
                    yield node.lineno, f"{word.arg}={ast.unparse(word.value)}"

    return find


def private_to_torch(module: Module) -> Iterator[Finding]:
    """Match names of torch's that begin with an underscore."""
    for use in module.uses:
        first, *inner = use.dotted.split(".")
        if first == "torch" and any(re.match(r"_(?!_)", name) for name in inner):
            yield use.line, use.dotted


def printing(module: Module) -> Iterator[Finding]:
    """Match ``print`` without ``file=``; with it, the door is where that file was opened."""
    for use in module.uses:
        if use.call is None or use.dotted != "builtins.print":
            continue
        if all(word.arg != "file" for word in use.call.keywords):
            yield use.line, "print()"


# Functions that open a file for the mode given second, and read unless told otherwise.
OPENERS = tuple(
    f"{module}.open" for module in ("builtins", "io", "codecs", "gzip", "bz2", "lzma", "tarfile")
)
OPENERS += ("gzip.GzipFile", "zipfile.ZipFile", "tarfile.TarFile", "os.fdopen")


def opening_to_write(module: Module) -> Iterator[Finding]:
    """Match ``open`` in a mode that writes or that the text does not tell."""
    use_by_call = {id(use.call): use for use in module.uses if use.call is not None}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        use = use_by_call.get(id(node))
        is_function = use is not None and use.dotted in OPENERS
        is_method = (
            use is None and isinstance(node.func, ast.Attribute) and node.func.attr == "open"
        )
        if not is_function and not is_method:
            continue
        position = 1 if is_function else 0
        modes = [word.value for word in node.keywords if word.arg == "mode"]
        modes += node.args[position : position + 1]
        for mode in modes:
            if isinstance(mode, ast.Constant):
                writes = bool(re.fullmatch(r"[rbtwax+:|]*[wax+][rbtwax+:|]*.*", str(mode.value)))
                writes &= is_function or bool(re.fullmatch(r"[rbtwax+]{1,3}", str(mode.value)))
            else:
                writes = is_function
            if writes:
                yield node.lineno, f"open(…, {ast.unparse(mode)})"


def replacing_a_path(module: Module) -> Iterator[Finding]:
    """Match ``path.replace(target)``: one argument, where ``str.replace`` takes two."""
    imported = {id(use.call) for use in module.uses if use.call is not None}
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "replace"
            and id(node) not in imported
            and len(node.args) == 1
            and not node.keywords
        ):
            yield node.lineno, ".replace(target)"


def any_of(*matchers: Matcher) -> Matcher:
    def find(module: Module) -> Iterator[Finding]:
        for matcher in matchers:
            yield from matcher(module)

    return find


NOWHERE: tuple[str, ...] = ()

DOORS: dict[str, Door] = {
    "reads the environment": Door(
        names("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"),
        allowed=(
            *("cli/app.py", "cli/launch.py"),  # for processes that are started
            "cli/machine.py",  # tells what is set
            *("cluster/ray_launcher.py", "cluster/ray_worker.py"),
            "tables/joining.py",
            "distributed/exchange.py",
            "distributed/hosts.py",
            "distributed/launcher.py",
            "distributed/backend.py",
            "distributed/open_store.py",
            "distributed/rank_restarts.py",
            "distributed/rank_start.py",
            "distributed/launch_rendezvous.py",
            "memory/awake.py",
        ),
        caught=(
            "import os\nos.environ['HOME']",
            "import os as o\no.getenv('HOME')",
            "from os import environ",
        ),
        passed=("import os\nos.cpu_count()", "environ = {}\nenviron['a']"),
    ),
    "reads the clock": Door(
        names("time", "timeit", "datetime.datetime", "datetime.date"),
        allowed=("clock.py",),
        caught=(
            "import time\ntime.perf_counter()",
            "from time import monotonic as now",
            "import datetime\ndatetime.datetime.now()",
        ),
        passed=(
            "from phalanx.clock import now_s",
            "def f(time: float) -> float:\n    return time",
            "from datetime import timedelta",
        ),
    ),
    "talks through torch.distributed": Door(
        names("torch.distributed", "torch.nn.parallel.DistributedDataParallel"),
        allowed=("distributed/", "torch_internals.py"),
        caught=(
            "import torch.distributed as dist",
            "from torch import distributed",
            "import torch\ntorch.distributed.barrier()",
        ),
        passed=("import torch\ntorch.distributions",),
    ),
    "uses what is private to torch": Door(
        private_to_torch,
        allowed=("torch_internals.py",),
        caught=(
            "import torch\ntorch._foreach_add_([], [])",
            "from torch._C._distributed_c10d import Store",
            "from torch.utils import _pytree",
        ),
        passed=("import torch\ntorch.ones(3)._version\ntorch.__version__",),
    ),
    "prints": Door(
        any_of(
            printing,
            names("sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__", "rich.print"),
            calls(
                "rich.console.Console",
                "rich.get_console",
                "typer.echo",
                "typer.secho",
                "click.echo",
                "pprint.pprint",
            ),
        ),
        # `toc_print` of MXNet's monitor has no console to be given.
        allowed=(
            *("cli/console.py", "compat/mxnet_monitor.py"),
            "callbacks/progress.py",  # asks whether somebody looks on
            "callbacks/live_display.py",  # shows a `fit` without the command
            *("distributed/rank_restarts.py", "distributed/rank_start.py"),  # beside the script
            "cluster/ray_launcher.py",  # what workers on Ray print, the driver prints
        ),
        caught=(
            "print('a')",
            "from rich.console import Console\nconsole = Console()",
            "import sys\nsys.stdout.write('a')",
            "import sys\nprint('a', file=sys.stderr)",
            "import typer\ntyper.echo('a')",
            "from rich import print",
        ),
        passed=(
            "from rich.console import Console\ndef f(console: Console): console.print('a')",
            "print('a', file=answers)",
        ),
    ),
    "starts threads": Door(
        names(
            "threading.Thread",
            "threading.Timer",
            "_thread",
            "concurrent.futures",
            "asyncio",
            "multiprocessing.pool",
            "multiprocessing.dummy",
        ),
        allowed=(
            "execution/thread_pool.py",
            "tables/snapshot_schedule.py",  # snapshots while the workers train
            "tables/deferred_adds.py",  # adds to other hosts that nobody waits for
            "distributed/elastic_membership.py",
            "distributed/error_store.py",
            "distributed/progress_thread.py",
            "distributed/transport.py",
            "cluster/server.py",  # answers that wait for other workers
            "tables/host_server.py",  # asks the other hosts who lives
            "tables/host_supervisor.py",  # a worker waits for the supervisor's death
        ),
        caught=(
            "import threading\nthreading.Thread(target=f).start()",
            "from threading import Thread\nclass Worker(Thread): pass",
            "from concurrent.futures import ThreadPoolExecutor",
        ),
        passed=("import threading\nlock = threading.Lock()\nthreading.get_ident()",),
    ),
    "starts processes": Door(
        names(
            "subprocess",
            "multiprocessing",
            "torch.multiprocessing",
            "pty",
            "os.fork",
            "os.forkpty",
            "os.posix_spawn",
            "os.execv",
            "os.execve",
            "os.execvp",
            "os.execvpe",
            "os.spawnv",
            "os.system",
            "os.popen",
            but=(
                "multiprocessing.Pipe",
                "multiprocessing.connection.Connection",
                "multiprocessing.context.get_spawning_popen",
                "multiprocessing.reduction",
            ),
        ),
        allowed=(
            "distributed/rank_restarts.py",
            "execution/worker_start.py",
            "cluster/ray_worker.py",
            "tables/host_supervisor.py",  # a server outlives the worker that started it
        ),
        caught=(
            "import subprocess",
            "from torch import multiprocessing as mp",
            "import os\nos.fork()",
        ),
    ),
    "opens sockets": Door(
        names("socket", "socketserver", "ssl", "http", "urllib.request", "ftplib", "xmlrpc", "zmq"),
        allowed=(
            "ipc/region.py",
            "execution/timeouts.py",
            "distributed/launch_rendezvous.py",  # where the launchers of several hosts meet
            "cluster/",
            "tables/host_rendezvous.py",  # asks the kernel for this host's address
            *("tables/host_server.py", "tables/spread_run.py"),  # make the sockets' context
            "cli/machine.py",  # asks for the host's address, and what ZeroMQ can do
        ),
        caught=("import socket", "from http.server import HTTPServer", "import urllib.request"),
        passed=("from urllib.parse import urlsplit",),
    ),
    "handles signals": Door(
        names("signal"),
        allowed=(
            "cli/train.py",
            "execution/thread_pool.py",  # holds them back where the caller's thread is the replica
            "execution/worker_main.py",
            "execution/worker_client.py",
            "execution/worker_start.py",
            "distributed/launcher.py",
            "cluster/ray_launcher.py",  # names them
            "distributed/rank_restarts.py",
        ),
        caught=("import signal", "from signal import SIGINT"),
    ),
    "calls foreign code": Door(
        names("ctypes", "cffi", "torch.utils.cpp_extension"),
        allowed=(
            "memory/allocator.py",
            "ipc/process.py",
            "memory/compiled.py",
            "replicas/intra_op.py",
        ),
        caught=("import ctypes", "from ctypes import CDLL"),
    ),
    "maps shared memory": Door(
        names("mmap", "multiprocessing.shared_memory", "os.memfd_create"),
        allowed=("ipc/region.py",),
        caught=("import mmap", "from multiprocessing import shared_memory"),
    ),
    "writes files": Door(
        any_of(
            opening_to_write,
            replacing_a_path,
            methods(
                "write_text",
                "write_bytes",
                "mkdir",
                "unlink",
                "rmdir",
                "touch",
                "rename",
                "symlink_to",
                "hardlink_to",
                "savefig",
                "tofile",
            ),
            calls(
                "os.open",
                "os.write",
                "os.remove",
                "os.unlink",
                "os.mkdir",
                "os.makedirs",
                "os.rmdir",
                "os.removedirs",
                "os.rename",
                "os.renames",
                "os.replace",
                "os.link",
                "os.symlink",
                "os.truncate",
                "numpy.save",
                "numpy.savez",
                "numpy.savez_compressed",
                "numpy.savetxt",
                "safetensors.torch.save_file",
                "safetensors.torch.save_model",
                "safetensors.numpy.save_file",
            ),
            names(*("shutil", "tempfile", "sqlite3", "logging.FileHandler"), but=("shutil.which",)),
        ),
        allowed=(
            "train/peer_state.py",
            "distributed/folder_store.py",
            "cluster/secret.py",
            "cluster/ray_worker.py",  # files without a name
            "files.py",  # opens to read, in a way that does not wait
            "train/checkpoint.py",
            "tables/snapshots.py",
            *("cli/run_folder.py", "cli/report.py"),
            *("callbacks/best_checkpoint.py", "callbacks/figure.py", "callbacks/log_files.py"),
            "callbacks/trace.py",
            "ipc/region.py",
            "ipc/run_directory.py",
            "distributed/launcher.py",  # a folder for the ranks' output
            "distributed/wake_up_pipes.py",  # pipes of other ranks
            "distributed/contention.py",  # opens /proc to read, without a buffer
            "distributed/rank_start.py",  # how a rank has ended, for the launcher
            "ipc/locks.py",  # opens the file anew, for locks of its own
        ),
        caught=(
            "open(p, 'w')",
            "open(p, mode='ab')",
            "open(p, m)",
            "import gzip\ngzip.open(p, 'wb')",
            "p.open('x')",
            "p.open(mode='r+')",
            "p.write_text('a')",
            "p.replace(q)",
            "import os\nos.replace(p, q)",
            "import shutil\nshutil.rmtree(p)",
            "from safetensors.torch import save_file\nsave_file({}, p)",
            "figure.savefig(p)",
        ),
        passed=(
            "open(p)",
            "open(p, 'rb')",
            "import gzip\ngzip.open(p, 'rb')",
            "p.open('r')",
            "archive.open(member)",
            "archive.open('data.txt')",
            "'a'.replace('a', 'b')",
            "import dataclasses\ndataclasses.replace(x, a=1)",
            "import os\nos.path.exists(p)",
            "from shutil import which\nwhich('cc')",
        ),
    ),
    "runs stored or written code": Door(
        any_of(
            names(
                "pickle",
                "_pickle",
                "cPickle",
                "cloudpickle",
                "dill",
                "joblib",
                "shelve",
                "marshal",
                "torch.load",
                "torch.save",
                "torch.jit.load",
                "torch.package",
                "pandas.read_pickle",
            ),
            calls("builtins.eval", "builtins.exec", "builtins.compile", "code.interact"),
            keywords(shell=True, allow_pickle=True),
        ),
        allowed=(
            "replicas/packing.py",
            *("replicas/code_by_value.py", "replicas/definitions.py"),  # what packing cannot name
            # Functions and what they return, on connections of Ray's, which pickles itself.
            *("cluster/ray_launcher.py", "distributed/rank_start.py"),
        ),
        caught=(
            "import pickle",
            "eval('1')",
            "exec(text)",
            "import torch\ntorch.load(p)",
            "from torch import load",
            "run(a, shell=True)",
            "run(a, shell=b)",
            "import numpy as np\nnp.load(p, allow_pickle=True)",
        ),
        passed=(
            "model.eval()",
            "import re\nre.compile('a')",
            "import torch\nmodel = torch.compile(model)",
            "np.load(p, allow_pickle=False)",
        ),
    ),
    "imports by a name that it was given": Door(
        names("importlib", "pkgutil", "runpy", "builtins.__import__"),
        # `module:attribute` on the command line; data that ships in the package; `phalanx launch`;
        # the package's own names, when they are first used; modules that a script has imported.
        allowed=(
            *("cli/", "distributed/rank_start.py", "__init__.py"),
            "replicas/code_by_value.py",
        ),
        caught=("import importlib", "from importlib import import_module", "__import__('a')"),
    ),
}


def offences(effect: str, door: Door, module: Module) -> list[str]:
    """List where a module has a side effect that it may not have."""
    if door.admits(module.path):
        return []
    return [
        f"{module.path}:{line}: {effect}: {what}" for line, what in sorted(set(door.finds(module)))
    ]


@pytest.mark.parametrize("effect", DOORS)
def test_a_side_effect_stays_behind_its_door(effect, house):
    found = [line for module in house for line in offences(effect, DOORS[effect], module)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("effect", "text"), [(effect, text) for effect, door in DOORS.items() for text in door.caught]
)
def test_a_planted_side_effect_is_caught(effect, text):
    assert offences(effect, DOORS[effect], Module("plan/planted.py", text))


@pytest.mark.parametrize(
    ("effect", "text"), [(effect, text) for effect, door in DOORS.items() for text in door.passed]
)
def test_an_innocent_line_passes(effect, text):
    assert offences(effect, DOORS[effect], Module("plan/planted.py", text)) == []


@pytest.mark.parametrize(
    ("effect", "place"),
    [(effect, place) for effect, door in DOORS.items() for place in door.allowed],
)
def test_a_door_opens_for_its_own_file(effect, place):
    path = place + "planted.py" if place.endswith("/") else place
    assert offences(effect, DOORS[effect], Module(path, DOORS[effect].caught[0])) == []
    beside = "plan/" + path
    assert offences(effect, DOORS[effect], Module(beside, DOORS[effect].caught[0]))
