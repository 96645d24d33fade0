"""MLX ParaLLM's server and learning loop in one Python object."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
from mlx_tandem import demo
from mlx_tandem.cli.hub import HubError
from mlx_tandem.cli.settings import SettingsError
from mlx_tandem.errors import TandemError

COLLECTED = {
    "model": "base-model",
    "prompt": "What is 12 + 5?",
    "max_tokens": 4,
    "collect_trajectory": True,
    "scoring_function": "gsm8k",
    "metadata": {"answer": "17"},
}


def server(folder: Path, **learning: Any) -> RLIntegratedServer:
    return RLIntegratedServer(
        base_model=str(demo.MODEL_PATH),
        lora_config=LoRAConfig(rank=4, alpha=8, target_modules=("q_proj", "v_proj")),
        rl_config=RLConfig(learning_rate=2e-3, batch_size=2, checkpoint_dir=str(folder / "checkpoints"), **learning),
    )


def test_it_serves_and_learns_on_the_caller_s_loop(tmp_path: Path) -> None:
    made = server(tmp_path, algorithm="grpo")

    async def main() -> None:
        inference = asyncio.create_task(made.run_inference(port=0))
        port = await made.ready()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

            async def status() -> dict[str, Any]:
                found: dict[str, Any] = (await client.get("/v1/training/status")).json()
                return found

            assert not (await status())["running"]
            training = asyncio.create_task(made.run_training_loop())
            assert (await client.post("/v1/completions", json=COLLECTED)).is_success
            now = await status()
            assert (now["training_enabled"], now["running"]) == (True, True)
            assert now["trajectories_collected"] >= 1
            debug = (await client.get("/debug/training")).json()["config"]["rl_training"]
            settings = {"lora_rank": 4, "lora_alpha": 8.0, "lora_target_modules": ["q_proj", "v_proj"]}
            settings |= {"algorithm": "grpo", "learning_rate": 2e-3, "update_frequency": 2}
            assert {name: debug[name] for name in settings} == settings
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
            assert not (await status())["running"]
            training = asyncio.create_task(made.run_training_loop())
            await asyncio.sleep(0)
            made.stop()
            await asyncio.gather(inference, training)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_what_cannot_run_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="algorithm"):
        server(tmp_path, algorithm="ppx")
    with pytest.raises(HubError, match="no model folder"):
        RLIntegratedServer(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text("{}")
    made = RLIntegratedServer(str(tmp_path))

    async def main() -> None:
        with pytest.raises(TandemError):
            await made.run_inference(port=0)
        with pytest.raises(TandemError, match="ended before it was ready"):
            await made.ready()

    asyncio.run(asyncio.wait_for(main(), 120))
