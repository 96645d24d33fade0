"""The shell's completion of commands, and of the names of a running server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import ROOT, RunningServer


@pytest.fixture
def tandem_in_path(tmp_path: Path) -> str:
    program = tmp_path / "tandem"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mlx_tandem "$@"\n')
    program.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def completed(words: str, path: str) -> list[str]:
    """What bash offers where the cursor stands behind these words."""
    script = (
        'eval "$(_TANDEM_COMPLETE=source_bash tandem)"\n'
        f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        "_tandem_completion tandem\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_bash_completes_commands_programs_and_adapters(server: RunningServer, tandem_in_path: str) -> None:
    assert completed("tandem lau", tandem_in_path) == ["launch"]
    assert completed("tandem launch c", tandem_in_path) == ["claude", "codex"]
    assert completed(f"tandem chat --url {server.url} --adapter s", tandem_in_path) == ["shout"]
    assert completed("tandem adapters unload --url http://127.0.0.1:9 s", tandem_in_path) == []


def test_zsh_gets_a_script() -> None:
    env = os.environ | {"_TANDEM_COMPLETE": "source_zsh"}
    done = subprocess.run([sys.executable, "-m", "mlx_tandem"], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.strip().startswith("#compdef tandem") and not done.stderr
