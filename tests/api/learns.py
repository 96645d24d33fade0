"""Servers that learn, for tests of what they say over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import structs

from mlx_tandem.config import CheckpointingConfig, Config, DutyConfig, Mode, RLTrainingConfig
from tests.serving import RunningServer, demo_config

SORT = "Sort down: 3 1 2"


def learning_config(folder: Path, mode: Mode = "inference_and_training", **settings: Any) -> Config:
    """The demo server; it trains `policy` on the middle layers' projections, and only when it is told to."""
    config = demo_config()
    training = RLTrainingConfig(
        enabled=True,
        lora_rank=4,
        lora_alpha=8.0,
        **({"learning_rate": 1e-3, "update_frequency": 1000, "guard_prompts": 0, "siblings": 0} | settings),
    )
    return structs.replace(
        config,
        engine=structs.replace(config.engine, duty=DutyConfig(mode=mode)),
        rl_training=training,
        checkpointing=CheckpointingConfig(checkpoint_dir=str(folder / "checkpoints")),
    )


def collect(server: RunningServer, prompt: object = SORT, **fields: object) -> list[dict[str, Any]]:
    """The choices of a completion that is collected."""
    asked = {
        "model": "policy",
        "n": 4,
        "max_tokens": 8,
        "seed": 1,
        "collect_trajectory": True,
        "scoring_function": "contains",
        "metadata": {"answer": ["3", "e", "a", "1"]},
    }
    reply = server.complete(prompt, **asked | fields)
    assert reply.status_code == 200, reply.text
    choices: list[dict[str, Any]] = reply.json()["choices"]
    return choices


def trajectories(count: int = 4, text: str = SORT) -> list[dict[str, Any]]:
    """Of one prompt, made elsewhere, every other one good."""
    return [{"prompt": text, "completion": f" {i} 2 1", "reward": i % 2} for i in range(count)]
