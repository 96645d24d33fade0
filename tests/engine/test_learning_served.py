"""The engine's own process learns while it serves: the words of learning from the client to the device and back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlx_tandem.config import DutyConfig, EngineConfig, ModelConfig
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.client.process import process_launch
from mlx_tandem.engine.learning import AdamParams, Batch, Datum, LossConfig, TrainerSpec
from mlx_tandem.errors import Conflict, InvalidRequest
from mlx_tandem.types import AdapterRef, Delta, Request, SamplingParams
from tests import tiny_models

SPEC = TrainerSpec("t", 8, 16.0, targets=("q_proj", "v_proj"))
DATA = tuple(Datum(tuple(range(3, 40)), 7, (1.0,) * 30, (-4.0,) * 30) for _ in range(8))


def config(folder: Path, mode: str = "inference_and_training") -> EngineConfig:
    model = ModelConfig(path=str(tiny_models.make(folder / "model", "qwen3")))
    return EngineConfig(model=model, duty=DutyConfig(mode=mode))  # type: ignore[arg-type]


async def started(config: EngineConfig) -> EngineClient:
    client = EngineClient(process_launch(config))
    await client.start()
    await client.wait_ready()
    return client


async def deltas(client: EngineClient, request: Request) -> list[Delta]:
    return [d async for found in client.submit(request) for d in found]


async def learn(client: EngineClient) -> str:
    """One update; the digest of what came of it."""
    (result,) = await client.run_pass([Batch("t", DATA, LossConfig(normalize="token_mean"))])
    assert [len(x) for x in result.logprobs] == [30] * 8
    assert (await client.step_trainer("t", AdamParams(1e-2))).finite
    await client.settle_trainer("t", keep=True)
    return (await client.publish_trainer("t")).digest


def test_versions_are_published_followed_and_saved_while_a_request_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = await started(config(tmp_path))
        try:
            assert (await client.open_trainer(SPEC)).step == 0
            first = AdapterRef("policy", 1, (await client.publish_trainer("t")).digest)
            params = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True, logprobs=0)
            following, pinned = (
                Request(client.next_ids(1)[0], (5, 6, 7), params, first, follow=f) for f in (True, False)
            )
            before = await deltas(client, pinned)
            running = asyncio.create_task(deltas(client, following))
            second = AdapterRef("policy", 2, await learn(client))
            client.follow_adapter(second)
            assert second.digest != first.digest
            (tmp_path / "saved").mkdir()
            await client.save_trainer("t", str(tmp_path / "saved"))
            said = await running
            assert len(said) == 150
            assert [d.version for d in said] == sorted(d.version for d in said)
            assert {d.version for d in said} <= {1, 2}
            again = Request(client.next_ids(1)[0], (5, 6, 7), params, first)
            assert [d.tokens for d in await deltas(client, again)] == [d.tokens for d in before]
            await client.unload_adapter(first.digest)
            with pytest.raises(InvalidRequest):
                await deltas(client, Request(client.next_ids(1)[0], (5, 6, 7), params, first))
            assert (await client.open_trainer(SPEC, folder=str(tmp_path / "saved"))).step == 1
            assert (await client.publish_trainer("t")).digest == second.digest
        finally:
            await client.close()

    asyncio.run(scenario())


def test_an_engine_that_only_serves_trains_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = await started(config(tmp_path, "inference_only"))
        try:
            await client.open_trainer(SPEC)
            with pytest.raises(Conflict):
                await learn(client)
        finally:
            await client.close()

    asyncio.run(scenario())
