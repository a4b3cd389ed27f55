"""What every test gets unasked: a fixed seed, torch's settings put back, no thread left behind.

With ``--device cuda``, tests that ask for ``device`` run there; with ``--device dev``, on the test
device (tests/device). `make test` chooses these by their marker, ``devices``. Those marked ``gpu``
need an accelerator whatever the option says, and are skipped, here alone, where there is none.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator

import hypothesis
import pytest

gc.disable()  # until tests are collected
import torch  # noqa: E402

THREAD_NAME_PREFIX = "phalanx"
JOIN_S = 20.0  # on a busy machine a thread that ends may not run for seconds
SLOW_FOLDERS = {"benchmarks", "chaos", "device", "examples", "meta", "multiprocess"}
SLOW_FILES = (  # of other folders
    *("test_backend", "test_compiled_models", "test_executors", "test_hugging_face"),
    *("test_launching", "test_process_executor"),
    *("test_app", "test_parity", "test_report", "test_shared_module"),
    "test_train_command",
)
NO_TESTS = 5  # what pytest returns where it finds none

# Times vary on a shared machine, so no deadline; a failing example is printed so that it can be
# replayed.
hypothesis.settings.register_profile("house", deadline=None, print_blob=True)
hypothesis.settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", help="where tests of containers run, such as cuda (default cpu)"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts its background jobs with SIGINT ignored, and Python then raises no interrupt;
    # `nohup` ignores SIGHUP. The processes that tests start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    name = config.getoption("--device")
    if name.partition(":")[0] == "dev":
        register_test_device()
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise pytest.UsageError(f"--device must exist here, but is {name!r}: {error}") from error


def register_test_device() -> None:
    """Let torch know the test device, or end a run that asks for it where it cannot be compiled."""
    from tests.device import accelerator, build  # tests/meta runs this file where they are not

    if build.compiler() is None:
        pytest.exit("The test device needs a C++ compiler, and there is none.", NO_TESTS)
    # What runs there is compared with the CPU, bit by bit. On an AMD EPYC MKL gave a linear layer
    # other last bits there, unless told to be reproducible before its first call.
    os.environ.setdefault("MKL_CBWR", "AUTO")
    accelerator.register()


def is_slow(item: pytest.Item) -> bool:
    """Tell by its place whether a test is left out of `make test-fast`: most start processes."""
    folder = item.nodeid.removeprefix("tests/").partition("/")[0]
    return (
        folder in SLOW_FOLDERS
        or item.path.name.startswith(SLOW_FILES)
        or re.search(r"processes|process_dies|loaders_workers|forked|hosts|ranks", item.nodeid)
        is not None
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item):
            item.add_marker(pytest.mark.slow)
        if "device" in item.fixturenames or item.path.parent.name == "device":
            item.add_marker(pytest.mark.devices)
    if torch.accelerator.current_accelerator(check_available=True) is not None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect tests without a look at what is garbage, which took a fifth of the time."""
    result = yield
    gc.freeze()
    gc.enable()
    server = sys.modules.get("tests.multiprocess.fork_server")
    # An accelerator cannot be used in forks of a process that knows it.
    if server and torch.accelerator.current_accelerator(check_available=True) is None:
        server.start()
    return result


_running: set[str] = set()


def pytest_runtest_logstart(nodeid: str) -> None:
    _running.add(nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _running.discard(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """End a run, one of whose processes a test has ended: xdist would wait without end.

    A test ends its process where it runs into pytest-timeout's limit, or crashes.
    """
    if error:
        tests = " or ".join(sorted(_running))
        pytest.exit(f"A process of the run has ended ({error}), in {tests}.", 1)


def house_threads() -> set[threading.Thread]:
    """Return the live threads that Phalanx has named."""
    return {t for t in threading.enumerate() if t.name.startswith(THREAD_NAME_PREFIX)}


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device of ``--device``, by the name that tensors on it show."""
    return torch.empty(0, device=request.config.getoption("--device")).device


@pytest.fixture
def gpu() -> torch.device:
    """Return the first device of the accelerator, for tests marked ``gpu``."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    assert kind is not None
    return torch.device(kind.type, 0)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return a name for a run of tables, and see that nothing of it is left afterwards."""
    from tests.run_directories import wait_until_removed  # not there where tests/meta runs this

    name = f"run{os.getpid()}-{abs(hash(request.node.name)) % 10**9}"
    yield name
    wait_until_removed(name)


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """Let `gc.collect()` in a test look at what this file made, not at every module of torch's."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_start() -> Iterator[None]:
    """Fix the seed; afterwards put torch's settings back, and look for what a test has left.

    One fixture: each costs every one of thousands of tests.
    """
    torch.manual_seed(0)
    threads = house_threads()
    num_threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    grad_enabled = torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(num_threads)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad_enabled)
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)  # its first call imports for a second
    if hasattr(torch, "dev"):
        fail_for_races()
    if left := house_threads() - threads:
        fail_for_threads(left)


def fail_for_races() -> None:
    """Fail a test whose streams have not waited for each other, whoever has caught the error."""
    for index in range(torch.dev.device_count()):
        torch.dev.synchronize(index)
    races = torch.dev.races()
    torch.dev.forget_races()
    if races:
        pytest.fail("\n".join(["Work was not waited for:", *races]))


def fail_for_threads(left: set[threading.Thread]) -> None:
    """Fail a test after which a Phalanx thread lives that was not there before.

    The executors join theirs in `close()`; the seconds here are for one that is ending already.
    """
    for thread in left:
        thread.join(JOIN_S / len(left))
    left = {thread for thread in left if thread.is_alive()}
    if left:
        names = ", ".join(sorted(thread.name for thread in left))
        pytest.fail(f"threads left behind: {names}. Close the trainer or container, or use `with`.")
