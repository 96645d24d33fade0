"""An engine that is unloaded while nobody uses it, and woken by the next request, over scripted engines."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from mlx_tandem.dialects.idling import keep_alive_seconds
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.client.supervisor import MAX_DEATHS
from mlx_tandem.engine.messages import (
    Accepted,
    AdapterLoaded,
    Cancel,
    Drain,
    Fatal,
    Heartbeat,
    Inbound,
    LoadAdapter,
    Output,
    Submit,
)
from mlx_tandem.errors import EngineError, EngineUnavailable, InvalidRequest
from mlx_tandem.types import AdapterSource, Delta, DiskStats, EngineStats, Request, SamplingParams, SpeculationStats
from tests.api.scripted import ADAPTER, Peer, ScriptedEngine, scripted_server
from tests.waiting import until

Body = Callable[[EngineClient, ScriptedEngine], Awaitable[None]]


def run(body: Body) -> None:
    """Run `body` with a client whose engine was unloaded and has ended."""

    async def main() -> None:
        with ScriptedEngine() as engine:
            client = EngineClient(engine.launch, backoff_seconds=0.0)
            await client.start()
            peer = (await asyncio.to_thread(engine.peer)).ready()
            await client.wait_ready()
            try:
                async with asyncio.timeout(15):
                    peer.say(Heartbeat(EngineStats(steps=7, active_memory=100)))
                    await client.refresh()
                    assert client.unload()
                    await asyncio.to_thread(peer.hear, Drain)
                    peer.die()
                    while client.has_engine:
                        await asyncio.sleep(0.01)
                    await body(client, engine)
            finally:
                await client.close()

    asyncio.run(main())


def request(client: EngineClient) -> Request:
    return Request(client.next_ids(1)[0], (1, 2), SamplingParams(max_tokens=4))


async def woken(engine: ScriptedEngine) -> Peer:
    """Return the engine that is launched next."""
    return await asyncio.to_thread(engine.peer)


async def answered(client: EngineClient, engine: ScriptedEngine) -> None:
    """Send a request to a sleeping engine and see it answered."""
    r = request(client)
    async with client.submit(r) as stream:
        peer = (await woken(engine)).ready()
        assert (await asyncio.to_thread(peer.hear, Submit)).request == r
        peer.say(Output([Delta(r.id, 0, (5,), None, "stop")]))
        assert [d.tokens for d in await anext(stream)] == [(5,)]
    assert client.state == "ready"


def test_a_request_wakes_the_engine_and_is_sent_when_it_is_ready() -> None:
    async def body(client: EngineClient, engine: ScriptedEngine) -> None:
        assert (client.state, client.restarts, client.unloads) == ("idle", 0, 1)
        assert client.check_ready() is client.info, "what is known of the model is known still"
        await client.refresh()
        assert (client.stats.steps, client.stats.active_memory) == (7, 0)
        assert engine.launches == 1, "nobody has needed it"
        await answered(client, engine)
        assert (client.restarts, client.unloads, engine.launches) == (0, 1, 2)

    run(body)


def test_counters_go_on_where_those_of_the_last_engine_ended() -> None:
    async def main() -> None:
        disk = DiskStats(1, 1, 1, 0, 2, 0, 3, 30, 0, 0, 0, 0, 5, 0.5, False, False, "")
        drafts = SpeculationStats("ngram", rows=2, drafted=4, accepted=3, by_position=(2, 1))
        before = EngineStats(steps=7, step_tokens=(1, 2), rows=9, disk=disk, speculation=drafts, step_ms=3.0)
        with ScriptedEngine() as engine:
            client = EngineClient(engine.launch)
            await client.start()
            peer = (await asyncio.to_thread(engine.peer)).ready()
            await client.wait_ready()
            peer.say(Heartbeat(before))
            await client.refresh()
            assert client.unload()
            peer.die()
            waking = asyncio.create_task(client.load_adapter(AdapterSource("/a")))
            second = (await woken(engine)).ready()
            second.say(Heartbeat(EngineStats(steps=1, step_tokens=(0, 1, 1), disk=disk, speculation=drafts)))
            call = await asyncio.to_thread(second.hear, LoadAdapter)
            second.say(AdapterLoaded(call.call, ADAPTER))
            assert await waking == ADAPTER
            stats = client.stats
            assert (stats.steps, stats.step_tokens, stats.rows, stats.step_ms) == (8, (1, 3, 1), 9, 0.0)
            assert stats.disk is not None and stats.speculation is not None
            assert (stats.disk.bytes, stats.disk.hits, stats.disk.reload_seconds) == (1, 4, 1.0)
            assert (stats.speculation.drafted, stats.speculation.by_position) == (8, (4, 2))
            await client.close()

    asyncio.run(main())


def test_an_engine_that_is_used_is_not_unloaded() -> None:
    """A request that runs, an adapter that is being loaded, and whoever has said so keep it."""

    async def main() -> None:
        with ScriptedEngine() as engine:
            client = EngineClient(engine.launch)
            await client.start()
            peer = (await asyncio.to_thread(engine.peer)).ready()
            assert not client.unload(), "it has not started"
            await client.wait_ready()
            r = request(client)
            async with client.submit(r):
                assert (client.unload(), client.unused_seconds) == (False, 0.0)
            peer.hear(Submit)
            peer.hear(Cancel)
            loading = asyncio.create_task(client.load_adapter(AdapterSource("/a")))
            call = await asyncio.to_thread(peer.hear, LoadAdapter)
            assert (client.unload(), client.unused_seconds) == (False, 0.0)
            peer.say(AdapterLoaded(call.call, ADAPTER))
            assert await loading == ADAPTER
            async with client.in_use():
                assert not client.unload()
            peer.is_silent = True
            reporting = asyncio.create_task(client.refresh())
            await asyncio.sleep(0)
            before = client.unused_seconds
            assert before > 0.0, "whoever reads counters does not use it"
            assert client.unload()
            peer.hear(Drain)
            peer.die()
            await reporting
            await client.close()

    asyncio.run(main())


def test_a_request_at_the_very_moment_of_unloading_is_answered_by_the_next_engine() -> None:
    async def main() -> None:
        with ScriptedEngine() as engine:
            client = EngineClient(engine.launch)
            await client.start()
            first = (await asyncio.to_thread(engine.peer)).ready()
            await client.wait_ready()
            assert client.unload()
            r = request(client)
            async with client.submit(r) as stream:
                await asyncio.to_thread(first.hear, Drain)
                first.die()
                second = (await woken(engine)).ready()
                assert (await asyncio.to_thread(second.hear, Submit)).request == r
                second.say(Accepted(r.id), Output([Delta(r.id, 0, (5,), None, "stop")]))
                assert [d.tokens for d in await anext(stream)] == [(5,)]
            await client.close()

    asyncio.run(main())


def test_an_engine_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_tandem.engine.client.supervisor.UNLOAD_SECONDS", 0.05)

    async def main() -> None:
        with ScriptedEngine() as engine:
            client = EngineClient(engine.launch)
            await client.start()
            peer = (await asyncio.to_thread(engine.peer)).ready()
            await client.wait_ready()
            assert client.unload()
            assert await asyncio.to_thread(peer.killed.wait, 15)
            await answered(client, engine)
            await client.close()

    asyncio.run(main())


def test_a_client_that_leaves_before_the_engine_is_awake_is_not_sent() -> None:
    async def body(client: EngineClient, engine: ScriptedEngine) -> None:
        async with client.submit(request(client)):
            peer = await woken(engine)
        assert not client.open_requests
        r = request(client)
        async with client.submit(r):
            peer.ready()
            assert (await asyncio.to_thread(peer.hear, Submit)).request == r

    run(body)


def test_a_stop_during_waking_ends_what_waits() -> None:
    async def body(client: EngineClient, engine: ScriptedEngine) -> None:
        stream = client.submit(request(client))
        loading = asyncio.create_task(client.load_adapter(AdapterSource("/a")))
        peer = await woken(engine)
        client.begin_drain()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await anext(stream)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await loading
        peer.die()
        assert await client.drain(5.0)

    run(body)


def test_a_stop_while_it_is_idle() -> None:
    async def body(client: EngineClient, engine: ScriptedEngine) -> None:
        assert await client.drain(1.0)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            client.submit(request(client))

    run(body)


def test_an_engine_that_dies_while_it_wakes_up_is_launched_again() -> None:
    async def body(client: EngineClient, engine: ScriptedEngine) -> None:
        r = request(client)
        async with client.submit(r) as stream:
            (await woken(engine)).die()
            peer = (await woken(engine)).ready()
            assert (await asyncio.to_thread(peer.hear, Submit)).request == r
            peer.say(Output([Delta(r.id, 0, (5,), None, "stop")]))
            assert [d.tokens for d in await anext(stream)] == [(5,)]
        assert (client.state, client.unloads) == ("ready", 1)

    run(body)


@pytest.mark.parametrize("says", ["", "the model folder is gone"])
def test_an_engine_that_cannot_be_woken_fails_what_waits_and_is_tried_again(
    says: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(client: EngineClient, engine: ScriptedEngine) -> None:
        stream = client.submit(request(client))
        loading = asyncio.create_task(client.load_adapter(AdapterSource("/a")))
        for _ in range(1 if says else MAX_DEATHS):
            peer = await woken(engine)
            if says:
                peer.say(Fatal("model_not_found", says))
            peer.die()
        for waits in (anext(stream), loading):
            with pytest.raises(EngineError, match="could not be started again"):
                await waits
        assert client.state == "idle"
        await answered(client, engine)

    with caplog.at_level(logging.ERROR, "mlx_tandem"):
        run(body)
    (told,) = [record.fields for record in caplog.records if record.getMessage() == "engine not woken"]
    assert (says or "ended 3 times before it was ready") in told["error"]


# -- over HTTP ------------------------------------------------------------------------------------------------------

Served = tuple[httpx.Client, Peer, ScriptedEngine]
HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def heard(peer: Peer, kind: type[Inbound]) -> None:
    """Wait until a message of this kind came, whatever came before."""
    while not isinstance(peer.hear(object), kind):
        pass


def slept(client: httpx.Client, peer: Peer) -> None:
    """Wait until the engine is told to end, and end it."""
    heard(peer, Drain)
    peer.die()
    until(lambda: client.get("/health").json()["status"] == "idle")


def answer(peer: Peer) -> None:
    """Answer the next request with one token."""
    r = peer.hear(Submit).request
    peer.say(Accepted(r.id), Output([Delta(r.id, 0, (5,), None, "stop")]))


@pytest.fixture
def kept() -> Iterator[Served]:
    """A server that would unload its engine after an hour."""
    with scripted_server(idle_unload_s=3600.0, stream_keepalive_s=0.01) as served:
        yield served


WAYS: tuple[tuple[str, dict[str, object]], ...] = (
    ("/api/chat", {"model": "base", "messages": HELLO["messages"], "keep_alive": 0}),
    ("/api/generate", {"model": "base", "prompt": "hi", "keep_alive": "0s"}),
    ("/v1/chat/completions", {**HELLO, "ttl": 0}),
    ("/v1/completions", {"prompt": "hi", "ttl": 0}),
)
"""Requests that have the engine unloaded after them."""


def test_a_request_says_how_long_the_engine_is_kept(kept: Served) -> None:
    """The next engine has the limit of the settings again."""
    client, peer, engine = kept
    for number, (path, body) in enumerate(WAYS, 1):
        answering = threading.Thread(target=answer, args=[peer])
        answering.start()
        assert client.post(path, json={**body, "stream": False}).status_code == 200
        answering.join()
        slept(client, peer)
        assert client.get("/readyz").status_code == 200
        assert client.get("/api/ps").json() == {"models": []}
        assert not client.get("/v1/models").json()["data"][0]["loaded"]
        assert engine.launches == number, "nobody has asked for an answer"
        metrics = client.get("/metrics").text
        assert "tandem_engine_idle 1.0" in metrics and "tandem_engine_ready 1.0" in metrics
        assert f"tandem_engine_unloads_total {number}.0" in metrics
        with client.stream("POST", "/v1/chat/completions", json={**HELLO, "stream": True}) as response:
            lines = response.iter_lines()
            assert any(line == ": keep-alive" for line in lines), "the stream has begun before there is an engine"
            peer = engine.peer()
            assert client.get("/health").json()["status"] == "waking"
            answer(peer.ready())
            assert [line for line in lines if line][-1] == "data: [DONE]"
        (model,) = client.get("/api/ps").json()["models"]
        assert re.match("20[0-9]{2}-", model["expires_at"])
        assert client.get("/health").json()["status"] == "ok"


def test_ollama_unloads_and_loads_by_an_empty_prompt(kept: Served) -> None:
    client, peer, engine = kept
    assert client.post("/api/generate", json={"model": "base", "keep_alive": -1}).json()["done_reason"] == "load"
    assert client.get("/api/ps").json()["models"][0]["expires_at"].startswith("9999")
    assert client.post("/api/generate", json={"model": "base", "keep_alive": 0}).json()["done_reason"] == "unload"
    slept(client, peer)
    assert client.post("/api/show", json={"model": "base"}).status_code == 200
    assert client.post("/tokenize", json={"prompt": "hi"}).status_code == 200
    assert engine.launches == 1, "these do not need an engine"
    readying = threading.Thread(target=lambda: engine.peer().ready())
    readying.start()
    assert client.post("/api/chat", json={"model": "base"}).json()["done_reason"] == "load"
    readying.join()
    assert client.get("/health").json()["status"] == "ok"


def test_a_key_that_may_only_ask_does_not_decide_how_long_the_engine_is_kept(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    scopes = {"asks": ["inference"], "rules": ["inference", "admin"]}
    keys.write_text(json.dumps([{"name": name, "key": f"{name}-key", "scopes": own} for name, own in scopes.items()]))
    keys.chmod(0o600)
    with scripted_server(idle_unload_s=3600.0, keys_file=str(keys)) as (client, peer, _):
        client.headers["x-api-key"] = "asks-key"
        refused = client.post("/api/generate", json={"model": "base", "keep_alive": 0})
        assert (refused.status_code, "lacks the scope admin" in refused.json()["error"]) == (403, True)
        for path, body in (WAYS[0], ("/api/generate", {"model": "base", "prompt": "hi", "keep_alive": -1})):
            answering = threading.Thread(target=answer, args=[peer])
            answering.start()
            assert client.post(path, json={**body, "stream": False}).status_code == 200
            answering.join()
            left = datetime.fromisoformat(client.get("/api/ps").json()["models"][0]["expires_at"]) - datetime.now(UTC)
            assert 3000 < left.total_seconds() <= 3600, "as the settings say"
        client.headers["x-api-key"] = "rules-key"
        assert client.post("/api/generate", json={"model": "base", "keep_alive": 0}).status_code == 200
        slept(client, peer)


def test_a_server_that_keeps_its_engine_says_so() -> None:
    with scripted_server() as (client, peer, _):
        found = client.post("/api/generate", json={"model": "base", "keep_alive": 0})
        assert (found.status_code, "--idle-unload-s" in found.json()["error"]) == (400, True)
        for keep_alive in ("5m", 0):
            answering = threading.Thread(target=answer, args=[peer])
            answering.start()
            body = {"model": "base", "prompt": "hi", "stream": False, "keep_alive": keep_alive}
            assert client.post("/api/generate", json=body).status_code == 200
            answering.join()
        assert client.get("/api/ps").json()["models"][0]["expires_at"].startswith("9999")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((None, None), (0, 0.0), (90, 90.0), (-1, float("inf")), ("5m", 300.0), ("1h30m", 5400.0), ("1.5s", 1.5)),
        *(("-1m", float("inf")), ("10", 10.0), ("250ms", 0.25), ("0", 0.0)),
    ],
)
def test_durations_are_read_as_ollama_reads_them(value: float | str | None, seconds: float | None) -> None:
    assert keep_alive_seconds(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "soon", "5 m", "5d", "m5", "nan", "inf", float("nan")])
def test_what_is_no_duration_is_refused_by_the_fields_name(value: float | str) -> None:
    with pytest.raises(InvalidRequest, match=r"keep_alive .*a number of seconds, or a duration"):
        keep_alive_seconds(value)


def test_other_machines_need_the_engine() -> None:
    from mlx_tandem.config import ClusterConfig

    with (
        pytest.raises(InvalidRequest, match="--idle-unload-s cannot be used with --share-model"),
        scripted_server(settings={"cluster": ClusterConfig(share=True)}, idle_unload_s=1.0),
    ):
        pass
