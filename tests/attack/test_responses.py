"""Small bodies that ask for much of what the server has stored."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem.dialects.openai.renderer import ChatRenderer
from mlx_tandem.dialects.responses.renderer import ResponseRenderer
from mlx_tandem.engine.messages import Output, Submit
from mlx_tandem.server import whole_reply
from mlx_tandem.types import Delta, TokenLogprob
from tests.api.scripted import scripted_server
from tests.serving import RunningServer


def peak(server: RunningServer) -> int:
    """The most bytes that the front has had in memory."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.promise("C12")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_many_references_to_one_item(server: RunningServer) -> None:
    """The item is decoded once, without its logprobs, and only if all that the body refers to is not too much."""
    story = {"input": "Tell me a short story about a fox.", "temperature": 0}
    asked = {"max_output_tokens": 200, "top_logprobs": 5}
    reply = server.client.post("/v1/responses", json=story | asked).json()
    assert reply["usage"]["output_tokens"] > 40, "a thousand of a short answer would fit into the context"
    item = reply["output"][0]
    before = peak(server)
    for count in (1000, 4096):
        references = [{"type": "item_reference", "id": item["id"]}] * count
        reply = server.client.post("/v1/responses", json={"input": references, "max_output_tokens": 1})
        assert reply.status_code in (400, 413), reply.text
        assert reply.json()["error"]["code"] in ("context_length_exceeded", "too_large")
    assert peak(server) - before < 50 << 20


@pytest.mark.parametrize(
    ("renderer", "path", "asked"),
    [
        (ChatRenderer, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
        (ResponseRenderer, "/v1/responses", {"input": "x"}),
    ],
)
def test_many_logprobs_are_encoded_off_the_loop(
    renderer: type, path: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the response is in the store when its reply comes."""
    monkeypatch.setattr(whole_reply, "MANY_NUMBERS", 4 * 21)
    on_loop = []
    whole = renderer.whole  # type: ignore[attr-defined]

    def watched(*args: Any) -> bytes:
        try:
            asyncio.get_running_loop()
            on_loop.append(True)
        except RuntimeError:
            on_loop.append(False)
        found: bytes = whole(*args)
        return found

    monkeypatch.setattr(renderer, "whole", watched)
    with scripted_server() as (client, peer, _), ThreadPoolExecutor() as threads:
        for count in (3, 4):
            asking = threads.submit(client.post, path, json=asked | {"top_logprobs": 20})
            request = peer.hear(Submit).request
            logprobs = (TokenLogprob(-1.0, -1.0, ((5, -1.0),)),) * count
            peer.say(Output((Delta(request.id, 0, (5,) * count, logprobs, finish="length"),)))
            reply = asking.result()
            assert reply.status_code == 200, reply.text
            if renderer is ResponseRenderer:
                assert client.get(f"{path}/{reply.json()['id']}").json() == reply.json()
    assert on_loop == [True, False]
