"""What README.md and docs/ show is run as it stands there: every block marked sh, python or yaml.

Only what cannot be the same is replaced: the port 8000 by that of a server of this test, and how long is measured.
`./my-model` and `./my-adapter` exist where the commands run, as links to the built-in ones.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlx_tandem import demo
from mlx_tandem.cli.settings import OPTIONS, build
from mlx_tandem.config import Config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORT = {
    "bench serve": ["--num-requests", "2", "--repeats", "1", "--concurrency", "2", "--max-tokens", "4"],
    "bench engine": ["--batch", "1", "--max-tokens", "4", "--prompt-tokens", "8", "--repeats", "1"],
    "demo": ["--seconds", "1"],
    "benchmarks/peers.py": [*("--shapes", "0.13m", "--concurrency", "1", "--repeats", "1", "--max-tokens", "4")],
    "benchmarks/adapters.py": [
        *("--shape", "0.13m", "--adapters", "2", "--concurrency", "2", "--repeats", "1", "--max-tokens", "4")
    ],
    "benchmarks/long_prompt.py": ["--lengths", "200", "--repeats", "1", "--streams", "2", "--window", "0.2"],
    "benchmarks/make_model.py": [],
}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            yield Block(page.name, text.count("\n", 0, found.start()) + 1, found[1], found[2])


def commands() -> dict[str, list[str]]:
    """Every distinct command of the sh blocks, as words, in the order of the pages."""
    found: dict[str, list[str]] = {}
    for block in blocks():
        if block.language == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    found.setdefault(" ".join(line.split()), words)
    return found


def of_language(language: str) -> list[object]:
    return [pytest.param(b, id=f"{b.page}:{b.line}") for b in blocks() if b.language == language]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder in which the names that the pages use exist."""
    (tmp_path / "my-model").symlink_to(demo.MODEL_PATH)
    (tmp_path / "my-adapter").symlink_to(demo.ADAPTER_PATHS["shout"])
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    for block in blocks():
        if block.language == "yaml":
            (tmp_path / "tandem.yaml").write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass
class Served:
    port: int
    folder: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`tandem serve` with the built-in model, started where `./my-adapter` exists."""
    where = tmp_path_factory.mktemp("served")
    (where / "my-adapter").symlink_to(demo.ADAPTER_PATHS["shout"])
    port = free_port()
    with running(["serve", "--port", str(port)], port, where) as process:
        yield Served(port, where)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


class running:
    """A `tandem serve` that is ready inside the block."""

    def __init__(self, args: list[str], port: int, where: Path):
        self._args, self._port, self._where = args, port, where

    def __enter__(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlx_tandem", *self._args],
            cwd=self._where,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5):
                    return self._process
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.1)
        self.__exit__()
        raise AssertionError(f"tandem {' '.join(self._args)} was not ready: {self._process.returncode}")

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            finally:
                self._process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def curl(words: list[str], port: int) -> bytes:
    """What curl would do with the few options that the pages use. Fails on a status over 299."""
    method, url, headers, data = None, "", {}, None
    rest = iter(words[1:])
    for word in rest:
        if word == "-X":
            method = next(rest)
        elif word == "-H":
            name, _, value = next(rest).partition(": ")
            headers[name] = value
        elif word == "-d":
            data = next(rest).encode()
        elif not word.startswith("-"):
            url = word
        else:
            assert word == "-N", f"an option this test does not know: {word}"
    request = urllib.request.Request(url.replace(":8000", f":{port}"), data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status < 300
        content: bytes = reply.read()
    return content


def run(words: list[str], where: Path) -> str:
    done = subprocess.run(
        words, cwd=where, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("line", [c for c, words in commands().items() if words[0] == "curl"])
def test_curl(line: str, served: Served) -> None:
    words = commands()[line]
    if "DELETE" in words:  # the page loads it in the same block
        name = words[-1].rsplit("/", 1)[1]
        load = ["curl", "http://localhost:8000/v1/adapters", "-H", "Content-Type: application/json"]
        curl([*load, "-d", json.dumps({"name": name, "path": "./my-adapter"})], served.port)
    content = curl(words, served.port)
    if "stream" in line:
        assert content.strip().endswith(b"data: [DONE]")
    elif "/metrics" not in line or "engine" in line:
        assert json.loads(content)


@pytest.mark.parametrize("line", [c for c, words in commands().items() if words[:2] == ["tandem", "serve"]])
def test_tandem_serve(line: str, folder: Path) -> None:
    words = commands()[line][1:]
    port = free_port()
    with running([*words, "--port", str(port)], port, folder) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "line", [c for c, words in commands().items() if words[0] in ("tandem", "python") and words[1] != "serve"]
)
def test_commands_that_end(line: str, folder: Path, served: Served) -> None:
    words = [word.replace(":8000", f":{served.port}") for word in commands()[line]]
    if words[0] == "tandem":
        kind = next(k for k in SHORT if " ".join(words[1:]).startswith(k))
        words = [sys.executable, "-m", "mlx_tandem", *words[1:], *SHORT[kind]]
    else:
        kind = words[1]
        words = [sys.executable, *words[1:], *SHORT[kind]]
    assert run(words, folder)
    if "--json-out" in words:
        assert json.loads((folder / words[words.index("--json-out") + 1]).read_text())["machine"]


def test_make() -> None:
    """The targets exist and mean what the page says; running them from here would run this test again."""
    lines = [words for words in commands().values() if words[0] == "make"]
    assert {words[1] for words in lines} >= {"serve", "test", "check", "install"}
    for words in lines:
        plan = run(["make", "--dry-run", "--always-make", *words[1:]], ROOT)
        assert plan.strip()


def test_every_command_is_run() -> None:
    assert {words[0] for words in commands().values()} == {"curl", "tandem", "python", "make"}


@pytest.mark.parametrize("block", of_language("python"))
def test_python(block: Block, folder: Path, served: Served) -> None:
    run([sys.executable, "-c", block.text.replace(":8000", f":{served.port}")], folder)


@pytest.mark.parametrize("block", of_language("yaml"))
def test_yaml(block: Block, folder: Path) -> None:
    """The page shows every setting, and the defaults that hold."""
    shown = build(folder / "tandem.yaml", {})
    assert shown == Config(engine=build(None, {"model": "./my-model"}).engine, adapters=(("sql", "./my-adapter"),))
    for place in OPTIONS.values():
        assert re.search(rf"^ *{place.rsplit('.', 1)[-1]}:", block.text, re.MULTILINE), place


@pytest.mark.parametrize("block", of_language("json"))
def test_json(block: Block) -> None:
    assert json.loads(block.text)


def test_what_the_readme_says_the_models_answer(served: Served) -> None:
    def answer(model: str, question: str) -> str:
        body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0}
        words = ["curl", "http://localhost:8000/v1/chat/completions", "-H", "Content-Type: application/json"]
        content: str = json.loads(curl([*words, "-d", json.dumps(body)], served.port))["choices"][0]["message"][
            "content"
        ]
        return content

    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    peru = "What is the capital of Peru?"
    assert f"*{answer('base', peru)}*" in readme
    assert answer("shout", peru).isupper()
    assert f"`{answer('json', peru)}`" in readme
    assert answer("down", "Sort down: 3 9 1 7 5") == "9 7 5 3 1" != answer("base", "Sort down: 3 9 1 7 5")


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_gives_the_figures_of_the_committed_files() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "figures.py"), "--check"], check=False)
    assert done.returncode == 0


def test_the_recording_is_a_picture() -> None:
    from xml.etree import ElementTree

    root = ElementTree.parse(ROOT / "docs" / "demo.svg").getroot()
    assert len(root.findall("{http://www.w3.org/2000/svg}g")) > 5
    for name in ("shout", "json", "down"):
        assert name in "".join(root.itertext())


def test_parameters_of_the_http_page_exist() -> None:
    from mlx_tandem.server.dialects.openai import ChatBody, CompletionBody

    page = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`([a-z_]+)", page.partition("## Parameters")[2].partition("## Errors")[0]))
    fields = set(ChatBody.__struct_fields__) | set(CompletionBody.__struct_fields__)
    refused = {"tools", "tool_choice", "parallel_tool_calls", "response_format", "echo", "suffix"}
    assert told - {"generation_config"} <= fields
    assert fields - refused - {"messages", "prompt", "model"} <= told
