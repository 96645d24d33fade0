"""The command line as users call it, for tests."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

from mlx_tandem.cli import main
from mlx_tandem.model import device


def on_a_thread(work: Callable[[], object]) -> object:
    """Return what `work` returns, or the status with which it ends the process, which it then does not.

    It has a thread of its own, since commands end their thread's use of MLX.
    """

    def run() -> object:
        try:
            return work()
        except SystemExit as end:
            return end.code
        finally:
            device.leave_thread()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def tandem(*args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that soon ends within this process, where its imports are made already. Its input is empty. An
    error that would be a traceback is raised.
    """
    out, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, env or {}),
        mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO())),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        status = on_a_thread(lambda: main(list(args))) or 0
    assert isinstance(status, int), status
    return subprocess.CompletedProcess(args, status, out.getvalue(), errors.getvalue())


def tandem_process(*args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, which reads its environment when it imports libraries."""
    command = [sys.executable, "-m", "mlx_tandem", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)
