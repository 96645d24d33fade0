"""Makes the folder of a real model for benchmarks, by `scripts/real_model.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FORMS = ("4bit", "float32")
"""Forms of the weights."""

_SCRIPT = Path(__file__).parents[1] / "scripts" / "real_model.py"


def write_real(folder: Path, form: str) -> Path:
    """Make the folder of the real model in a form of FORMS and return it. End the process if its package is missing."""
    command = [sys.executable, str(_SCRIPT), str(folder), *(["--float32"] if form == "float32" else [])]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("the real model could not be made")
    return folder
