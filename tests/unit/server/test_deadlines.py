"""The time limits of a request: which there are, how long they are, and what ends them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from mlx_tandem import demo
from mlx_tandem.config import Config, EngineConfig, ModelConfig, ServerConfig
from mlx_tandem.engine.prompt_cost import prompt_seconds
from mlx_tandem.errors import TandemError
from mlx_tandem.generation.metrics import Metrics
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.server.replies import Reply
from mlx_tandem.types import Delta, MemoryBudget, SamplingParams
from tests.api.scripted import INFO

PROMPTS = [[1] * 40, [2] * 100]
COST = (20_000.0, 50_000.0, 0.0, 0.0)
"""Milliseconds for a chunk, and for 256 tokens of it."""


class Late:
    """A stream that keeps the error which it fails with."""

    def __init__(self) -> None:
        self.error: asyncio.Future[TandemError] = asyncio.get_running_loop().create_future()

    def fail(self, error: TandemError) -> None:
        self.error.set_result(error)


def reply(chunk: int = 0, cost: tuple[float, ...] = (), **server: float) -> Any:
    info = structs.replace(INFO, prompt_cost=cost, memory=MemoryBudget(chunk_tokens=chunk))
    front: Any = SimpleNamespace(
        config=Config(EngineConfig(ModelConfig(str(demo.MODEL_PATH))), ServerConfig(**server)),
        metrics=Metrics(),
        client=SimpleNamespace(check_ready=lambda: info),
        learning=None,
        collecting=None,
        ab_tests=SimpleNamespace(judged=lambda model: None),
    )
    prompted = Prompted(PROMPTS, [None, None], SamplingParams(max_tokens=4))
    plan: Any = SimpleNamespace(renderer=SimpleNamespace(id="the-id"), prompted=prompted, model=None, collect=None)
    return Reply(front, plan)


@pytest.mark.parametrize("chunk", [0, 16])
@pytest.mark.parametrize("cost", [(), COST])
@pytest.mark.parametrize(("first", "whole"), [(0.0, 0.0), (0.0, 50.0), (300.0, 0.0), (300.0, 50.0)])
def test_the_limits_and_their_lengths(first: float, whole: float, cost: tuple[float, ...], chunk: int) -> None:
    """The first token has twice the predicted time of reading all prompts besides its own limit; 0 is no limit."""

    async def run() -> None:
        made = reply(chunk, cost, first_token_timeout_s=first, request_timeout_s=whole)
        now = asyncio.get_running_loop().time()
        made._set_deadlines(Late())
        reading = 2 * sum(prompt_seconds(cost, len(prompt), chunk or len(PROMPTS[0])) for prompt in PROMPTS)
        wanted = {"first_token_timeout": first and first + reading, "request_timeout": whole}
        found = {code: handle.when() - now for code, handle in made._timers.items()}
        assert found == pytest.approx({code: seconds for code, seconds in wanted.items() if seconds}, abs=0.5)
        for handle in made._timers.values():
            handle.cancel()

    asyncio.run(run())


def test_the_first_tokens_end_the_limit_of_the_first_token_alone() -> None:
    async def run() -> None:
        made = reply(first_token_timeout_s=300.0, request_timeout_s=300.0)
        made._set_deadlines(Late())
        first, whole = made._timers["first_token_timeout"], made._timers["request_timeout"]
        for _ in range(2):
            made._count_batch([Delta(0, 0, (1,))])
            assert (first.cancelled(), whole.cancelled()) == (True, False)
        whole.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("server", "code", "says"),
    [
        ({"first_token_timeout_s": 0.001}, "first_token_timeout", "its first token within 0.001 s"),
        ({"first_token_timeout_s": 0.0, "request_timeout_s": 0.002}, "request_timeout", "its end within 0.002 s"),
    ],
)
def test_a_limit_that_has_passed_fails_the_request(server: dict[str, float], code: str, says: str) -> None:
    async def run() -> TandemError:
        late = Late()
        reply(**server)._set_deadlines(late)
        return await late.error

    error = asyncio.run(run())
    assert (error.status, error.code) == (504, code)
    assert error.message == f"the request did not come to {says}"
