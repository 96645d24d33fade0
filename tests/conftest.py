from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

# Tests that run side by side have a core each; threads of BLAS beside them, of every server that they start, would
# spend half of the machine on waiting for one another. Read when BLAS is loaded, by this process and those it starts.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # MLX wakes a thread for each operation, and Linux lets that thread push aside the one that woke it if no core is
    # free: millions of switches in a run. Under the batch policy, which servers inherit, the waking thread goes on.
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

from mlx_tandem.model import device  # noqa: F401  first of all: it loads a fast BLAS before MLX
from tests import scripted_model
from tests.serving import RunningServer, demo_config, serving

# A shell that runs the tests in the background makes them and their children ignore Ctrl-C, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and a server then ignores it, too

# Each client of HTTP reads the certificates of this machine, which takes as long as ten requests. Nobody changes them.
_read_certificates = ssl.create_default_context
_kept = functools.cache(lambda cafile: _read_certificates(cafile=cafile))
ssl.create_default_context = lambda *args, **options: (
    _kept(**options) if not args and options.keys() == {"cafile"} else _read_certificates(*args, **options)
)

# An example takes as long as a busy machine lets it.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_xdist_auto_num_workers() -> int:
    """Half as many workers again as there are cores: a test of a server waits for most of its time, for a start, a
    time-out or an answer, and leaves its core to others."""
    return (os.cpu_count() or 1) * 3 // 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while tests are collected: nearly all objects that are made then stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


_has_unfrozen = threading.Event()
_unfreeze = gc.unfreeze


def _unfreeze_for_now() -> None:
    _has_unfrozen.set()
    _unfreeze()


gc.unfreeze = _unfreeze_for_now


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collection, each run of which would take a fifth of a second for them."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logfinish() -> None:
    """Exempt them again after a test of a benchmark in this process, at whose end everything can be collected."""
    if _has_unfrozen.is_set():
        _has_unfrozen.clear()
        pytest_collection_finish()


@pytest.fixture(scope="module", autouse=True)
def _memory_limit_of_mlx() -> Iterator[None]:
    """Fail if a module's tests leave MLX a smaller memory limit. MLX on a CPU would slow down under it, or stop."""
    import mlx.core as mx

    limit = mx.set_memory_limit(1 << 40)
    mx.set_memory_limit(limit)
    yield
    assert mx.set_memory_limit(limit) == limit


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """One server on the built-in model, shared by all tests that do not harm it."""
    with serving(demo_config()) as running:
        yield running


@pytest.fixture(scope="session")
def scripted_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[scripted_model.Script], Path]:
    """Makes the folder of a model that says a script, once for each script."""
    folders: dict[str, Path] = {}

    def made(script: scripted_model.Script) -> Path:
        if (key := repr(script)) not in folders:
            folders[key] = scripted_model.make(tmp_path_factory.mktemp("scripted") / "model", script)
        return folders[key]

    return made
