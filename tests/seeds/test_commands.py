"""The commands that the documents of four other servers print about serving, run as they stand there.

Replaced are the ports, by free ones; the models, which a hub of this machine has under the printed names; the
programs of a build folder or a virtual environment, by those of this environment; and folders of adapters and models,
which are put where the commands look for them. What the requests ask is in our own words.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_tandem.server.sockets import unused_port
from tests.commands import curl, running
from tests.machines import KEY, Machine, closing
from tests.seeds.workplace import (
    MLX_SERVER,
    MODELS,
    MOLA_ADAPTERS,
    MOLA_EXPLICIT,
    PARALLM_FILE,
    PARALLM_LEARNS,
    SHORT,
    SMALL,
    Workplace,
    ask,
    events,
)
from tests.waiting import until

pytestmark = pytest.mark.programs

CHAT = """curl http://localhost:8000/v1/chat/completions \
  -H "Content-Type: application/json" \
  -d '%s'"""


# --- MOLA --------------------------------------------------------------------------------------------------------

MOLA_BENCH = """./.venv/bin/python scripts/bench_server.py \
  --routed-validation \
  --concurrency 1,16,64 \
  --repeats 3 \
  --json-out ./mola-bench.json"""
MOLA_RUNNER = "./.venv/bin/python devtools/run_mola_current_architecture.py"


def test_mola(workplace: Workplace) -> None:
    with workplace.serve(MOLA_EXPLICIT) as server:
        port = server.port
        body = {"model": "rust", "messages": [{"role": "user", "content": "What is 12 + 5?"}], "stream": True}
        streamed = events(ask(CHAT % json.dumps(body), port))
        assert {e["model"] for e in streamed} == {"rust@1"}
        names = {a["name"] for a in json.loads(ask("curl http://localhost:8000/v1/adapters", port))["adapters"]}
        assert {"rust", "sql", "support"} <= names
        load = """curl -X POST http://localhost:8000/v1/adapters \
          -H "Content-Type: application/json" \
          -d '{"name": "medical", "path": "./path/to/medical-adapter"}'"""
        assert json.loads(ask(load, port))["id"] == "medical@1"
        for route in ("/v1/models", "/v1/engine/metrics", "/health"):
            assert json.loads(ask(f"curl http://localhost:8000{route}", port))
        assert json.loads(ask("curl -X DELETE http://localhost:8000/v1/adapters/medical", port))
        with pytest.raises(OSError, match="404"):
            ask(CHAT % json.dumps(body | {"model": "nobody"}), port)
        short = [*("--num-requests", "2", "--max-tokens", "4", "--prompt-tokens", "8", "--adapters", "rust,sql")]
        bench = MOLA_BENCH.replace("1,16,64", "1,2").replace("--repeats 3", "--repeats 1")
        done = workplace.run(bench, port, *short, "--url", f"http://127.0.0.1:{port}")
        assert done.returncode == 0, done.stderr
        for shown in ("same", "mixed", "skew", "long-decode-mixed", "change", "p95"):
            assert shown in done.stdout
        assert "asked again: 20 of 20, 0 different" in done.stderr
        result = json.loads((workplace.folder / "mola-bench.json").read_text())
        assert result["machine"]
        assert result["validation"]["checked"] == 20


def test_the_step_of_mola_s_installation_says_that_nothing_is_needed(workplace: Workplace) -> None:
    done = workplace.run("./.venv/bin/python devtools/apply_mlx_lm_detached_batch_api.py", 0)
    assert (done.returncode, done.stdout[:13]) == (0, "nothing to do")


def test_mola_in_the_background(workplace: Workplace) -> None:
    port = unused_port()
    start = workplace.run(f"{MOLA_RUNNER} start {MOLA_ADAPTERS} --port 8000", port, *SMALL, *SHORT)
    assert start.returncode == 0, start.stderr
    try:
        models = {m["id"] for m in json.loads(ask("curl http://localhost:8000/v1/models", port))["data"]}
        assert {"rust", "sql", MODELS[0]} <= models
        restart = workplace.run(f"{MOLA_RUNNER} restart --port 8000", port)
        assert restart.returncode == 0, restart.stderr
        assert json.loads(ask("curl http://localhost:8000/health", port))["status"] == "ok"
    finally:
        assert workplace.run(f"{MOLA_RUNNER} stop --port 8000", port).returncode == 0
    with pytest.raises(OSError):
        ask("curl http://localhost:8000/health", port)


# --- MLX ParaLLM -------------------------------------------------------------------------------------------------


def test_parallm_serves(workplace: Workplace) -> None:
    with workplace.serve("mlx_parallm_serve --mode inference --share-model --model-path models/Llama-3-8B") as server:
        body = {"model": "base-model", "prompt": "Once there was", "max_tokens": 4}
        words = ["curl", "http://localhost:8000/v1/completions", "-H", "Content-Type: application/json"]
        assert json.loads(curl([*words, "-d", json.dumps(body)], server.port))["choices"]
        for later in ({"collect_trajectory": True}, {"scoring_function": "gsm8k"}, {"lora_adapter": "checkpoint-500"}):
            with pytest.raises(OSError, match=r"40[04]"):
                curl([*words, "-d", json.dumps(body | later)], server.port)


@pytest.mark.parametrize("command", [PARALLM_LEARNS, "mlx_parallm_serve --config parallm.yaml"])
def test_parallm_learns_while_serving(workplace: Workplace, command: str) -> None:
    shutil.rmtree(workplace.folder / "checkpoints", ignore_errors=True)
    (workplace.folder / "parallm.yaml").write_text(PARALLM_FILE)
    with workplace.serve(command) as server:
        port = server.port
        post = """curl http://localhost:8000/v1/%s -H "Content-Type: application/json" -d '%s'"""
        body = {
            "model": "base-model",
            "prompt": "What is 12 + 5?",
            "max_tokens": 4,
            "collect_trajectory": True,
            "scoring_function": "gsm8k",
            "metadata": {"environment": "math", "difficulty": "hard", "answer": "17"},
        }
        assert json.loads(ask(post % ("completions", json.dumps(body)), port))["choices"]
        named = json.dumps({"name": "checkpoint-300"})
        ask(post % ("training/checkpoint", named), port)
        status = json.loads(ask("curl http://localhost:8000/v1/training/status", port))
        assert status["training_enabled"]
        assert status["trajectories_collected"] >= 1  # siblings of the answer are drawn in the background
        assert "checkpoint-300" in status["available_checkpoints"]
        assert (workplace.folder / "checkpoints" / "checkpoint-300").is_dir()
        assert json.loads(ask("curl http://localhost:8000/debug/training", port))
        assert json.loads(ask("curl -X POST http://localhost:8000/training/checkpoint", port))
        switch = """curl -X POST http://localhost:8000/model/switch-lora -d '{"version": "checkpoint-300"}'"""
        assert json.loads(ask(switch, port))
        metrics = ask("curl http://localhost:8000/metrics", port).decode()
        for name in ("rl_trajectories_collected", "rl_training_loss", "rl_updates_per_second", "lora_swaps_total"):
            assert f"\nmlx_parallm_{name}" in metrics
        assert "\nmlx_parallm_checkpoint_saves_total" in metrics
        back = workplace.run("tandem checkpoints rollback checkpoint-300 --yes --url http://127.0.0.1:8000", port)
        assert (back.returncode, back.stdout[:7]) == (0, "back at"), back.stderr


@pytest.mark.timeout(300)
def test_parallm_on_several_machines(workplace: Workplace, tmp_path: Path) -> None:
    """The three commands as they are printed, with address and key from the environment."""
    env = workplace.env | {"TANDEM_HOST": "127.0.0.1", "TANDEM_API_KEY": KEY}

    def machine(command: str, leader: int) -> Machine:
        words = workplace.words(command.replace("node1:8000", f"127.0.0.1:{leader}"), leader)
        return Machine(tmp_path / f"node{len(list(tmp_path.iterdir())) + 1}", words, env)

    leader = machine("mlx_parallm_serve --mode inference --share-model", 0)
    trainer = machine("mlx_parallm_train --mode rl --connect-to node1:8000", leader.port)
    follower = machine("mlx_parallm_serve --mode inference --connect-to node1:8000", leader.port)
    with closing(leader, trainer, follower):
        for each in (leader, trainer, follower):
            each.start()
        assert "machines  leads" in leader.log and "--share-model reaches this machine only" in leader.log
        version = trainer.learn("17")
        until(lambda: follower.version() == version)
        answers = [each.answer() for each in (leader, trainer, follower)]
        assert [answer["model"] for answer in answers] == [f"policy@{version}"] * 3
        assert answers[0]["choices"] == answers[1]["choices"] == answers[2]["choices"]
        assert follower.answer("base-model")["choices"]
        kept = follower.collect("What is 12 + 5?")
        until(lambda: trainer.status()["trajectories"] == len(kept))
    without = {name: value for name, value in env.items() if name != "TANDEM_API_KEY"} | {"TANDEM_HOST": "0.0.0.0"}
    words = workplace.words("mlx_parallm_serve --mode inference --share-model", 0)
    done = subprocess.run(words, cwd=tmp_path, env=without, capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert "0.0.0.0 can be reached from other machines" in line
    assert "export TANDEM_API_KEY=$(openssl rand -hex 24)" in line


# --- mlx-lm-server -----------------------------------------------------------------------------------------------

LM_SERVER_DEFAULTS = """python -m mlx_lm_server --model mlx-community/Qwen3-4B-4bit \
  --adapter-path ./path/to/rust-adapter --host 127.0.0.1 --port 8000 --api-key secret --max-request-bytes 1048576 \
  --block-size 16 --num-blocks 2048 --kv-bits 8 --kv-group-size 64 --max-kv-size 1000 --sequence-cache-size 50 \
  --ssd-cache-dir ./kv --no-ssd --ssd-ttl-days 7 --ssd-policy evict_only --ssd-durability best_effort \
  --ssd-async-writes --no-ssd-async-writes --ssd-writer-queue-size 512 --ssd-persistent-max-retries 3 \
  --ssd-flush-interval-s 1.0 --ssd-max-size-gb 50.0 --max-batch-size 8 --prefill-batch-size 4 --max-queue-size 128 \
  --completion-batch-size 32 --default-max-tokens 12 --max-prompt-tokens 256 --max-generation-tokens 512 \
  --request-timeout-s 120.0 --first-token-timeout-s 300.0 --max-concurrent-requests 64 \
  --memory-pressure-threshold 0.9 --spec-decode none --num-speculative-tokens 5 --spec-decode-disable-batch-size 8 \
  --ngram-max 4 --ngram-min 1 --no-ngram-prompt-lookup --draft-model-path ./draft --draft-model-quantize 4 \
  --draft-context-len 128 --no-spec-decode-dynamic --spec-decode-acceptance-threshold 0.3 --no-adaptive-k \
  --distributed-mode off --distributed-sharding tensor --distributed-strict --no-distributed-strict \
  --distributed-hostfile hosts --distributed-ibv-devices devices --distributed-jaccl-coordinator 192.168.1.1:29500 \
  --num-local-ranks 1"""


def test_every_flag_of_mlx_lm_server_at_once(workplace: Workplace) -> None:
    with workplace.serve(LM_SERVER_DEFAULTS) as server:
        port = server.port
        with pytest.raises(OSError, match="401"):
            ask("curl http://localhost:8000/v1/models", port)
        body = {
            "model": "mlx-community/Qwen3-4B-4bit",
            "messages": [
                {"role": "system", "content": "You are a calculator."},
                {"role": "user", "content": "What is 12 + 5?"},
            ],
            "max_tokens": 256,
            "temperature": 0.7,
        }
        chat = """curl http://localhost:8000/v1/chat/completions \
          -H "Content-Type: application/json" -H "Authorization: Bearer secret" -d '%s'"""
        reply = json.loads(ask(chat % json.dumps(body), port))
        assert (reply["object"], reply["model"]) == ("chat.completion", "default@1")
        assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] + reply["usage"]["completion_tokens"]
        assert reply["choices"][0]["message"]["content"].endswith("!")  # the adapter's way
        del body["model"], body["max_tokens"]
        assert json.loads(ask(chat % json.dumps(body), port))["usage"]["completion_tokens"] <= 12
        for over in ({"max_tokens": 513}, {"messages": [{"role": "user", "content": "word " * 300}]}):
            with pytest.raises(OSError, match="400"):
                ask(chat % json.dumps(body | over), port)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--spec-decode ngram --num-speculative-tokens 5",
        "--spec-decode draft --draft-model-path mlx-community/Qwen3-0.6B-4bit --num-speculative-tokens 5",
    ],
)
def test_mlx_lm_server(workplace: Workplace, options: str) -> None:
    with workplace.serve(f"python -m mlx_lm_server --model mlx-community/Qwen3-4B-4bit {options}") as server:
        port = server.port
        body: dict[str, object] = {"messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 20}
        assert json.loads(ask(CHAT % json.dumps(body), port))["choices"][0]["message"]["role"] == "assistant"
        if options:
            return
        first, *rest = events(ask(CHAT % json.dumps(body | {"stream": True}), port))
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}  # type: ignore[index]
        assert rest[-1]["choices"][0]["finish_reason"] in ("stop", "length")  # type: ignore[index]
        text = """curl http://localhost:8000/v1/completions \
          -H "Content-Type: application/json" \
          -d '{"prompt": "The capital of Peru is", "max_tokens": 20, "temperature": 0.0}'"""
        assert json.loads(ask(text, port))["object"] == "text_completion"
        assert json.loads(ask("curl http://localhost:8000/health", port))["status"] == "ok"
        for probe in ("livez", "readyz"):
            assert json.loads(ask(f"curl http://localhost:8000/{probe}", port))["status"] == "ok"
        metrics = ask("curl http://localhost:8000/metrics", port).decode()
        for name in ("active_sequences", "queued_requests", "used_blocks", "free_blocks", "cache_hit_rate"):
            assert f"\n{name} " in metrics
        assert "\ndist_fatal 0.0" in metrics and "\nshutdown_clean 1.0" in metrics


def test_two_ranks_of_mlx_lm_server(workplace: Workplace) -> None:
    line = "python -m mlx_lm_server --model mlx-community/Qwen3-4B-4bit --distributed-mode ring --num-local-ranks 2"
    with workplace.serve(line) as server:
        body: dict[str, object] = {"messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 20}
        reply = json.loads(ask(CHAT % json.dumps(body), server.port))
        assert reply["choices"][0]["message"]["role"] == "assistant"
        assert "\ndist_fatal 0.0" in ask("curl http://localhost:8000/metrics", server.port).decode()


def test_what_jaccl_needs_is_said(workplace: Workplace) -> None:
    """The seed's command names a device where MLX wants a file of devices, and no machines."""
    options = "--distributed-mode jaccl --distributed-ibv-devices /dev/infiniband/rdma_cm "
    options += "--distributed-jaccl-coordinator 192.168.1.1:29500"
    done = workplace.run(f"python -m mlx_lm_server --model mlx-community/Qwen3-4B-4bit {options}", unused_port())
    assert done.returncode != 0 and "--distributed-hostfile" in done.stderr and "mlx.launch" in done.stderr


# --- Jan's MLX Server --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        '--model "path/to/model" --port 8080',
        '--model "mlx-community/Qwen3-0.6B-4bit" --port 8080',
        '--model "path/to/model" --port 8080 --max-batch-size 8 --enable-continuous-batching',
        '-m "path/to/model" --port 8080 --ctx-size 4096 --api-key "" --max-batch-size 0 --batch-timeout-ms 100 '
        "--kv-block-size 16 --enable-prefix-caching",
    ],
)
def test_jans_server(workplace: Workplace, options: str) -> None:
    with workplace.serve(f"{MLX_SERVER} {options}") as server:
        port = server.port
        body: dict[str, object] = {
            "model": "model",
            "messages": [
                {"role": "system", "content": "You are a calculator."},
                {"role": "user", "content": "What is 12 + 5?"},
            ],
            "temperature": 0.7,
            "max_tokens": 20,
        }
        chat = CHAT.replace("curl", "curl -X POST").replace("8000", "8080")
        assert json.loads(ask(chat % json.dumps(body), port))["choices"]
        assert events(ask(chat % json.dumps(body | {"stream": True}), port))
        assert json.loads(ask("curl http://localhost:8080/v1/models", port))["data"]
        health = json.loads(ask("curl http://localhost:8080/health", port))
        assert health["status"] == "ok"
        if "--ctx-size" in options:
            assert (health["engine"]["max_num_seqs"], health["engine"]["block_size"]) == (1, 16)
        assert ask("curl http://localhost:8080/metrics", port)


@pytest.fixture(scope="module")
def jans_server(workplace: Workplace) -> Iterator[running]:
    with workplace.serve(f'{MLX_SERVER} --model "path/to/model" --port 8080') as server:
        yield server


def test_jans_benchmarks(workplace: Workplace, jans_server: running) -> None:
    short = ("--num-requests", "1", "--prompt-tokens", "8", "--url", f"http://127.0.0.1:{jans_server.port}")
    done = workplace.run("python3 performance_bench.py", 0, *short, "--repeats", "1", below="scripts")
    assert done.returncode == 0, done.stderr
    for shown in ("temp=0.7, 50 tokens", "temp=0.7, 100 tokens", "temp=0.1, 50 tokens", "tok/s"):
        assert shown in done.stdout
    nobody = f"127.0.0.1:{unused_port()}"
    done = workplace.run("python3 simple_bench.py", 0, "--url", f"http://{nobody}", below="scripts")
    assert (done.returncode, done.stderr) == (1, f"tandem: no server answers at {nobody}: Connection refused (--url)\n")


def test_jans_quick_benchmark(workplace: Workplace, jans_server: running) -> None:
    done = workplace.run("./quick_bench.sh 8080 2 4", jans_server.port)
    assert done.returncode == 0, done.stderr
    assert "4 tokens each" in done.stdout


def test_the_programs_are_installed() -> None:
    names = {"tandem", "mola", "mlx_parallm_serve", "mlx_parallm_train", "mlx-server"}
    folder = Path(sys.executable).parent
    assert {n for n in names if not os.access(folder / n, os.X_OK)} == set()
