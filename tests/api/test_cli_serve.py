"""`tandem serve` and `tandem demo` as a user meets them: in a process, by what they print."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_tandem import demo


class Tandem:
    """One `tandem` in a process; what it prints can be read while it runs."""

    def __init__(self, *args: str, errors: Path):
        self.errors = errors
        with errors.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlx_tandem", *args], stdout=subprocess.PIPE, stderr=log, text=True
            )

    def ready(self) -> tuple[str, str]:
        """The URL and the text up to the curl that it offers."""
        assert self.process.stdout is not None
        text = ""
        for line in self.process.stdout:
            text += line
            if "-d '" in line:
                break
        found = re.search(r"^Ready: (http://\S+)$", text, re.MULTILINE)
        assert found, text + self.errors.read_text()
        return found[1], text

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    started: list[Tandem] = []

    def one(*args: str) -> Tandem:
        started.append(Tandem(*args, errors=tmp_path / f"errors{len(started)}"))
        return started[-1]

    yield one
    for tandem in started:
        tandem.process.kill()
        tandem.process.wait()
        assert tandem.process.stdout is not None
        tandem.process.stdout.close()


def offered_request(text: str) -> urllib.request.Request:
    """The curl that the ready line offers, as a request."""
    words = shlex.split(text[text.index("curl ") :].replace("\\\n", " "))
    url, data = words[1], words[words.index("-d") + 1]
    name, _, value = words[words.index("-H") + 1].partition(": ")
    return urllib.request.Request(url, data.encode(), {name: value})


def test_the_ready_line_says_what_to_try_and_it_works(start) -> None:  # type: ignore[no-untyped-def]
    tandem = start("serve", "--port", "0", "--host", "0.0.0.0", "--served-model-name", "little")
    url, text = tandem.ready()
    assert url.startswith("http://127.0.0.1:")
    assert "shout, json, down" in text
    with urllib.request.urlopen(offered_request(text), timeout=30) as reply:
        answer = json.load(reply)
    assert "42" in answer["choices"][0]["message"]["content"]
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
        assert json.load(reply)["data"][0]["id"] == "little"
    assert tandem.end() == 0
    errors = tandem.errors.read_text()
    assert "can be reached from other machines" in errors
    assert "tandem: reading weights …" in errors


def test_loopback_prints_no_warning(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "c.yaml"
    file.write_text(
        f"engine: {{model: {{path: {demo.MODEL_PATH}}}, cache: {{num_blocks: 512}}}}\n"
        f"server: {{port: 0}}\nadapters: {{loud: {demo.ADAPTER_PATHS['shout']}}}\n"
    )
    tandem = start("serve", "--config", str(file))
    _, text = tandem.ready()
    assert re.search(r"adapters  loud$", text, re.MULTILINE)
    assert tandem.end() == 0
    assert "warning" not in tandem.errors.read_text()


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", "{}", "model_type is missing"),
        ("config.json", None, "config.json is missing"),
        ("tokenizer.json", None, "tokenizer.json"),
        ("model.safetensors", None, "model.safetensors is missing"),
    ],
)
def test_a_broken_model_folder_is_one_line_and_status_1(
    tmp_path: Path, file: str, content: str | None, said: str
) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    for source in demo.MODEL_PATH.iterdir():
        if source.name != file:
            (folder / source.name).symlink_to(source)
    if content is not None:
        (folder / file).write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "mlx_tandem", "serve", str(folder), "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("tandem: ")
    assert said in last
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_a_broken_adapter_is_one_line_and_status_1(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "mlx_tandem", "serve", "--port", "0", "--adapter", "mine", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("tandem: ")
    assert "Traceback" not in done.stderr


def test_the_demo_without_a_terminal_prints_each_answer_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlx_tandem", "demo", "--seconds", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "Sort down: 3 9 1 7 5  [down]  9 7 5 3 1" in lines
    assert 'What is 17 + 25?  [json]  {"answer": 42}' in lines
    assert len(lines) == len(set(lines))
    assert re.fullmatch(r"\d+ answers, [\d,]+ tokens; at most \d+ at once, of the base and 3 adapters; .*", lines[-1])
