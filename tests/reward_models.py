"""Reward models for tests: adapters of the built-in model with a score head, whose weights are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mlx_tandem import demo
from mlx_tandem.adapters.convert import to_peft

HEAD = "base_model.model.score.weight"


def hidden_size() -> int:
    """Return the numbers of a hidden state of the built-in model."""
    found: int = json.loads((demo.MODEL_PATH / "config.json").read_text())["hidden_size"]
    return found


def make(folder: Path, seed: int = 0, head: Any = None, **changes: Any) -> Path:
    """Write a reward model of rank 2. `head` [1, hidden] takes the place of a drawn one; `changes` are of its
    configuration."""
    g, size = np.random.default_rng(seed), hidden_size()
    pairs = {
        f"model.layers.{i}.self_attn.q_proj": tuple(
            (0.05 * g.standard_normal(shape)).astype(np.float32) for shape in ((size, 2), (2, size))
        )
        for i in range(2)
    }
    drawn = g.standard_normal(size).astype(np.float32)
    config, tensors = to_peft(pairs, 2, 4.0, score_head=drawn)  # type: ignore[arg-type]
    if head is not None:
        tensors[HEAD] = head
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
