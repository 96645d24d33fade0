"""The command line as users call it, for tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping


def tandem(*args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlx_tandem", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)
