"""The command line as users call it, for tests."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from unittest import mock

from mlx_tandem.cli import main


def tandem(*args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that soon ends within this process, where its imports are made already. An error that would be a
    traceback is raised."""
    out, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, env or {}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main(list(args))
            status: object = 0
        except SystemExit as end:
            status = end.code or 0
    assert isinstance(status, int), status
    return subprocess.CompletedProcess(args, status, out.getvalue(), errors.getvalue())


def tandem_process(*args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, which reads its environment when it imports libraries."""
    command = [sys.executable, "-m", "mlx_tandem", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)
