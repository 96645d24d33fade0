"""A chat template is code from a model folder: what it does costs the one conversation that it does it over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_tandem import Engine, demo
from mlx_tandem.errors import InvalidRequest, ModelError
from tests.serving import RunningServer, demo_config, serving

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
RECURSES = "{% macro again(n) %}{{ again(n + 1) }}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}"
HOARDS = "{% set kept = namespace(text='x') %}{% for i in range(60) %}{% set kept.text = kept.text * 2 %}{% endfor %}"
TOO_LONG = "{% for i in range(99999) %}{{ 'x' * (messages[0].content | length * 200) }}{% endfor %}"
BOMBS = {
    "loops": LOOPS,
    "recurses": RECURSES,
    "hoards": HOARDS + "{{ kept.text | length }}",
    "multiplies": "{{ 'a' * (messages[0].content | length * 10**9) }}",
    "prints": TOO_LONG,
    "raises": "{{ nothing.at.all }}",
    "refuses": "{{ raise_exception('not like this') }}",
}
FALLS = ("loops", "hoards", "multiplies")
"""Those that a worker is lost over. What recurses, raises, refuses or prints too much is caught inside it."""


def model(folder: Path, template: str) -> Path:
    """The built-in model with another chat template."""
    for file in demo.MODEL_PATH.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(template)
    return folder


def explosive() -> str:
    """The built-in model's template, except for conversations that begin with the name of a bomb."""
    bombs = "".join(f"{{% elif messages[0].content == '{name}' %}}{bomb}" for name, bomb in BOMBS.items())
    return f"{{% if false %}}{bombs}{{% else %}}{(demo.MODEL_PATH / 'chat_template.jinja').read_text()}{{% endif %}}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(demo_config(model(tmp_path_factory.mktemp("model"), explosive()))) as server:
        yield server


def workers(server: RunningServer) -> dict[int, int]:
    """Resident bytes of the server's template workers, by their process id."""
    listed = subprocess.run(["ps", "-wweo", "pid=,ppid=,rss=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 3) for line in listed.splitlines()]
    return {
        int(pid): int(rss) * 1024
        for pid, parent, rss, args in rows
        if int(parent) == server.process.pid and "generation.templates.worker" in args
    }


@pytest.mark.promise("A4")
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_a_client_error_of_its_own_request(served: RunningServer, bomb: str) -> None:
    expected = served.chat("What is 17 + 25?", temperature=0).json()["choices"]
    with ThreadPoolExecutor(8) as threads:
        bad = [threads.submit(served.chat, bomb) for _ in range(2)]
        good = [threads.submit(served.chat, "What is 17 + 25?", temperature=0) for _ in range(6)]
        live = threads.submit(served.client.get, "/livez")
        for reply in (b.result() for b in bad):
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["param"] == "messages"
            assert "chat template" in reply.json()["error"]["message"]
        assert [g.result().json()["choices"] for g in good] == [expected] * 6
        assert live.result().status_code == 200
    assert served.client.get("/health").json()["engine_restarts"] == 0


def test_tokenize_has_the_same_limits(served: RunningServer) -> None:
    for bomb in ("multiplies", "prints", "raises"):
        reply = served.client.post("/tokenize", json={"messages": [{"role": "user", "content": bomb}]})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages"), reply.text


@pytest.mark.promise("FLT-07")
def test_a_killed_worker_costs_nothing(served: RunningServer) -> None:
    expected = served.chat("hello", temperature=0).json()["choices"]
    before = workers(served)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert served.chat("hello", temperature=0).json()["choices"] == expected
    assert before.keys().isdisjoint(workers(served))


def test_there_are_never_more_than_two_workers(served: RunningServer) -> None:
    with ThreadPoolExecutor(8) as threads:
        replies = [threads.submit(served.chat, ("hello", "multiplies")[i % 2]) for i in range(8)]
        while not all(r.done() for r in replies):
            assert len(workers(served)) <= 2
        assert [r.result().status_code for r in replies] == [200, 400] * 4


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LOOPS, "takes more than 1 s of CPU time"),
        ("{{ 'a' * 10 ** 10 }}", "needs more than 512 MB of memory"),  # computed when the template is compiled
        ("{{ 2 ** (10 ** 10) }}", "takes more than 1 s of CPU time"),
        ("{% if %}", "is not a valid template: "),
    ],
)
def test_a_template_that_cannot_be_used_ends_the_start_in_one_line(tmp_path: Path, template: str, why: str) -> None:
    folder = model(tmp_path, template)
    command = [sys.executable, "-m", "mlx_tandem", "serve", str(folder), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 1), done.stderr
    assert done.stderr.startswith(f"tandem: {folder}/chat_template.jinja")
    assert why in done.stderr


def test_the_python_api_has_the_same_limits(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(ModelError, match="takes more than 1 s of CPU time"):
        Engine(model(tmp_path / "a", LOOPS), num_blocks=64)
    with Engine(model(tmp_path / "b", explosive()), num_blocks=64, max_model_len=512) as engine:
        for bomb in FALLS:
            with pytest.raises(InvalidRequest) as e:
                engine.chat([{"role": "user", "content": bomb}])
            assert e.value.param == "messages"
            with pytest.raises(InvalidRequest):
                engine.codec.chat([{"role": "user", "content": bomb}], asks=True)
        assert "42" in engine.chat([{"role": "user", "content": "What is 17 + 25?"}], temperature=0, max_tokens=16).text
