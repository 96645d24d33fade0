"""Programs of others, unmodified, where they are installed: each has to run a command or make an edit.

Their instructions are longer than what the built-in model can follow. The two that `make test` installs have a model
with a strict chat template that says a script; for the others the engine says prepared answers behind the real server.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from msgspec import structs

from mlx_tandem import demo
from mlx_tandem.engine.messages import Output, Submit
from mlx_tandem.engine.wire import WireError
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.server.sockets import unused_port
from mlx_tandem.types import Delta
from tests import scripted_model
from tests.api import scripted
from tests.clients import node
from tests.clients.elsewhere import Elsewhere
from tests.images import picture
from tests.scripted_model import Script
from tests.serving import ROOT, RunningServer, serving
from tests.waiting import until

LONG = structs.replace(scripted.INFO, max_model_len=200_000, num_blocks=20_000)
ANSWER = "The command printed tandem-42."
COMMAND = "echo tandem-$((40+2))"
FOUND = "The tool was found."
KNOWN = "gpt-6.2-sol"
"""A model that Codex knows: it then offers other tools, and most of them within a message."""

PROGRAM = f"text((await tools.exec_command({{cmd: '{COMMAND}'}})).output);"
SEEN, UNSEEN = "I see the image.", "I cannot see the image."
EDIT = "sums.py\n```python\n<<<<<<< SEARCH\n    return a - b\n=======\n    return a + b\n>>>>>>> REPLACE\n```\n"


def call(name: str, **arguments: object) -> str:
    """What a model says to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


AGENTS = Script(
    says={
        "Run the command": [call("Bash", command=COMMAND), "No result came."],
        "Execute the command": [call("exec_command", cmd=COMMAND), "No result came."],
        "Read the picture": [call("Read", file_path="dot.png"), "No image came."],
        "View the picture": [call("view_image", path="dot.png"), "No image came."],
        "Find the tool": [call("ToolSearch", query="select:WebFetch", max_results=1), FOUND],
        "Run the script": [call("exec", input=PROGRAM), "No result came."],
        "a-late-place": "The system message came late.",
        "danger-full-access": [call("exec_command", cmd=COMMAND), "No result came."],
        scripted_model.IMAGE: SEEN,
    },
    heard={"tandem-42": ANSWER, "image": UNSEEN},
    signs=call("f"),
    strict=True,
    shown=200,
)
"""What the model says to both agents. They print messages of their own beside those of the user."""


def needs(name: str) -> str:
    """The path of a program; the test is skipped where there is none."""
    return shutil.which(name, path=node.path()) or pytest.skip(f"{name} is not installed")


@pytest.fixture(scope="module")
def agents(scripted_folder):
    config = scripted_model.config(scripted_folder(AGENTS), served_model_names=("agents", KNOWN))
    with serving(config) as running:
        yield running


@pytest.fixture(scope="module")
def seeing_agents(scripted_folder):
    if importlib.util.find_spec("mlx_vlm") is None:
        pytest.skip("the extra `vision` is not installed")
    with serving(scripted_model.config(scripted_folder(replace(AGENTS, sees=True)))) as running:
        yield running


@contextlib.contextmanager
def saying(answer: Callable[[str], str]) -> Iterator[tuple[str, list[str]]]:
    """The address of a server whose model answers each prompt as told, and the prompts so far."""
    tokenizer = Tokenizer.load(demo.MODEL_PATH)
    prompts: list[str] = []

    def speak(peer: scripted.Peer) -> None:
        with contextlib.suppress(WireError, OSError):  # the end of the server
            while True:
                try:
                    heard = peer.hear(object)
                except AssertionError:  # Programs take a while until they ask.
                    continue
                if not isinstance(heard, Submit):
                    continue
                prompts.append(tokenizer.decode(list(heard.request.prompt), show_special=True))
                ids = tokenizer.encode(answer(prompts[-1]))
                for i, token in enumerate(ids):
                    finish = "stop" if i == len(ids) - 1 else None
                    peer.say(Output([Delta(heard.request.id, 0, (token,), None, finish)]))

    with scripted.scripted_server(LONG) as (client, peer, _):
        thread = threading.Thread(target=speak, args=(peer,), daemon=True)
        thread.start()
        yield str(client.base_url).rstrip("/"), prompts


def calling(name: str, **arguments: str | list[str]) -> Callable[[str], str]:
    """What an agent hears: a call of its tool, and behind the result the answer. Other prompts are about titles."""
    called = call(name, **arguments)
    return lambda prompt: ANSWER if "<tool_response>" in prompt else called if "<tools>" in prompt else "A title."


def run(command: list[str], home: Path, **environment: str) -> str:
    """What a program prints, without any setting of the person who runs the tests."""
    given = {"HOME": str(home), "PATH": node.path()} | environment
    done = subprocess.run(
        command, cwd=home, env=given, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ran(prompts: list[str]) -> bool:
    """Whether the last prompt has what the command printed, which nobody but a shell can have computed."""
    return "tandem-42" in prompts[-1].rpartition("<tool_response>")[2]


def is_up(client: httpx.Client) -> bool:
    """Whether a program that serves has begun to."""
    try:
        return client.get("/health").is_success
    except httpx.TransportError:
        return False


class Codex:
    """Codex in a folder of its own."""

    def __init__(self, home: Path, server: RunningServer, elsewhere: Elsewhere, model: str = "base") -> None:
        self._program = needs("codex")
        self._home = home
        self._environment = elsewhere.environment
        first = f'model = "{model}"\nmodel_provider = "tandem"\ncheck_for_update_on_startup = false\n'
        quiet = "[analytics]\nenabled = false\n\n[features]\nplugins = false\n"
        provider = f'name = "tandem"\nbase_url = "{server.url}/v1"\nwire_api = "responses"\n'
        provider += "request_max_retries = 0\nstream_max_retries = 0\n"
        (home / ".codex").mkdir()
        settings = f"{first}\n{quiet}\n[model_providers.tandem]\n{provider}"
        (home / ".codex" / "config.toml").write_text(settings)

    def say(self, text: str, *flags: str) -> str:
        command = [self._program, "exec", *flags, "--skip-git-repo-check", text]
        return run(command, self._home, **self._environment)


FREELY = "--dangerously-bypass-approvals-and-sandbox"


def launched(home: Path, url: str, program: str, *words: str, **environment: str) -> str:
    """What a program prints that `tandem launch` starts, where its user has settings that lead nowhere."""
    needs(program)
    nowhere = "http://127.0.0.1:9"
    (home / ".codex").mkdir()
    codex = f'model_provider = "x"\n[model_providers.x]\nname = "x"\nbase_url = "{nowhere}"\n'
    (home / ".codex" / "config.toml").write_text(codex)
    (home / ".claude").mkdir()
    claude = json.dumps({"env": {"ANTHROPIC_BASE_URL": nowhere, "CLAUDE_CODE_MAX_RETRIES": "0"}})
    (home / ".claude" / "settings.json").write_text(claude)
    command = [sys.executable, "-m", "mlx_tandem", "launch", program, "--server", url, "--", *words]
    said = run(command, home, **environment, PYTHONPATH=str(ROOT))
    assert (home / ".codex" / "config.toml").read_text() == codex
    assert (home / ".claude" / "settings.json").read_text() == claude
    return said


def test_codex_launched_takes_a_turn_with_a_tool(tmp_path, agents, elsewhere):
    words = ("exec", FREELY, "--skip-git-repo-check", "Execute the command")
    assert ANSWER in launched(tmp_path, agents.url, "codex", *words, **elsewhere.environment)


def test_codex_a_script_as_a_custom_tool(tmp_path, agents, elsewhere):
    assert ANSWER in Codex(tmp_path, agents, elsewhere, KNOWN).say("Run the script", FREELY)


def test_codex_a_late_developer_message(tmp_path, agents, elsewhere):
    """When permissions change during a conversation, a message of the developer says so."""
    codex = Codex(tmp_path, agents, elsewhere)
    assert AGENTS.otherwise in codex.say("Hello", "--sandbox", "read-only")
    assert ANSWER in codex.say("Go on", "resume", "--last", FREELY)


@pytest.mark.parametrize(("server", "answer"), [("agents", UNSEEN), ("seeing_agents", SEEN)])
def test_codex_an_image_as_a_result(tmp_path, request, elsewhere, server, answer):
    (tmp_path / "dot.png").write_bytes(picture(16, 16))
    codex = Codex(tmp_path, request.getfixturevalue(server), elsewhere)
    assert answer in codex.say("View the picture", FREELY)


def claude_code(text: str, home: Path, server: RunningServer, elsewhere: Elsewhere) -> str:
    return run(
        [needs("claude"), "-p", text, "--allowedTools", "Bash", "Read"],
        home,
        **elsewhere.environment,
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL="base",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="base",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_RETRIES="0",
    )


def test_claude_code_launched_takes_a_turn_with_a_tool(tmp_path, agents, elsewhere):
    words = ("-p", "Run the command", "--allowedTools", "Bash")
    assert ANSWER in launched(tmp_path, agents.url, "claude", *words, **elsewhere.environment)


def test_claude_code_a_search_for_a_tool(tmp_path, agents, elsewhere):
    """It offers tools that a model has to find first, and the result refers to one of them."""
    assert FOUND in claude_code("Find the tool", tmp_path, agents, elsewhere)


def test_claude_code_a_late_system_message(tmp_path, agents, elsewhere):
    """A message of the system behind the user's first one says where it works."""
    (tmp_path / "a-late-place").mkdir()
    found = claude_code("Where are you?", tmp_path / "a-late-place", agents, elsewhere)
    assert AGENTS.says["a-late-place"] in found


@pytest.mark.parametrize(("server", "answer"), [("agents", UNSEEN), ("seeing_agents", SEEN)])
def test_claude_code_an_image_as_a_result(tmp_path, request, elsewhere, server, answer):
    (tmp_path / "dot.png").write_bytes(picture(16, 16))
    assert answer in claude_code("Read the picture", tmp_path, request.getfixturevalue(server), elsewhere)


def test_continue(tmp_path):
    program = needs("cn")
    with saying(calling("Bash", command=COMMAND)) as (url, prompts):
        model = f"name: base\n    provider: openai\n    model: base\n    apiBase: {url}/v1\n    apiKey: none"
        settings = tmp_path / "config.yaml"
        settings.write_text(
            f"name: local\nversion: 1.0.0\nschema: v1\nmodels:\n  - {model}\n    capabilities: [tool_use]\n"
        )
        command = [program, "-p", "Run the command", "--auto", "--config", str(settings)]
        assert ANSWER in run(command, tmp_path, CONTINUE_TELEMETRY_ENABLED="0")
        assert ran(prompts)


def test_opencode_launched(tmp_path):
    with saying(calling("bash", command=COMMAND, description="x")) as (url, prompts):
        assert ANSWER in launched(tmp_path, url, "opencode", "run", "--auto", "Run the command")
        assert ran(prompts)


def test_aider_launched(tmp_path):
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    with saying(lambda prompt: EDIT) as (url, _):
        flags = ["--edit-format", "diff", "--no-check-update", "--yes-always", "--no-git", "--analytics-disable"]
        launched(tmp_path, url, "aider", *flags, "--message", "Mend add", "sums.py")
    assert (tmp_path / "sums.py").read_text() == "def add(a, b):\n    return a + b\n"


def test_cline(tmp_path):
    program = needs("cline")
    with saying(calling("run_commands", commands=[COMMAND])) as (url, prompts):
        flags = ["--data-dir", str(tmp_path / "data")]
        provider = ["--provider", "openai-compatible", "--apikey", "none", "--modelid", "base"]
        run([program, "auth", *flags, *provider, "--baseurl", f"{url}/v1"], tmp_path)
        assert ANSWER in run([program, *flags, "--cwd", str(tmp_path), "--json", "Run the command"], tmp_path)
        assert ran(prompts)


@pytest.mark.parametrize("kind", ["openai", "ollama"])
def test_open_webui(tmp_path, kind):
    program = needs("open-webui")
    with saying(lambda prompt: ANSWER) as (url, prompts):
        port = unused_port()
        given = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "DATA_DIR": str(tmp_path), "WEBUI_AUTH": "False"}
        given |= {"OFFLINE_MODE": "1", "RAG_EMBEDDING_ENGINE": "openai", "ENABLE_OPENAI_API": str(kind == "openai")}
        given |= {"OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
        given |= {"ENABLE_OLLAMA_API": str(kind == "ollama"), "OLLAMA_BASE_URL": url}
        command = [program, "serve", "--host", "127.0.0.1", "--port", str(port)]
        with (tmp_path / "log").open("wb") as log:
            child = subprocess.Popen(command, cwd=tmp_path, env=given, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                until(lambda: is_up(client) or child.poll() is not None)
                token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
                client.headers["Authorization"] = f"Bearer {token}"
                assert "base" in [model["id"] for model in client.get("/api/models").json()["data"]]
                chat = {"model": "base", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
                found = client.post("/api/chat/completions", json=chat).text
        finally:
            child.terminate()
            child.wait()
    pieces = [json.loads(line[6:]) for line in found.splitlines() if line.startswith("data: {")]
    said = [choice["delta"].get("content") or "" for piece in pieces for choice in piece.get("choices", ())]
    assert "".join(said) == ANSWER
    assert "Hello" in prompts[-1]
