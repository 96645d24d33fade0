"""`scripts/install.sh`, with a Python that installs nothing and writes down what it was asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/bin/sh
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *platform.machine*) echo arm64 ;;
    *" install "*) echo "${SYSTEM_VERSION_COMPAT-unset} $*" >> "$ASKED" ;;
esac
"""
"""A program in the place of Python."""


@pytest.mark.parametrize(("backend", "compat"), [("macos", "0"), ("cuda13", "unset")])
def test_pip_is_told_the_version_of_macos(tmp_path: Path, backend: str, compat: str) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "install.sh", tmp_path / "scripts")
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(PYTHON, encoding="utf-8")
    python.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k != "SYSTEM_VERSION_COMPAT"}
    env |= {"PYTHON": str(python), "TANDEM_BACKEND": backend, "ASKED": str(asked)}
    subprocess.run(["bash", "scripts/install.sh", "venv"], cwd=tmp_path, env=env, capture_output=True, check=True)
    lines = asked.read_text(encoding="utf-8").splitlines()
    assert [line.split()[0] for line in lines] == [compat] * 2
    assert f"locks/{backend}.txt" in lines[0]
