"""The shell's completion of commands, and of the names of a running server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import ROOT, RunningServer
from tests.unit.cli_tools import tandem


@pytest.fixture
def tandem_in_path(tmp_path: Path) -> str:
    program = tmp_path / "tandem"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mlx_tandem "$@"\n')
    program.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def completed(path: str, *lines: str) -> list[list[str]]:
    """What bash offers at the ends of these lines."""
    script = 'eval "$(_TANDEM_COMPLETE=source_bash tandem)"\n'
    for line in lines:
        script += (
            f"COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
            '_tandem_completion tandem; echo "${COMPREPLY[@]}"\n'
        )
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split() for line in done.stdout.splitlines()]


def test_bash_completes_programs_and_adapters(server: RunningServer, tandem_in_path: str) -> None:
    lines = ("tandem launch c", f"tandem chat --url {server.url} --adapter s")
    assert completed(tandem_in_path, *lines) == [["claude", "codex"], ["shout"]]


def test_without_a_server_there_are_no_names() -> None:
    words = {"_TANDEM_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "tandem adapters unload --url 127.0.0.1:9 s"}
    done = tandem(env=words)
    assert (done.returncode, done.stderr) == (0, "") and "shout" not in done.stdout


def test_zsh_gets_a_script() -> None:
    done = tandem(env={"_TANDEM_COMPLETE": "source_zsh"})
    assert done.stdout.strip().startswith("#compdef tandem") and not done.stderr
