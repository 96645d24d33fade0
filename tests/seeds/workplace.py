"""A folder in which the printed commands of four other servers find what they name, and ways to run them there."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from mlx_tandem.server.sockets import unused_port
from tests.commands import curl, running
from tests.fake_hub import Hub

ROOT = Path(__file__).parents[2]
MODELS = [
    "mlx-community/Qwen3.5-9B-MLX-4bit",
    "mlx-community/Qwen3-4B-4bit",
    "mlx-community/Qwen3-0.6B-4bit",
]
PROGRAMS = {
    "python3": [sys.executable],
    "./quick_bench.sh": [str(ROOT / "scripts" / "quick_bench.sh")],
    "./.venv/bin/python": [sys.executable],
    "python": [sys.executable],
    "mola": [sys.executable, "-m", "mola.cli"],
    "mlx_parallm_serve": [
        sys.executable,
        "-c",
        "from mlx_tandem.cli.programs import mlx_parallm_serve as main; main()",
    ],
    "mlx_parallm_train": [
        sys.executable,
        "-c",
        "from mlx_tandem.cli.programs import mlx_parallm_train as main; main()",
    ],
    "./.build/arm64-apple-macosx/release/mlx-server": [
        sys.executable,
        "-c",
        "from mlx_tandem.cli.programs import mlx_server as main; main()",
    ],
    "tandem": [sys.executable, "-m", "mlx_tandem"],
}
SMALL = ["--num-blocks", "512"]
"""Beside every printed command: a pool that suits a test machine."""
SHORT = ["--max-model-len", "240"]
"""Beside those that name no context of their own: a server with a short one starts sooner."""
CONTEXTS = {"--ctx-size", "--max-kv-size"}


@dataclass
class Workplace:
    """A folder in which what the commands name exists, and a hub that has the models."""

    folder: Path
    hub: Hub
    env: dict[str, str] = field(default_factory=dict)

    def words(self, command: str, port: int) -> list[str]:
        first, *rest = shlex.split(command.replace("\\\n", " "))
        rest = [w.replace("8000", str(port)).replace("8080", str(port)) for w in rest]
        return [*PROGRAMS[first], *rest]

    def run(self, command: str, port: int, *more: str, below: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.words(command, port), *more],
            cwd=self.folder / below,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
        )

    def serve(self, command: str, *more: str, log: Path = Path(os.devnull)) -> running:
        port = unused_port()
        words = self.words(command, port)
        given = [] if "--port" in words else ["--port", str(port)]
        given += [] if CONTEXTS & set(words) else SHORT
        return running([*words, *given, *SMALL, *more], port, self.folder, self.env, log)


def ask(command: str, port: int) -> bytes:
    """A printed curl against the server on `port`; whatever it asks for must be answered with success."""
    return curl(shlex.split(command.replace("\\\n", " ")), port)


def events(content: bytes) -> list[dict[str, object]]:
    *data, last = content.decode().strip().split("\n\n")
    assert last == "data: [DONE]"
    return [json.loads(d.removeprefix("data: ")) for d in data]


MOLA_ADAPTERS = """--model mlx-community/Qwen3.5-9B-MLX-4bit \
  --adapter rust ./path/to/rust-adapter \
  --adapter sql ./path/to/sql-adapter """
MOLA_EXPLICIT = f"""./.venv/bin/python -m mola.cli -v serve \
  {MOLA_ADAPTERS} \
  --adapter support ./path/to/support-adapter \
  --max-inflight-tokens 131072 \
  --max-batch-size 128 \
  --prefill-batch-size 32 \
  --enable-routed-decode-reference \
  --strict-routed-decode-reference \
  --routed-decode-backend gather-mm \
  --enable-mixed-decode-migration \
  --prestep-mixed-decode-migration \
  --cache-routed-decode-sessions \
  --detached-shared-decode-owner \
  --port 8000"""
PARALLM_LEARNS = """mlx_parallm_serve \
  --model-path models/Llama-3-8B \
  --enable-rl-training \
  --lora-rank 16 \
  --atropos-url http://localhost:8001 \
  --port 8000"""
PARALLM_FILE = """
server:
  mode: "inference_and_training"
  max_batch_size: 128

model:
  base_model_path: "models/Llama-3-8B"
  lora_rank: 16
  lora_alpha: 32
  lora_target_modules: ["q_proj", "v_proj"]

rl_training:
  enabled: true
  trajectory_buffer_size: 1000
  update_frequency: 100
  scoring_batch_size: 32
  atropos_url: "http://localhost:8001"
  environment: "gsm8k"

checkpointing:
  interval: 500
  keep_n_checkpoints: 10
  checkpoint_dir: "./checkpoints"
"""
MLX_SERVER = "./.build/arm64-apple-macosx/release/mlx-server"
