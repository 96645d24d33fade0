"""Keeps servers of tests to themselves: what a process of theirs opens to elsewhere is refused, and told to the test.

An audit hook sees what Python does in every process that inherits the environment. Beneath it, event loops and native
libraries call the C library's `connect`. On Linux, where there is a compiler, one that refuses takes its place.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
RECORD = "TANDEM_TEST_OUTBOUND"
"""The variable that names the file which attempts are written to."""

COMPILER = shutil.which("cc") if sys.platform == "linux" else None


def guarded(environment: Mapping[str, str], record: Path, *, ranks: bool = False) -> dict[str, str]:
    """Return `environment` for a process whose attempts, and those of its children, go to the file `record`. With
    `ranks`, native libraries may connect to 127.0.0.1."""
    guarded = dict(environment) | ({"TANDEM_TEST_LOOPBACK": "1"} if ranks else {})
    path = (str(HERE / "site"), guarded.get("PYTHONPATH", ""))
    guarded |= {RECORD: str(record), "PYTHONPATH": os.pathsep.join(filter(None, path))}
    if COMPILER is not None:
        guarded["LD_PRELOAD"] = str(_library())
    return guarded


def armed(record: Path) -> int:
    """Return how many Python processes have had the hook."""
    return sum(line == "armed" for line in _lines(record))


def tried(record: Path) -> list[str]:
    """Return what was tried, in order."""
    return [line for line in _lines(record) if line != "armed"]


def _lines(record: Path) -> list[str]:
    return record.read_text(encoding="utf-8").splitlines() if record.exists() else []


@functools.cache
def _library() -> Path:
    """Compile connect.c; once for each process of tests."""
    assert COMPILER is not None
    folder = Path(tempfile.mkdtemp(prefix="outbound-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "connect.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, HERE / "connect.c", "-ldl"], check=True)
    return library
