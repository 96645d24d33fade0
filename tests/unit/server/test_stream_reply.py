"""Streams that wait for something else than tokens."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_tandem import demo
from mlx_tandem.config import Config, EngineConfig, ModelConfig, ServerConfig
from mlx_tandem.dialects.sse import COMMENT
from mlx_tandem.server.stream_reply import StreamReply


def reply(seconds: float, keepalive: bytes = COMMENT) -> StreamReply:
    config = Config(EngineConfig(ModelConfig(str(demo.MODEL_PATH))), ServerConfig(stream_keepalive_s=seconds))
    front: Any = SimpleNamespace(
        config=config,
        metrics=SimpleNamespace(inter_token=SimpleNamespace(observe=None)),
        ab_tests=SimpleNamespace(judged=lambda model: None),
    )
    renderer = SimpleNamespace(id="the-id", keepalive=keepalive)
    plan: Any = SimpleNamespace(renderer=renderer, prompted=SimpleNamespace(choices=1), model=None, collect=None)
    return StreamReply(front, plan)


async def filled(made: StreamReply, result: int | Exception, enough: int) -> list[bytes]:
    """What is sent until so many pieces have been, after which a score arrives or fails."""
    sent: list[bytes] = []
    done = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message["body"])
        if len(sent) >= enough:
            done.set()

    async def score() -> int:
        await done.wait()
        if isinstance(result, Exception):
            raise result
        return result

    if not enough:
        done.set()
    assert await made._filling(score(), send) == result
    return sent


def test_a_stream_is_kept_alive_while_its_score_is_computed() -> None:
    assert asyncio.run(filled(reply(0.001), 7, 3)) == [COMMENT] * 3
    assert asyncio.run(filled(reply(1000.0), 7, 0)) == []
    assert asyncio.run(filled(reply(0.0), 7, 0)) == []


def test_what_goes_wrong_with_a_score_is_raised_as_it_is() -> None:
    with pytest.raises(ValueError, match="no score"):
        asyncio.run(filled(reply(0.001), ValueError("no score"), 2))


def test_a_score_that_nobody_waits_for_any_more_is_given_up() -> None:
    async def run() -> bool:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def score() -> None:
            try:
                begun.set()
                await asyncio.Event().wait()
            finally:
                ended.set()

        async def send(message: Any) -> None:
            raise AssertionError("it is not silent for long")

        waiting = asyncio.create_task(reply(1000.0)._filling(score(), send))
        await begun.wait()
        waiting.cancel()
        await asyncio.wait({waiting})
        await asyncio.sleep(0)
        return ended.is_set() and waiting.cancelled()

    assert asyncio.run(run())
