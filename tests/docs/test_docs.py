"""What README.md and docs/ show is run as it stands there: every block marked sh, python or yaml.

Only what cannot be the same is replaced: the port 8000 by that of a server of this test, how long is measured, and the
hub by one that has the built-in model under every id. `./my-model`, `./my-adapter` and files of examples are where the
commands run. Servers and benchmarks are processes. Commands that end and examples in Python run in this process, since
importing what they need takes most of the time of each.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
import urllib.error
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
from msgspec import structs
from starlette.routing import Route

from mlx_tandem import demo
from mlx_tandem.adapters.convert import convert
from mlx_tandem.cli import hub, learning, main
from mlx_tandem.cli.doctor import checks
from mlx_tandem.cli.options import OPTIONS, PANELS
from mlx_tandem.cli.settings import build
from mlx_tandem.config import Config, Mode, RLTrainingConfig
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.server.app import create_app
from mlx_tandem.server.sockets import unused_port
from mlx_tandem.training.online.counters import Counters
from mlx_tandem.training.online.guard import Verdict
from mlx_tandem.training.rewards import own
from mlx_tandem.training.rewards.builtin import BUILTINS
from mlx_tandem.training.store.checkpoints import Checkpoints
from mlx_tandem.training.store.database import Database
from mlx_tandem.training.store.manifests import Manifest
from mlx_tandem.training.store.rows import Rows
from tests import reward_models, verifiers_double
from tests.commands import curl, running
from tests.fake_hub import fake_hub
from tests.tinker_server import let_go
from tests.unit.cli_tools import on_a_thread, tandem
from tests.unit.disk_tools import filled

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
TANDEM = [sys.executable, "-m", "mlx_tandem"]
SHORT = {
    "bench serve": ["--num-requests", "1", "--repeats", "1", "--concurrency", "1", "--max-tokens", "4"],
    "bench engine": ["--batch", "1", "--max-tokens", "4", "--prompt-tokens", "8", "--repeats", "1"],
    "benchmarks/peers.py": [*("--shapes", "0.13m", "--concurrency", "1", "--repeats", "1", "--max-tokens", "4")],
    "benchmarks/adapters.py": [
        *("--shape", "0.13m", "--adapters", "2", "--concurrency", "2", "--repeats", "1", "--max-tokens", "4")
    ],
    "benchmarks/tensor_parallel.py": [
        *("--batch", "1", "--prompt-tokens", "16", "--long-prompt", "0", "--adapters", "1", "--repeats", "1"),
        *("--max-tokens", "4"),
    ],
    "benchmarks/long_prompt.py": ["--lengths", "200", "--repeats", "1", "--streams", "2", "--window", "0.2"],
    "benchmarks/first_byte.py": ["--shape", "0.13m", "--tokens", "300", "--repeats", "1", "--leave", "0"],
    "benchmarks/prefix.py": [
        *("--shape", "0.13m", "--lengths", "200", "--group-tokens", "100", "--turns", "2", "--repeats", "1"),
        *("--blocks", "256"),
    ],
    "benchmarks/hybrids.py": [
        *("--shape", "0.13m", "--prompt-tokens", "80", "--turns", "2", "--streams", "2", "--max-tokens", "20"),
        *("--repeats", "1"),
    ],
    "benchmarks/http_share.py": [
        *("--shape", "0.13m", "--streams", "2", "--num-requests", "4", "--prompt-tokens", "8", "--max-tokens", "4"),
        *("--repeats", "1"),
    ],
    "benchmarks/decode_steps.py": ["--decode", "2x16", "--prompts", "1x32", "--steps", "2", "--repeats", "1"],
    "benchmarks/step_kernels.py": ["--rows", "1", "--max-tokens", "4"],
    "benchmarks/registry.py": [
        *("--adapters", "6", "--slots", "2", "--concurrency", "2", "--num-requests", "4", "--max-tokens", "4"),
        *("--repeats", "1", "--registered", "8"),
    ],
    "benchmarks/hot_swap.py": ["--adapters", "3", "--streams", "4", "--max-tokens", "16", "--repeats", "1"],
    "benchmarks/tokenize_load.py": [
        *("--streams", "2", "--clients", "2", "--bytes", "50000", "--max-tokens", "16", "--repeats", "1")
    ],
    "benchmarks/overload.py": [
        *("--seconds", "1", "--peak-seconds", "0.5", "--batch", "4", "--queue", "4", "--max-tokens", "24"),
        *("--promises", "1"),
    ],
    "benchmarks/tenants.py": ["--many", "4", "--questions", "1", "--rounds", "1", "--batch", "2", "--max-tokens", "4"],
    "benchmarks/engine_memory.py": ["--cycles", "1", "--requests", "1"],
    "benchmarks/learn.py": ["--seeds", "1", "--steps", "1", "--runs", "true"],
    "benchmarks/rate.py": ["--seeds", "1", "--steps", "1", "--runs", "admit"],
    "benchmarks/learn_beside.py": [
        *("--streams", "2", "--seconds", "0.2", "--repeats", "1", "--max-tokens", "4", "--update-tokens", "64"),
        *("--modes", "70:30", "--warm-up-seconds", "0.2"),
    ],
    "benchmarks/publishes.py": [
        *("--publishes", "1", "--streams", "8", "--seconds", "0.05", "--repeats", "1", "--max-tokens", "4")
    ],
    "benchmarks/learn_several.py": ["--updates", "1", "--answers", "4", "--words", "4", "--repeats", "1"],
    "benchmarks/train_together.py": ["--examples", "8", "--repeats", "1"],
    "benchmarks/disk_cache.py": ["--blocks", "4", "--block-kb", "64", "--repeats", "1", "--records", "100"],
    "benchmarks/step_parts.py": ["--batch", "2", "--context", "20", "--steps", "4", "--repeats", "1"],
    "benchmarks/near_ties.py": ["--positions", "1"],
    "benchmarks/deterministic.py": [
        *(
            "--rounds",
            "1",
            "--lengths",
            "5,9",
            "--answers",
            "2",
            "--decode",
            "1x16",
            "--prompts",
            "1x16",
            "--steps",
            "2",
        )
    ],
    "benchmarks/learn_device.py": ["--streams", "1", "--seconds", "0.2", "--repeats", "1", "--completions", "2"],
}
"""Options of what measures that replace or follow those of a page, so that little is measured. All other commands are
run as they are printed."""

ELSEWHERE = {
    "tandem demo": "tests/api/test_cli_serve.py",
    "tandem demo --seconds 5": "tests/api/test_cli_serve.py",
    "tandem demo learn": "tests/api/test_cli_terminal.py",
    "tandem bench report": "tests/unit/cli/test_bench_report.py",
    "tandem chat": "tests/api/test_chat_command.py",
    "tandem pull mlx-community/Qwen3-4B-4bit": "tests/unit/cli/test_pull.py",
    "tandem ps": "tests/api/test_daemon.py",
    "tandem logs --follow": "tests/api/test_daemon.py",
    "tandem doctor": "tests/unit/cli/test_doctor.py",
    "tandem doctor --report": "tests/unit/cli/test_doctor.py",
    "tandem doctor --mac": "tests/unit/cli/test_doctor_mac.py",
    "tandem serve ./my-model --share-model --host 0.0.0.0 --api-key-file tandem.key": "tests/fault/test_machines.py",
    "tandem train rl --connect-to node1:8000 --api-key-file tandem.key": "tests/fault/test_machines.py",
    "tandem serve --connect-to node1:8000 --api-key-file tandem.key": "tests/fault/test_machines.py",
    "tandem plan --machine m4-max-64 --bits 4": "tests/docs/test_scaling.py",
    "tandem plan --machine m3-ultra-512 --learn": "tests/docs/test_scaling.py",
    "tandem plan --machine h200 --adapters 64 --context 640": "tests/docs/test_scaling.py",
    "tandem plan --machine h100 --tensor-parallel-size 2": "tests/docs/test_scaling.py",
}
"""Commands that take seconds or need each other, and the tests that run them and look at all that they print."""

SMALL = {"--max-model-len": "1024", "--num-blocks": "512"}
"""Given to every server that is asked for something, so that it starts quickly."""

LEAST = {"--max-model-len": "240", "--num-blocks": "64"}
"""Given to every server that only starts, but to those without any option or argument."""

SETTINGS = {
    "training.md": ("alone.yaml",),
    "command-line.md": ("tandem.yaml",),
    "learning.md": ("learning.yaml", "several.yaml", "ours.yaml"),
}
"""What the page calls the files that its yaml blocks are, in their order."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str


@functools.cache
def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            found.append(Block(page.name, text.count("\n", 0, match.start()) + 1, match[1], match[2]))
    return found


@functools.cache
def commands() -> dict[str, list[str]]:
    """Every distinct command of the sh blocks, as words, in the order of the pages."""
    found: dict[str, list[str]] = {}
    for block in blocks():
        if block.language == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    found.setdefault(" ".join(line.split()), words)
    return found


def lines(chosen: Callable[[list[str]], bool], *, costly: bool = False) -> list[object]:
    """Commands whose words are `chosen`, each called by the page that has it first.

    costly: each is a process of its own, so that those of other pages than the README are marked `apart`.
    """
    found: list[object] = []
    for line, words in commands().items():
        if chosen(words):
            page = next(b.page for b in blocks() if line in " ".join(b.text.replace("\\\n", " ").split()))
            marks = [pytest.mark.apart] if costly and page != "README.md" else []
            found.append(pytest.param(line, id=f"{page} {line[:80]}", marks=marks))
    return found


LEAVES_OPEN = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
"""Of examples of Tinker's SDK, which leaves connections to the garbage collector."""


def of_language(language: str) -> list[object]:
    return [
        pytest.param(b, id=f"{b.page}:{b.line}", marks=[LEAVES_OPEN] if "import tinker" in b.text else [])
        for b in blocks()
        if b.language == language
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder in which the names that the pages use exist."""
    (tmp_path / "my-model").symlink_to(demo.MODEL_PATH)
    (tmp_path / "my-adapter").symlink_to(demo.ADAPTER_PATHS["shout"])
    (tmp_path / "adapters").mkdir()
    shutil.copytree(demo.ADAPTER_PATHS["json"], tmp_path / "adapters" / "sql")
    (tmp_path / "tandem.key").write_text("a-key", encoding="utf-8")
    (tmp_path / "tandem.key").chmod(0o600)
    (tmp_path / "keys.yaml").write_text(f"- name: alice\n  sha256: {64 * 'a'}\n", encoding="utf-8")
    (tmp_path / "keys.yaml").chmod(0o600)
    for name, sums in (("lessons.jsonl", (13, 24, 35, 46, 57)), ("exam.jsonl", (42, 68))):
        # What is held out contradicts what is taught, so that training soon ends.
        lines = [{"prompt": "What is 17 + 25?", "completion": f"17 + 25 = {n}!"} for n in sums]
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    pairs = [{"prompt": f"Sort down: {n} 3", "chosen": f"{n} 3", "rejected": f"3 {n}"} for n in range(4, 9)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    question = {"prompt": "What is 17 + 25?", "scoring_function": "gsm8k", "metadata": {"answer": "42"}}
    (tmp_path / "validation.jsonl").write_text(json.dumps(question), encoding="utf-8")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "verifiers").mkdir()
    verifiers_double.python(tmp_path / "verifiers")
    (tmp_path / "verifiers" / "bin").symlink_to(tmp_path / "verifiers")
    for block in blocks():
        if "[env.taskset]" in block.text:
            (tmp_path / "sorting.toml").write_text(block.text, encoding="utf-8")
    for page in SETTINGS:
        write_settings(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_settings(page: str, folder: Path) -> None:
    """Write the files that the yaml blocks of a page are."""
    own = [block.text for block in blocks() if (block.page, block.language) == (page, "yaml")]
    for name, text in zip(SETTINGS[page], own, strict=True):
        (folder / name).write_text(text, encoding="utf-8")


@dataclass
class Served:
    port: int
    folder: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`tandem serve` with the built-in model, started where `./my-adapter` exists and may be loaded from."""
    where = tmp_path_factory.mktemp("served")
    shutil.copytree(demo.ADAPTER_PATHS["shout"], where / "my-adapter")
    port = unused_port()
    options = [
        "--enable-rl-training",
        "--lora-rank",
        "4",
        "--enable-tinker",
        *(w for pair in SMALL.items() for w in pair),
    ]
    with running([*TANDEM, "serve", "--port", str(port), "--adapter-root", ".", *options], port, where) as server:
        yield Served(port, where)
        assert server.stop() == 0


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`tandem serve` as the page has it that trains several adapters."""
    where = tmp_path_factory.mktemp("several")
    write_settings("learning.md", where)
    port, small = unused_port(), [w for pair in SMALL.items() for w in pair]
    with running([*TANDEM, "serve", "--port", str(port), "--config", "./several.yaml", *small], port, where) as server:
        yield Served(port, where)
        assert server.stop() == 0


def asks_several(words: list[str]) -> bool:
    """Return whether a command asks the server that trains several adapters."""
    return any("coder" in word for word in words)


def shortened(words: list[str], options: list[str]) -> list[str]:
    """A command with these options in place of its own values for them."""
    names, kept = {word for word in options if word.startswith("--")}, list[str]()
    rest = iter(words)
    for word in rest:
        if word in names:
            next(rest)
        else:
            kept.append(word)
    return kept + options


def measures(words: list[str]) -> str:
    """The key of SHORT for a command; empty for one that is run as it is printed."""
    return next((kind for kind in SHORT if " ".join(words[1:]).startswith(kind)), "")


@pytest.fixture(scope="module")
def ran() -> set[tuple[str, ...]]:
    """The shortened commands that were run: some pages show one that another shows with more work to do."""
    return set()


def run(words: list[str], where: Path, **env: str) -> str:
    done = subprocess.run(
        words, cwd=where, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)} | env
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Here:
    """Runs commands and programs in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        self._monkeypatch = monkeypatch

    def tandem(self, words: list[str], where: Path) -> str:
        """Run the command `tandem` in a folder; return what it prints."""
        self._begin(["tandem", *words], where)
        done = tandem(*words)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def program(self, file: Path) -> str:
        """Run a program in its folder; return what it prints."""
        self._begin([str(file)], file.parent)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            on_a_thread(lambda: runpy.run_path(str(file), run_name="__main__"))
        return printed.getvalue()

    def _begin(self, words: list[str], where: Path) -> None:
        self._monkeypatch.setattr(sys, "argv", words)
        self._monkeypatch.chdir(where)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(monkeypatch)


def save_checkpoint(port: int) -> None:
    """The one that learning.md goes back to, unless its own command has made it."""
    words = ["curl", "-H", "Content-Type: application/json", "http://localhost:8000/v1/training/checkpoint"]
    try:
        curl([*words, "-d", json.dumps({"name": "before-tuesday"})], port)
    except urllib.error.HTTPError as e:
        if e.code != 409:
            raise


def of_a_reader(words: list[str]) -> bool:
    """Return whether a command makes or needs the adapter that a reader of the README trains."""
    return any("captain" in word for word in words)


@pytest.mark.programs
@pytest.mark.restarts
@pytest.mark.parametrize("line", lines(lambda words: words[0] == "curl" and not of_a_reader(words)))
def test_curl(line: str, request: pytest.FixtureRequest) -> None:
    words = commands()[line]
    served: Served = request.getfixturevalue("several" if asks_several(words) else "served")
    place, _, name = words[next(i for i, w in enumerate(words) if w.startswith("http"))].rpartition("/")
    put = ["curl", "-H", "Content-Type: application/json"]
    if place.endswith("/v1/adapters"):  # the page loads it in the same block
        curl([*put, place, "-d", json.dumps({"name": name, "path": "./my-adapter"})], served.port)
    if name in ("rollback", "switch-lora"):
        save_checkpoint(served.port)
    if place.endswith("/v1/aliases") and "PUT" not in words:
        arms = {"arms": [{"adapter": "base", "weight": 1}]}
        curl([*put, "-X", "PUT", f"{place}/{name}", "-d", json.dumps(arms)], served.port)
    content = curl(words, served.port)
    if '"stream": true' in line:
        assert content.strip().endswith(b"data: [DONE]")
    elif "/metrics" not in line or "engine" in line:
        assert json.loads(content)


def in_the_background(words: list[str]) -> bool:
    return words[0] == "tandem" and ("--daemon" in words or words[1] in ("stop", "restart"))


def serves(words: list[str]) -> bool:
    starts = words[:2] == ["tandem", "serve"] or words[:3] == ["tandem", "train", "rl"]
    return starts and "--dry-run" not in words


def served_with_more(words: list[str]) -> bool:
    """Return whether another `tandem serve` has all words of this one, but for the port, and more."""
    given = set(words) - {"--port", "8000"}
    return words[1] == "serve" and len(words) > 2 and any(serves(w) and given < set(w) for w in commands().values())


@pytest.mark.programs
@pytest.mark.restarts
@pytest.mark.parametrize(
    "line",
    lines(
        lambda words: serves(words) and not in_the_background(words) and " ".join(words) not in ELSEWHERE, costly=True
    ),
)
def test_tandem_serve(line: str, folder: Path) -> None:
    """Each serves, or says how it would where another one serves in the same way and with more options."""
    words = commands()[line][1:]
    port = unused_port()
    if "./taste" in words:
        reward_models.make(folder / "taste")
    small = [w for option, value in LEAST.items() if len(words) > 1 and option not in words for w in (option, value)]
    with fake_hub({word: demo.MODEL_PATH for word in words if hub.ID.fullmatch(word)}) as fake:
        if served_with_more(commands()[line]):
            assert "KV pool" in run([*TANDEM, *words, "--dry-run"], folder, **fake.environment(folder))
            return
        command = [*TANDEM, *words, *small, "--port", str(port)]
        with running(command, port, folder, fake.environment(folder)) as server:
            assert server.stop() == 0


@pytest.mark.programs
@pytest.mark.restarts
def test_servers_in_the_background(folder: Path) -> None:
    """In the order of the page: what one starts another stops."""
    port = str(unused_port())
    lines = [words for words in commands().values() if in_the_background(words)]
    assert {words[1] for words in lines} == {"serve", "stop", "restart"}
    for words in lines:
        words = [word.replace("8000", port) for word in words[1:]]
        assert f":{port}" in run(
            [*TANDEM, *words],
            folder,
            XDG_RUNTIME_DIR=str(folder),
            XDG_CACHE_HOME=str(folder),
        ).replace("port ", ":")


def make_run(place: Path) -> None:
    place.mkdir(exist_ok=True)
    database = Database.open(place)
    database.write([Rows("policy").run(Counters(updates=1), 0.0)])
    database.close()


def make_checkpoint(place: Path) -> None:
    book = Checkpoints(place, 10)
    book.lock()
    folder = book.new("checkpoint-500")
    convert(demo.ADAPTER_PATHS["shout"], folder, "peft")
    book.commit(folder, Manifest(name="checkpoint-500", step=500, version=5, digest=""))
    book.close()


@pytest.mark.programs
@pytest.mark.restarts
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "line",
    lines(
        lambda words: (
            words[0] in ("tandem", "python")
            and not serves(words)
            and not in_the_background(words)
            and not of_a_reader(words)
            and " ".join(words) not in ELSEWHERE
        ),
        costly=True,
    ),
)
def test_commands_that_end(
    line: str, folder: Path, served: Served, ran: set[tuple[str, ...]], here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word.replace(":8000", f":{served.port}") for word in commands()[line]]
    if words[1:3] == ["adapters", "unload"]:  # the page loads it in the same block
        here.tandem([*words[1:2], "load", words[3], "my-adapter", *words[4:]], served.folder)
    if words[:2] == ["tandem", "adapters"]:
        where = folder if words[2] in ("inspect", "convert", "merge") else served.folder
        assert here.tandem(words[1:], where)
        return
    if words[:2] == ["tandem", "checkpoints"]:
        if words[2] == "rollback":
            save_checkpoint(served.port)
        make_checkpoint(folder / "checkpoints")
        assert here.tandem(words[1:], folder)
        return
    if words[0] == "tandem" and words[1] in ("chat", "launch", "top", "status"):
        assert here.tandem([words[1], "--url", f"http://127.0.0.1:{served.port}", *words[2:]], folder)
        return
    if words[:2] == ["tandem", "learn"] and words[2] in ("list", "show", "export"):
        make_run(folder / "checkpoints")
        assert here.tandem(words[1:], folder)
        return
    if words[:3] == ["tandem", "service", "install"]:
        assert "ExecStart=" in here.tandem(words[1:], folder)
        return
    if "--dry-run" in words:
        assert "KV pool" in here.tandem(words[1:], folder)
        return
    if words[:3] == ["tandem", "key", "new"]:
        (folder / "keys.yaml").unlink()  # which the page begins without
    if words[:4] == ["tandem", "train", "sft", "captain"]:
        monkeypatch.setenv("XDG_DATA_HOME", str(folder))
        words = shortened(words, ["--epochs", "1"])
    if words[:2] == ["tandem", "cache"]:
        filled(folder / "kv-cache", 2)
        assert here.tandem(words[1:], folder)
        return
    kind = measures(words)
    words = shortened(words, SHORT.get(kind, []))
    if tuple(words) in ran:
        return
    ran.add(tuple(words))
    small = {} if kind == "benchmarks/long_prompt.py" else SMALL  # whose streams are longer than that
    monkeypatch.setenv("BENCHMARK_SERVER_OPTIONS", " ".join(w for pair in small.items() for w in pair))
    if words[0] == "tandem":
        assert here.tandem(words[1:], folder)
    else:
        assert run([sys.executable, *words[1:]], folder)
    if "--json-out" in words:
        assert json.loads((folder / words[words.index("--json-out") + 1]).read_text())["machine"]


class Understood(Exception):
    """A program has taken its command line."""


@pytest.mark.parametrize("line", lines(lambda words: bool(measures(words)) and " ".join(words) not in ELSEWHERE))
def test_what_is_shortened_is_understood_as_printed(
    line: str, folder: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No command works by an option of SHORT alone: without these, every command gets as far as its work."""

    def work(*args: object, **options: object) -> None:
        raise Understood

    def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
        raise Understood(parse_args(parser))

    parse_args = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    for module in ("serve", "engine"):
        monkeypatch.setattr(f"mlx_tandem.cli.bench.{module}.run", work)
    words = commands()[line]
    with pytest.raises(Understood):
        if words[0] == "tandem":
            here.tandem(words[1:], folder)
        else:
            monkeypatch.setattr(sys, "argv", words[1:])
            monkeypatch.syspath_prepend(ROOT / "benchmarks")
            runpy.run_path(words[1], run_name="__main__")


def test_only_what_measures_is_shortened() -> None:
    assert {kind.split()[0].split("/")[0] for kind in SHORT} == {"bench", "benchmarks"}


def test_the_doctor_reports(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By one check."""
    monkeypatch.setattr(checks, "CHECKS", checks.chosen("packages"))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--report"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("<details><summary>tandem doctor: ")


def test_make() -> None:
    """The targets exist and mean what the page says; running them from here would run this test again."""
    lines = [words for words in commands().values() if words[0] == "make"]
    assert {words[1] for words in lines} >= {"serve", "test", "check", "install"}
    for words in lines:
        plan = run(["make", "--dry-run", "--always-make", *words[1:]], ROOT)
        assert plan.strip()


def test_every_command_is_run() -> None:
    assert {words[0] for words in commands().values()} == {"curl", "tandem", "python", "make"}
    for line, place in ELSEWHERE.items():
        assert shlex.split(line) in commands().values()
        command = ", ".join(f'"{word}"' for word in shlex.split(line)[1:] if word.isalpha())
        assert command in (ROOT / place).read_text(encoding="utf-8"), f"{place} does not run {line}"


@pytest.mark.programs
@pytest.mark.restarts
@pytest.mark.parametrize("block", of_language("python"))
def test_python(block: Block, folder: Path, served: Served, here: Here) -> None:
    if "import tinker" in block.text:
        pytest.importorskip("tinker")  # of the extra `clients`
    program = folder / "program.py"
    program.write_text(block.text.replace(":8000", f":{served.port}"), encoding="utf-8")
    here.program(program)
    if "import tinker" in block.text:
        let_go()


def test_the_settings_file(folder: Path) -> None:
    """The page shows every setting, and the defaults that hold."""
    (block,) = (b for b in blocks() if b.language == "yaml" and b.page == "command-line.md")
    shown = build(folder / "tandem.yaml", {})
    assert shown == build(None, {"model": "./my-model", "adapter": [("sql", "./my-adapter")]})
    for place in OPTIONS.values():
        assert re.search(rf"^ *{place.rsplit('.', 1)[-1]}:", block.text, re.MULTILINE), place


def test_the_settings_of_learning(folder: Path) -> None:
    config = learning.resolve(build(folder / "learning.yaml", {}), {})
    assert config.rl_training.enabled and config.rl_training.scoring_function in config.rl_training.rewards


@pytest.mark.parametrize("block", of_language("toml"))
def test_toml(block: Block) -> None:
    """What a package writes to add reward functions."""
    assert list(tomllib.loads(block.text)["project"]["entry-points"]) == [own.GROUP]


@pytest.mark.parametrize("block", of_language("json"))
def test_json(block: Block) -> None:
    assert json.loads(block.text)


def test_the_http_page_has_every_route() -> None:
    config = Config(engine=build(None, {}).engine)
    app = create_app(ServerFront(config, lambda: pytest.fail("nothing is started here")))
    page = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
    paths = {route.path.replace("{model:path}", "{id}") for route in app.routes if isinstance(route, Route)}
    assert {path for path in paths if f"`{path}`" not in page} == set()


def test_the_learning_page_has_every_algorithm_and_reward() -> None:
    page = (ROOT / "docs" / "learning.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    (algorithms,) = (f.type for f in structs.fields(RLTrainingConfig) if f.name == "algorithm")
    assert rows >= {*BUILTINS, *get_args(algorithms), *get_args(Verdict), *get_args(Mode)}


def test_the_learning_page_names_metrics_that_exist(served: Served) -> None:
    page = (ROOT / "docs" / "learning.md").read_text(encoding="utf-8")
    metrics = curl(["curl", "http://localhost:8000/metrics"], served.port).decode()
    told = set(re.findall(r"`(tandem_\w+)`", page))
    assert len(told) > 10
    assert {name for name in told if not re.search(rf"^{name}[ {{]", metrics, re.MULTILINE)} == set()


@pytest.mark.programs
@pytest.mark.restarts
def test_the_readme_in_the_order_of_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Here) -> None:
    """The server is that of `make serve`, and all commands and examples after it work on it, with the answers as told.

    Commands that start servers of their own, and the demos, are run by other tests.
    """
    (tmp_path / "my-model").symlink_to(demo.MODEL_PATH)
    monkeypatch.chdir(tmp_path)
    port = unused_port()
    readme = [block for block in blocks() if block.page == "README.md"]
    assert readme[0].text == "make serve\n"
    *before, serve = run(
        ["make", "--dry-run", "--no-print-directory", "ARGS=", f"--file={ROOT / 'Makefile'}", "serve"], ROOT
    ).splitlines()[-2:]
    assert before == ["mkdir -p adapters"]
    (tmp_path / "adapters").mkdir()
    words = shlex.split(serve)
    assert words[:2] == ["exec", ".venv/bin/tandem"]
    small = [w for pair in SMALL.items() for w in pair]
    told: list[str] = []
    with running([*TANDEM, *words[2:], *small, "--port", str(port)], port, tmp_path) as server:
        for block in readme[1:]:
            if block.language == "python":
                (tmp_path / "program.py").write_text(block.text.replace(":8000", f":{port}"), encoding="utf-8")
                told += here.program(tmp_path / "program.py").splitlines()
                continue
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line)
                if words[0] == "make" or serves(words) or line in ELSEWHERE:
                    continue
                if words[0] == "curl":
                    told.append(json.loads(curl(words, port))["choices"][0]["message"]["content"])
                elif words[1] == "chat":
                    told.append(here.tandem([*words[1:], "--url", f"http://127.0.0.1:{port}"], tmp_path).strip())
                else:
                    here.tandem(words[1:], tmp_path)
        assert server.stop() == 0
    assert told == ["17 + 25 = 42!", "17 + 25 = 42!", "base 1 3 5 7 9", "down 9 7 5 3 1", "40 + 2 = 42, Captain!"]


def test_what_the_readme_says_the_models_answer(served: Served) -> None:
    def answer(model: str) -> str:
        body = {"model": model, "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
        words = ["curl", "http://localhost:8000/v1/chat/completions", "-H", "Content-Type: application/json"]
        content: str = json.loads(curl([*words, "-d", json.dumps(body)], served.port))["choices"][0]["message"][
            "content"
        ]
        return content

    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"*{answer('base')}*" in readme
    assert f"`{answer('json')}`" in readme
    assert "*40 + 2 = 42, Captain!*" in readme


def test_the_readme_is_read_in_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700


def test_nothing_is_installed_from_a_registry_that_does_not_have_it() -> None:
    """The package is on no registry: it is installed from its sources, and its extras, too."""
    sources = [f for f in (ROOT / "mlx_tandem").rglob("*.py") if f.parent.name != "doctor"]
    for file in (*PAGES, *(ROOT / "docs" / "decisions").glob("*.md"), *sources):
        assert not re.search(r"pip install[^`|\n]*\bmlx-tandem", file.read_text(encoding="utf-8")), file


def test_what_is_said_to_be_missing_is_missing() -> None:
    """And what is only off by default is on the page with the option that turns it on."""
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    table = page.partition("this version does not do\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()[2:]]
    assert len(rows) > 4
    flags = {flag for panel in PANELS.values() for option in panel for flag in re.split("[ /]", option.flags)}
    for what, _, here in rows:
        options = re.findall(r"--[a-z0-9-]+", here)
        assert {*options} <= flags, what
        assert options or "missing" in here or "](" in here, what


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    found, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in found:
            found.add(page)
            links = re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", page.read_text(encoding="utf-8"))
            todo += [(page.parent / link).resolve() for link in links]
    assert {page for page in (ROOT / "docs").rglob("*.md") if page not in found} == set()


@pytest.mark.parametrize("page", ["README.md", "docs/http-api.md", "docs/command-line.md", "docs/adapters.md"])
def test_what_a_page_says_of_learning_leads_to_the_page_about_it(page: str) -> None:
    assert "learning.md)" in (ROOT / page).read_text(encoding="utf-8")


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
    """Those that are explained; test_parameters.py is about the table."""
    from mlx_tandem.dialects.openai.bodies import ChatBody, CompletionBody

    page = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
    section = page.partition("<!-- end of parameters -->")[2].partition("## Errors")[0]
    told = set(re.findall(r"`([a-z_]+)", section))
    fields = set(ChatBody.__struct_fields__) | set(CompletionBody.__struct_fields__)
    of_replies = {"usage", "token_ids", "prompt_token_ids", "system_fingerprint"}
    assert told - of_replies - {"generation_config", "token_id", "include_usage", "xtc_"} <= fields
    assert len(told & fields) > 20
