"""`tandem launch`: starts a coding agent against a running server, with settings in a folder of their own.

Nothing that the user has set up for the program is changed. The API key is in the program's environment only.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from mlx_tandem import files
from mlx_tandem.cli import keys
from mlx_tandem.cli.adapters import Server, ask
from mlx_tandem.cli.console import fail, say
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.files import StorageError, cache_folder
from mlx_tandem.printable import printable

KEY = "TANDEM_API_KEY"
"""Environment variable from which programs read the key, if they do not have one of their own for it."""

NO_KEY = "none"
"""Key for programs that insist on one, on a server that asks for none."""

ENOUGH_TOKENS = 32_768
"""Context from which nothing is said: the instructions of an agent alone have 10,000 to 40,000 tokens."""


@dataclass(frozen=True)
class ServedModel:
    """The model that a program will use, and the server that has it."""

    url: str
    model: str
    context: int
    """Most tokens of a conversation."""
    key: str


@dataclass(frozen=True)
class AgentCommand:
    """A program's command line, the variables that it gets, and files of settings by their names in its folder."""

    words: Sequence[str]
    environment: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Agent:
    """A program that can be launched."""

    install: str
    """The command that installs it."""
    prepare: Callable[[ServedModel, Path], AgentCommand]
    """Returns how it is launched, given the folder of its settings."""


def _claude(target: ServedModel, folder: Path) -> AgentCommand:
    variables = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    settings = json.dumps({"env": variables}, indent=2) + "\n"  # before those in the user's own settings
    return AgentCommand(
        ["claude", "--settings", str(folder / "settings.json")],
        variables | {"ANTHROPIC_AUTH_TOKEN": target.key or NO_KEY},
        {"settings.json": settings},
    )


def _codex(target: ServedModel, folder: Path) -> AgentCommand:
    lines = [
        f"model = {_toml(target.model)}",
        'model_provider = "tandem"',
        f"model_context_window = {target.context}",
        "check_for_update_on_startup = false",
        "",
        "[analytics]",
        "enabled = false",
        "",
        "[features]",
        "plugins = false",
        "",
        "[model_providers.tandem]",
        'name = "tandem"',
        f"base_url = {_toml(target.url + '/v1')}",
        'wire_api = "responses"',
        *([f'env_key = "{KEY}"'] if target.key else []),
    ]
    # A profile, since Codex itself writes into config.toml, such as which folders are trusted.
    return AgentCommand(
        ["codex", "--profile", "tandem"],
        {"CODEX_HOME": str(folder)} | ({KEY: target.key} if target.key else {}),
        {"tandem.config.toml": "\n".join(lines) + "\n"},
    )


def _toml(text: str) -> str:
    """Return a text as TOML has it, in which no character is written as two, as JSON does."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _opencode(target: ServedModel, folder: Path) -> AgentCommand:
    provider: dict[str, Any] = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlx-tandem",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": f"{{env:{KEY}}}"},
        "models": {target.model: {"limit": {"context": target.context, "output": target.context // 4}}},
    }
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"tandem/{target.model}",
        "small_model": f"tandem/{target.model}",
        "autoupdate": False,
        "share": "disabled",
        "provider": {"tandem": provider},
    }
    return AgentCommand(
        ["opencode"],
        {
            "OPENCODE_CONFIG": str(folder / "opencode.json"),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            KEY: target.key or NO_KEY,
        },
        {"opencode.json": _as_it_is(json.dumps(settings, indent=2)) + "\n"},
    )


def _as_it_is(settings: str) -> str:
    """Return the JSON of OpenCode's settings in a form into which OpenCode puts nothing but the key.

    OpenCode puts variables and files into its settings wherever {env:NAME} or {file:PATH} is written there, and the
    name of the model is what the server says.
    """
    for begin in ("{env:", "{file:"):
        settings = settings.replace(begin, f"\\u007b{begin[1:]}")
    return settings.replace(f"\\u007benv:{KEY}}}", f"{{env:{KEY}}}")


def _aider(target: ServedModel, folder: Path) -> AgentCommand:
    return AgentCommand(
        ["aider", "--model", f"openai/{target.model}", "--no-show-model-warnings"],
        {"OPENAI_API_BASE": f"{target.url}/v1", "OPENAI_API_KEY": target.key or NO_KEY},
    )


AGENTS = {
    "claude": Agent("npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("npm install -g @openai/codex", _codex),
    "opencode": Agent("npm install -g opencode-ai", _opencode),
    "aider": Agent("uv tool install aider-chat", _aider),
}
"""The programs by their names, which are those of their commands."""


def launch(name: str, server: Server, model: str | None, arguments: Sequence[str], *, dry_run: bool) -> NoReturn:
    """Replace this process by a program that uses the server's model. With `dry_run` print how it would be started.

    End the process with one line and status 1 if the server does not answer or does not have the model, or the program
    is not installed.
    """
    program = AGENTS[name]
    target = _target(server, model)
    folder = cache_folder() / "launch" / name
    prepared = program.prepare(target, folder)
    words = [*prepared.words, *arguments]
    if dry_run:
        for line in _shown(prepared, words, folder, target.key):
            print(line)
        raise SystemExit(0)
    path = shutil.which(name)
    if path is None:
        fail(f"{name} is not installed; this installs it: {program.install}")
    if target.context < ENOUGH_TOKENS:
        say(
            f"{target.model} has a context of {target.context:,} tokens, which may be too short: the instructions of "
            f"such programs alone have 10,000 to 40,000"
        )
    try:
        _write(folder, prepared.files)
    except StorageError as e:
        fail(e.message)
    os.execve(path, words, os.environ | prepared.environment)


def _target(server: Server, model: str | None) -> ServedModel:
    """Return what the server has under the name `model`, or its base."""
    try:
        key = keys.given(server.api_key, server.api_key_file)
    except InvalidRequest as e:
        fail(str(e))
    path = "/v1/models" if model is None else f"/v1/models/{quote(model, safe='')}"
    found = ask(server, "GET", path, hint="tandem serve MODEL starts a server")
    entry = found["data"][0] if model is None else found
    if entry["max_model_len"] is None:
        fail(f"the server at {server.url} is still starting; try again when it is ready")
    url = server.url if "//" in server.url else f"http://{server.url}"
    return ServedModel(url.rstrip("/"), model or entry["id"], entry["max_model_len"], key)


def _write(folder: Path, contents: Mapping[str, str]) -> None:
    """Write the files of settings, which are read by this user alone. Raise StorageError."""
    with files.storage(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in contents.items():
            files.replace(folder / name, text.encode())


def _shown(prepared: AgentCommand, words: Sequence[str], folder: Path, key: str) -> list[str]:
    """Return the lines that say how a program is started; in place of the key is `…`."""
    lines = []
    for name, text in prepared.files.items():
        lines += [f"# {folder / name}", *text.splitlines(), ""]
    for name, value in prepared.environment.items():
        lines.append(f"{name}={'…' if key and value == key else shlex.quote(value)} \\")
    return [printable(line) for line in (*lines, shlex.join(words))]
