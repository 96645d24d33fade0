"""`tandem serve` and `tandem demo` as a user meets them: in a process, by what they print."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mlx_tandem import Engine, demo
from mlx_tandem.errors import TandemError
from tests.fake_hub import fake_hub
from tests.unit.cli_tools import tandem as command

SMALL = ("--max-model-len", "240", "--num-blocks", "64")
"""A pool and a context with which a server starts quickly."""


class Tandem:
    """One `tandem` in a process; what it prints can be read while it runs."""

    def __init__(self, *args: str, errors: Path, env: Mapping[str, str] | None = None):
        self.errors = errors
        with errors.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlx_tandem", *args], stdout=subprocess.PIPE, stderr=log, text=True, env=env
            )

    def ready(self) -> tuple[str, str]:
        """The URL and the text up to the curl that it offers."""
        assert self.process.stdout is not None
        text = ""
        for line in self.process.stdout:
            text += line
            if line.endswith("]}'\n"):
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

    def one(*args: str, env: Mapping[str, str] | None = None) -> Tandem:
        started.append(Tandem(*args, errors=tmp_path / f"errors{len(started)}", env=env))
        return started[-1]

    yield one
    for tandem in started:
        tandem.process.kill()
        tandem.process.wait()
        assert tandem.process.stdout is not None
        tandem.process.stdout.close()


def offered_request(text: str, key: str, shown: str = "") -> urllib.request.Request:
    """The curl that the ready line offers, as a request with the key in place of what is `shown` for it."""
    words = shlex.split(text[text.index("curl ") :].replace("\\\n", " ").replace(f"Bearer {shown}", f"Bearer {key}"))
    url, data = words[1], words[words.index("-d") + 1]
    headers = dict(words[i + 1].split(": ") for i, word in enumerate(words) if word == "-H")
    assert (headers.get("Authorization") == f"Bearer {key}") is bool(key)
    return urllib.request.Request(url, data.encode(), headers)


def engine_pid(tandem: Tandem) -> int:
    found = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    (pid,) = [
        int(pid)
        for pid, parent, args in (line.split(None, 2) for line in found.splitlines())
        if int(parent) == tandem.process.pid and "mlx_tandem.engine_main" in args
    ]
    return pid


def test_the_ready_line_says_what_to_try_and_it_works(start) -> None:  # type: ignore[no-untyped-def]
    tandem = start("serve", *SMALL, "--port", "0", "--served-model-name", "little", "--completion-batch-size", "8")
    url, text = tandem.ready()
    assert url.startswith("http://127.0.0.1:")
    assert "shout, json, down" in text
    with urllib.request.urlopen(offered_request(text, ""), timeout=30) as reply:
        answer = json.load(reply)
    assert "42" in answer["choices"][0]["message"]["content"]
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
        assert json.load(reply)["data"][0]["id"] == "little"
    assert tandem.end() == 0
    errors = tandem.errors.read_text()
    assert errors.startswith("tandem: warning: --completion-batch-size has no effect here: ")
    *start, end = errors.splitlines()
    assert [line for line in start if not line.startswith("tandem: ")] == []
    assert "tandem: attention by portable: this device has no other" in start
    assert any(line.startswith("tandem: reading weights …") for line in start), "perhaps with the time that is left"
    assert json.loads(end)["event"] == "draining"


SECRET = "sk-of-this-test-only"


@pytest.mark.parametrize("variable", [None, "VLLM_API_KEY"])
def test_a_key_opens_other_addresses_and_stays_where_it_is(start, tmp_path: Path, variable: str | None) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "key"
    os.mkfifo(file, 0o600)  # as a shell's <(…): what is read is gone
    args = [] if variable else ["--api-key-file", str(file)]
    env = os.environ | ({variable: SECRET} if variable else {})
    tandem = start("-v", "serve", *SMALL, "--port", "0", "--host", "0.0.0.0", *args, env=env)
    if variable is None:
        file.write_text(f"{SECRET}\n")
    url, text = tandem.ready()
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(
        offered_request(text, SECRET, f"${variable}" if variable else "KEY"), timeout=30
    ) as reply:
        assert "42" in json.load(reply)["choices"][0]["message"]["content"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url}/v1/models", timeout=30)
    with refused.value:
        assert refused.value.code == 401
    shown = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True).stdout
    assert SECRET not in shown
    engine = ["ps", "eww", "-p", str(engine_pid(tandem))]  # with its environment
    shown = subprocess.run(engine, capture_output=True, text=True, check=True).stdout
    assert "mlx_tandem.engine_main" in shown
    assert "PATH=" in shown
    assert SECRET not in shown
    assert tandem.end() == 0
    errors = tandem.errors.read_text()
    assert SECRET not in errors
    (settings,) = [json.loads(line) for line in errors.splitlines() if '"event": "settings"' in line]  # by -v
    assert settings["server"]["host"] == "0.0.0.0"
    assert settings["engine"]["model"]["path"] == str(demo.MODEL_PATH)


def test_a_model_and_an_adapter_from_the_hub(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with fake_hub({"org/tiny-4bit": demo.MODEL_PATH, "org/loud": demo.ADAPTER_PATHS["shout"]}) as hub:
        args = ["org/tiny-4bit@v2", "--adapter", "loud", "org/loud", "--served-model-name", "little", "--port", "0"]
        tandem = start("serve", *SMALL, *args, env=hub.environment(tmp_path))
        url, _ = tandem.ready()
        asked = len(hub.asked)
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
            assert [model["id"] for model in json.load(reply)["data"]] == ["little", "org/tiny-4bit", "loud"]
        answers = {}
        for model in ("little", "org/tiny-4bit", "loud"):
            body = {"model": model, "messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0}
            request = urllib.request.Request(
                f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as reply:
                answers[model] = json.load(reply)["choices"][0]["message"]["content"]
        assert answers["little"] == answers["org/tiny-4bit"] != answers["loud"]
        assert answers["loud"].isupper()
        assert len(hub.asked) == asked
        assert tandem.end() == 0


def test_adapters_of_a_running_server(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    root, key = tmp_path / "adapters", tmp_path / "key"
    shutil.copytree(demo.ADAPTER_PATHS["shout"], root / "loud")
    key.write_text(SECRET)
    key.chmod(0o600)
    tandem = start("serve", *SMALL, "--port", "0", "--adapter-root", str(root), "--api-key-file", str(key))
    url, text = tandem.ready()
    assert re.search(rf"^  adapters  shout, json, down; 1 folder in {re.escape(str(root))}, such as loud$", text, re.M)

    def adapters(*words: str) -> subprocess.CompletedProcess[str]:
        return command("adapters", *words, "--url", url, "--api-key-file", str(key))

    shutil.copytree(demo.ADAPTER_PATHS["json"], root / "later")
    assert re.search(r"^│ loud +│ +│", adapters("ls").stdout, re.MULTILINE)
    assert adapters("load", "loud").stdout == "loaded loud@1 (rank 16, 1.6 MB)\n"
    assert adapters("load", "mine", str(root / "later"), "--pin").stdout == "loaded mine@1 (rank 8, 0.4 MB)\n"
    listed = adapters("ls").stdout
    assert re.search(r"^│ loud@1 +│ 16 ", listed, re.MULTILINE)
    assert re.search(r"^│ mine@1 +│ 8 .* pinned", listed, re.MULTILINE)
    assert adapters("unload", "mine").stdout == "unloaded mine (1)\n"
    gone = adapters("unload", "mine")
    assert gone.returncode == 1
    assert gone.stderr.startswith(f"tandem: {url} answered with 404: ")
    outside = adapters("load", "x", str(tmp_path))
    assert (outside.returncode, "adapter root" in outside.stderr) == (1, True)
    assert tandem.end() == 0


def test_a_context_over_the_model_s_is_cut_to_it(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = tmp_path / "little"
    shutil.copytree(demo.MODEL_PATH, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    args = ("--port", "0", "--ctx-size", "4096", "--log-format", "json")
    tandem = start("serve", str(model), "--num-blocks", "64", *args)
    url, _ = tandem.ready()
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
        assert json.load(reply)["data"][0]["max_model_len"] == 512
    assert tandem.end() == 0
    events = [json.loads(line)["event"] for line in tandem.errors.read_text().splitlines()]
    assert "max_model_len 4096 is lowered to the model's limit of 512" in events
    assert events[-1] == "draining"


def test_loopback_prints_no_warning(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "c.yaml"
    file.write_text(
        f"model: {{path: {demo.MODEL_PATH}, max_model_len: 1024}}\ncache: {{num_blocks: 512}}\n"
        f"server: {{port: 0, host: '::1'}}\nadapters: {{loud: {demo.ADAPTER_PATHS['shout']}}}\n"
    )
    tandem = start("serve", "--config", str(file))
    url, text = tandem.ready()
    assert url.startswith("http://[::1]:")
    assert re.search(r"adapters  loud$", text, re.MULTILINE)
    listed = command("adapters", "ls", "--url", url)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert tandem.end() == 0
    errors = tandem.errors.read_text()
    assert "warning" not in errors
    assert '"event": "settings"' not in errors


BROKEN = [
    ("{}", "adapters.safetensors: is missing"),
    (
        r'{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {"\udfff": 1}}',
        r"adapter_config.json: rank_pattern.\udfff is a regular expression",
    ),
    (r'{"peft_type": "LORA", "\ud800\n": 1}', r"adapter_config.json: \ud800\n is not a known key"),
]


def broken_adapter(folder: Path, config: str) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(config)
    if config != "{}":
        shutil.copy(demo.ADAPTER_PATHS["shout"] / "adapters.safetensors", folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(("config", "said"), BROKEN)
def test_a_broken_adapter_is_refused_in_one_line(tmp_path: Path, config: str, said: str) -> None:
    with pytest.raises(TandemError) as refused:
        Engine(adapters={"mine": broken_adapter(tmp_path / "broken", config)}, num_blocks=64, max_model_len=256)
    assert refused.value.message.startswith("adapter mine: ") and said in refused.value.message
    assert refused.value.message.isprintable()


def test_a_broken_adapter_ends_the_command_with_one_line_and_status_1(tmp_path: Path) -> None:
    config, said = BROKEN[-1]
    folder = broken_adapter(tmp_path / "broken", config)
    done = subprocess.run(
        [sys.executable, "-m", "mlx_tandem", "serve", *SMALL, "--port", "0", "--adapter", "mine", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("tandem: adapter mine: ")
    assert said in last
    assert "Traceback" not in done.stderr
    assert not done.stdout


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
