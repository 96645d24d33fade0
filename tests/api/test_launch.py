"""`tandem launch` up to the start of the program; tests/clients has the programs themselves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mlx_tandem.cli.launch import AGENTS, ServedModel
from tests.serving import RunningServer
from tests.unit.cli_tools import tandem

KEY = "a-key-of-some-length"
PROGRAMS = ("claude", "codex", "opencode", "aider")


def settings(shown: str) -> tuple[str, str]:
    """The file of settings that a dry run prints, and its content."""
    first, _, rest = shown.partition("\n")
    return first.removeprefix("# "), rest.partition("\n\n" if rest.startswith("{") else "\n\nCODEX")[0]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_dry_run_shows_settings_environment_and_command_without_the_key(
    server: RunningServer, tmp_path: Path, program: str
) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path), "TANDEM_API_KEY": KEY, "PATH": ""}
    words = ("--server", server.url, "-m", "shout", "--dry-run", "--", "--flag", "a b")
    done = tandem("launch", program, *words, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert server.url in done.stdout and "shout" in done.stdout
    assert KEY not in done.stdout
    *_, command = done.stdout.splitlines()
    assert command.startswith(program) and command.endswith("--flag 'a b'")
    assert list(tmp_path.iterdir()) == [], "nothing is written"
    name, text = settings(done.stdout)
    if program == "codex":
        found = tomllib.loads(text)
        assert (found["model"], found["model_context_window"]) == ("shout", 1024)
        assert found["model_providers"]["tandem"]["env_key"] == "TANDEM_API_KEY"
        assert command.startswith("codex --profile tandem ")
        assert name == str(tmp_path / "mlx-tandem" / "launch" / "codex" / "tandem.config.toml")
    elif program == "claude":
        assert json.loads(text)["env"]["ANTHROPIC_BASE_URL"] == server.url
        assert f"--settings {name} " in command
    elif program == "opencode":
        assert json.loads(text)["model"] == "tandem/shout"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("claude",), "claude is not installed; this installs it: npm install -g @anthropic-ai/claude-code"),
        (("claude", "-m", "none"), "answered with 404: "),
        (("claude", "--server", "http://127.0.0.1:9"), "(--url); tandem serve MODEL starts a server"),
    ],
)
def test_what_cannot_be_launched_is_one_line(
    server: RunningServer, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path), "PATH": ""}
    done = tandem("launch", words[0], "--server", server.url, *words[1:], env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_a_program_starts_with_its_settings_and_this_user_alone_reads_them(
    server: RunningServer, tmp_path: Path
) -> None:
    """The program stands for Codex; it prints what it was given."""
    program = tmp_path / "bin" / "codex"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"\necho "$CODEX_HOME $TANDEM_API_KEY"\n')
    program.chmod(0o755)
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "TANDEM_API_KEY": KEY}
    env["PATH"] = f"{program.parent}:{env['PATH']}"
    command = [sys.executable, "-m", "mlx_tandem", "launch", "codex", "--url", server.url, "--", "exec", "hi there"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    folder = tmp_path / "mlx-tandem" / "launch" / "codex"
    assert done.stdout == f"--profile tandem exec hi there\n{folder} {KEY}\n"
    assert done.stderr.startswith("tandem: tandem-demo has a context of 1,024 tokens, which may be too short")
    (file,) = folder.iterdir()
    assert (file.stat().st_mode & 0o077, folder.stat().st_mode & 0o077) == (0, 0)
    assert KEY not in file.read_text()


def test_the_name_of_a_model_is_only_a_name(tmp_path: Path) -> None:
    """It is the server's, and OpenCode would put variables and files of the user into its settings, and send them."""
    name = 'a "quoted" \\ name\n[mcp_servers.x]\x7f 🦙 {env:HOME} {file:~/.ssh/id_rsa}'
    target = ServedModel("http://127.0.0.1:1", name, 1024, KEY)
    (text,) = AGENTS["opencode"].prepare(target, tmp_path).files.values()
    assert json.loads(text)["model"] == f"tandem/{name}" and name in json.loads(text)["provider"]["tandem"]["models"]
    assert re.findall(r"{(?:env|file):[^}]*}", text) == ["{env:TANDEM_API_KEY}"]
    (text,) = AGENTS["codex"].prepare(target, tmp_path).files.values()
    found = tomllib.loads(text)
    assert found["model"] == name and "mcp_servers" not in found
