"""Recipes of Tinker's cookbook, unmodified, where it is installed: it needs an environment of its own.

`pip install 'tinker-cookbook[math-rl]'` brings torch. The variable TINKER_COOKBOOK_PYTHON names the Python of that
environment.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec import structs

from mlx_tandem.config import ServerConfig
from tests.clients import cookbook
from tests.fake_hub import fake_hub
from tests.serving import serving
from tests.tinker_server import tinker_config

PYTHON = os.environ.get("TINKER_COOKBOOK_PYTHON", "")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not PYTHON, reason="TINKER_COOKBOOK_PYTHON is not set")
def test_its_loops_run_and_go_on_from_each_other(tmp_path: Path) -> None:
    config = tinker_config(tmp_path, trainers=1, rank=8)
    named = structs.replace(config, server=ServerConfig(port=0, served_model_names=(cookbook.MODEL,)))
    same = {"batch_size": 4, "lora_rank": 8, "save_every": 4}
    with fake_hub(cookbook.data_sets(tmp_path / "data", 32, 40)) as hub, serving(named) as server:
        told = same | {"learning_rate": 3e-3, "train_on_what": "last_assistant_message"}
        taught = cookbook.run("sl_loop", PYTHON, hub, server.url, tmp_path, told)
        assert len(taught) == 8 and taught[-1]["train_mean_nll"] < 0.5 * taught[0]["train_mean_nll"]
        told = same | {"group_size": 4, "max_tokens": 12, "loss_fn": "importance_sampling"}
        rewarded = cookbook.run("rl_loop", PYTHON, hub, server.url, tmp_path, told)
        assert [line["step"] for line in rewarded] == [8, 9]
        assert all(0 <= line["reward/total"] <= 1 for line in rewarded)
    assert "/datasets/openai/gsm8k/resolve/main/README.md" in hub.asked
    assert len(list((tmp_path / "tinker").glob("*/sampler_weights/final"))) == 2
