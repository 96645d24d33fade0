"""`tandem learn watch` on a server that learns: on a terminal, in a pipe, and however it ends; and what it records."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from tests.api.learns import learning_config, trajectories
from tests.serving import RunningServer, serving
from tests.terminal import on_terminal
from tests.unit.cli_tools import tandem

KEY = "a-key-of-some-length"


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metrics") / "metrics.jsonl"


@pytest.fixture(scope="module")
def learner(metrics: Path) -> Iterator[RunningServer]:
    report_to = ("tensorboard",) if importlib.util.find_spec("tensorboard") else ()
    config = learning_config(metrics.parent, metrics_file=str(metrics), report_to=report_to, use_rslora=True)
    with serving(structs.replace(config, server=structs.replace(config.server, api_key=KEY))) as running:
        running.client.headers["Authorization"] = f"Bearer {KEY}"
        for i in range(2):
            learn(running, f"Sort down: {i} 1 2")
        yield running


def learn(server: RunningServer, prompt: str) -> None:
    body = {"trajectories": trajectories(text=prompt), "wait": True}
    reply = server.client.post("/v1/training/update", json=body)
    assert reply.json()["report"]["outcome"] == "published", reply.text


def watching(server: RunningServer, *words: str) -> list[str]:
    return ["learn", "watch", "--url", server.url, "--interval", "0.1", "--api-key", KEY, *words]


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40)])
def test_a_terminal_shows_curves_versions_the_guard_and_answers(
    learner: RunningServer, columns: int, rows: int
) -> None:
    with on_terminal(*watching(learner), columns=columns, rows=rows) as terminal:
        lines = terminal.read_until(lambda lines: any("answers that were learned from" in line for line in lines))
        before = learner.client.get("/v1/training/status").json()
        learn(learner, f"Sort down: {columns} 1 2")
        row = [str(before["step"] + 1), str(before["version"] + 1), "published", "0.500"]

        def whole(lines: list[str]) -> bool:
            """A screen may be read before all of it is drawn; the answers are at its end."""
            updated = any(f"· {before['updates'] + 1} updates" in line for line in lines)
            drawn = any("Sort down" in line and "→" in line for line in lines)
            return updated and drawn and row in [line.split()[:4] for line in lines]

        lines = terminal.read_until(whole)
        assert max(map(len, lines)) <= columns
        text = "\n".join(lines)
        assert lines[0].startswith(f"policy@{before['version'] + 1} · ")
        assert "guard: " in text and "rollbacks" in text
        assert all(title in text for title in ("mean reward 0.5", "loss ", "moved, nats "))
        reward = lines[next(i for i, line in enumerate(lines) if line.startswith("mean reward 0.5")) + 1 :][:6]
        assert reward[0].startswith("0 … 0.5 ")
        assert all(line[0] == "█" for line in reward[1:]), "bars begin at 0"
        assert re.search(r"^[01] · Sort down: \S+ 1 2 → \S", text, re.MULTILINE), "no names of roles"
        assert not re.search(r"\b(user|assistant)\b", text)
        terminal.process.send_signal(signal.SIGINT)
        after = terminal.read_to_end()
        assert terminal.process.wait(30) == 0
        assert "Traceback" not in "\n".join(after)


def test_a_pipe_gets_a_line_for_each_update(learner: RunningServer) -> None:
    words = [sys.executable, "-m", "mlx_tandem", *watching(learner)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("policy@")
        known = len(learner.client.get("/v1/training/history").json()["updates"])
        lines = [process.stdout.readline() for _ in range(known)]
        learn(learner, "Sort down: 7 8 9")
        lines.append(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert (process.wait(30), process.stdout.read(), process.stderr.read()) == (0, "", "")
    numbers = [
        int(re.match(r"step (\d+)   version \d+   published   reward 0\.500   loss ", line)[1]) for line in lines
    ]  # type: ignore[index]
    assert numbers == list(range(1, known + 2)), "each once"


def test_the_status_has_learning_in_the_same_words(learner: RunningServer) -> None:
    lines = tandem("status", "--url", learner.url, "--api-key", KEY).stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("learning  ")]
    assert "policy@" in line and " updates · step " in line
    assert any(line.startswith("guard: ") for line in lines)


def test_metrics_and_samples_are_recorded(learner: RunningServer, metrics: Path) -> None:
    history = learner.client.get("/v1/training/history").json()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    updates = [row for row in rows if row["kind"] == "update"]
    assert [(row["step"], row["loss"]) for row in updates] == [(u["step"], u["loss"]) for u in history["updates"]]
    assert {row["learning_rate"] for row in updates} == {1e-3} and all(row["published"] == 1.0 for row in updates)
    samples = [row for row in rows if row["kind"] == "sample"]
    assert len(samples) == 2 * len(updates)
    assert "Sort down: 0 1 2" in samples[0]["prompt"] and samples[0]["reward"] in (0, 1)
    assert history["samples"][-1]["completion"] == samples[-1]["completion"]


def test_tensorboard_has_the_updates_of_a_server(learner: RunningServer, metrics: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(metrics.parent / "checkpoints" / "tensorboard"))
    found.Reload()
    history = learner.client.get("/v1/training/history").json()
    assert [event.step for event in found.Scalars("update/mean_reward")] == [u["step"] for u in history["updates"]]
    assert found.Tensors("samples")


def test_a_wrong_key_is_one_line(learner: RunningServer) -> None:
    words = ["learn", "watch", "--url", learner.url, "--api-key", "another-key"]
    done = tandem(*words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert re.match(rf"tandem: {re.escape(learner.url)} answered with 401: ", done.stderr)


def test_a_server_that_does_not_learn_is_one_line(server: RunningServer) -> None:
    done = tandem("learn", "watch", "--url", server.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"tandem: {server.url} does not learn: start it with --enable-rl-training\n"


def test_a_restarted_server_has_its_history_and_its_end_ends_the_screen(tmp_path: Path) -> None:
    with serving(learning_config(tmp_path)) as server:
        for i in range(2):
            learn(server, f"Sort down: {i} 1 2")
        before = server.client.get("/v1/training/history").json()["updates"]
    with serving(learning_config(tmp_path)) as server:
        assert server.client.get("/v1/training/history").json()["updates"] == before
        terminal_context = on_terminal("learn", "watch", "--url", server.url, "--interval", "0.1", columns=80, rows=24)
        terminal = terminal_context.__enter__()
        lines = terminal.read_until(lambda lines: any(line.split()[:3] == ["1", "2", "published"] for line in lines))
        drawn = lines[next(i for i, line in enumerate(lines) if line.startswith("mean reward 0.5")) + 6]
        assert drawn.startswith("██ ")
    try:
        lines = terminal.read_to_end()
        assert terminal.process.wait(30) == 1
        assert re.search("tandem: (no server answers|the server closed)", "\n".join(lines))
        assert "Traceback" not in "\n".join(lines)
    finally:
        terminal_context.__exit__(None, None, None)
