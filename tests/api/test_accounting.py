"""What is counted of a request, wherever it is counted, against a plain account of what has happened to it."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_tandem.config import Arm
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.openai.renderer import TextRenderer
from mlx_tandem.engine.client.stream import Stream
from mlx_tandem.engine.messages import Cancel, Failed, Output, Submit
from mlx_tandem.server.replies import Reply
from mlx_tandem.types import Delta, Request
from tests.api.scripted import ADAPTER, SECONDS, Peer, scripted_server
from tests.waiting import until

REPLIES: list[Reply] = []


class CountingFront(ServerFront):
    """A front with an adapter, and with an alias that stands for it."""

    async def bring_up(self) -> None:
        await super().bring_up()
        self.models.made("own", None, ADAPTER)
        await self.models.put_alias("split", [Arm("own", 1.0)])


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[httpx.Client, Peer]]:
    """A server with all of its time limits, whose replies are kept in REPLIES."""
    with pytest.MonkeyPatch.context() as patch:
        start = Reply._set_deadlines

        def started(reply: Reply, stream: Stream) -> None:
            REPLIES.append(reply)
            start(reply, stream)

        patch.setattr(Reply, "_set_deadlines", started)
        patch.setattr("tests.api.scripted.ServerFront", CountingFront)
        with scripted_server(request_timeout_s=1000.0, first_token_timeout_s=1000.0) as (client, peer, _):
            yield client, peer


Account = Counter[tuple[str, ...]]
KEPT = ("requests", "open", "prompt_tokens", "generated_tokens", "errors")
TOTALS = {
    "vllm:prompt_tokens_total": "prompt tokens",
    "vllm:generation_tokens_total": "generated tokens",
    "vllm:request_success_total": "ended",
    "vllm:time_to_first_token_seconds_count": "first tokens",
    "vllm:e2e_request_latency_seconds_count": "ends",
    "vllm:request_params_n_count": "finished",
    "tandem_errors_total": "errors",
    "tandem_error_replies_total": "error replies",
    "tandem_alias_requests_total": "of the arm: requests",
    "tandem_alias_prompt_tokens_total": "of the arm: prompt tokens",
    "tandem_alias_generated_tokens_total": "of the arm: generated tokens",
    "tandem_alias_errors_total": "of the arm: errors",
}
"""Our words for the series that are compared. What they are labelled with follows."""


def account(client: httpx.Client) -> tuple[Account, float, float]:
    """Everything that the server has counted, and the sums of its times between tokens and of its times of decoding."""
    found: Account = Counter()
    seconds = {"inter_token_latency": 0.0, "request_decode_time": 0.0}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name in TOTALS:
                labels = (v for k, v in sorted(sample.labels.items()) if k != "engine")
                found[(TOTALS[sample.name], *labels)] = int(sample.value)
            for name in seconds:
                if sample.name == f"vllm:{name}_seconds_sum":
                    seconds[name] = sample.value
    engine = client.get("/v1/engine/metrics").json()
    for name in ("open_requests", "open_choices", "requests_completed"):
        found[(name,)] = engine[name]
    for name in KEPT:
        found["of the adapter", name] = engine["adapters"]["own@1"][name]
    (arm,) = client.get("/v1/aliases/split").json()["arms"]
    for name in KEPT:
        found["of the alias", name] = arm[name]
    return found, seconds["inter_token_latency"], seconds["request_decode_time"]


def expected(model: str, prompts: int, n: int, tokens: int, ending: str, stream: bool) -> Account:
    """The account of a request of `prompts` prompts of three tokens, whose choices have `tokens` tokens each."""
    name = "base" if model == "base" else "own"
    choices, of_prompts = prompts * n, 3 * prompts
    reason = {"failed": "error", "left": "abort"}.get(ending, ending)
    is_error, is_over = ending == "failed", ending in ("stop", "length")
    made: Account = Counter(
        {
            ("prompt tokens", name): of_prompts,
            ("generated tokens", name): choices * tokens,
            ("ended", reason, name): choices,
            ("first tokens", "base"): int(tokens > 0),
            ("ends", "base"): int(is_over),
            ("finished", "base"): int(is_over),
            ("requests_completed",): int(is_over),
            ("errors", "step_failed"): int(is_error),
            ("error replies", "step_failed", "503"): int(is_error and not (stream and tokens)),
        }
    )
    counted = {"requests": 1, "prompt_tokens": of_prompts, "generated_tokens": choices * tokens, "errors": is_error}
    for kept, number in counted.items():
        made["of the adapter", kept] = number * (model != "base")
        made["of the alias", kept] = number * (model == "split")
        made["of the arm: " + kept.replace("_", " "), "split", "own"] = number * (model == "split")
    return made


def run(client: httpx.Client, peer: Peer, body: dict[str, Any], tokens: int, ending: str) -> None:
    """Ask, have the engine draw `tokens` tokens for each choice, all choices in one step, and then end as it should."""
    asked, n = len(body["prompt"]), body["n"]
    sock = socket.create_connection((client.base_url.host, client.base_url.port))

    def ask() -> None:
        if ending == "left" and not body["stream"]:
            data = json.dumps(body).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            return
        with client.stream("POST", "/v1/completions", json=body) as reply:
            for _ in reply.iter_raw():
                if ending == "left":
                    return

    thread = threading.Thread(target=ask)
    thread.start()
    requests: list[Request] = [peer.hear(Submit).request for _ in range(asked)]
    now, _, _ = account(client)
    assert (now["open_requests",], now["open_choices",]) == (1, asked * n)
    assert now["of the adapter", "open"] == (body["model"] != "base")
    assert now["of the alias", "open"] == (body["model"] == "split")
    for i in range(tokens):
        finish = ending if i == tokens - 1 and ending in ("stop", "length") else None
        peer.say(Output([Delta(r.id, c, (300 + i,), None, finish) for r in requests for c in range(n)]))
    if ending == "failed":
        peer.say(Failed(requests[0].id, "step_failed", "it failed"))
    thread.join()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset, seen at once
    sock.close()
    if ending in ("failed", "left"):
        for _ in range(asked - (ending == "failed")):
            assert peer.hear(Cancel).request in [r.id for r in requests]


@pytest.mark.promise("PRP-6")
@pytest.mark.parametrize("model", ["base", "own", "split"])
@pytest.mark.parametrize(
    ("stream", "prompts", "n", "tokens", "ending"),
    [
        (False, 1, 1, 3, "stop"),
        (True, 1, 3, 2, "length"),
        (False, 2, 2, 3, "stop"),
        (True, 2, 2, 0, "failed"),
        (False, 1, 2, 2, "failed"),
        (True, 1, 2, 2, "failed"),
        (True, 1, 2, 2, "left"),
        (False, 1, 2, 2, "left"),
    ],
)
def test_everything_is_counted_once(
    served: tuple[httpx.Client, Peer], model: str, stream: bool, prompts: int, n: int, tokens: int, ending: str
) -> None:
    client, peer = served
    before, between, decoding = account(client)
    body = {"model": model, "prompt": [[300, 301, 302]] * prompts, "n": n, "max_tokens": 9, "stream": stream}
    run(client, peer, body, tokens, ending)
    until(lambda: not client.get("/v1/engine/metrics").json()["open_requests"])
    after, between_now, decoding_now = account(client)
    after.subtract(before)
    assert {k: v for k, v in after.items() if v} == {
        k: v for k, v in expected(model, prompts, n, tokens, ending, stream).items() if v
    }
    if ending in ("stop", "length"):
        assert between_now - between == pytest.approx(prompts * n * (decoding_now - decoding))
    assert all(deadline.cancelled() for deadline in REPLIES[-1]._timers.values()), "no timer is left behind"


@pytest.mark.promise("F10")
def test_a_stream_that_breaks_ends_with_an_error_that_quotes_nothing(
    served: tuple[httpx.Client, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, peer = served
    pieces = iter([b"data: {}\n\n"])
    monkeypatch.setattr(TextRenderer, "text", lambda renderer, event: next(pieces))
    before, _, _ = account(client)
    said: list[bytes] = []
    begun = threading.Event()

    def ask() -> None:
        body = {"model": "base", "prompt": [300], "stream": True}
        with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "my-id"}) as reply:
            for piece in reply.iter_raw():
                said.append(piece)
                begun.set()

    thread = threading.Thread(target=ask)
    thread.start()
    request = peer.hear(Submit).request
    peer.say(Output([Delta(request.id, 0, (300,))]))
    assert begun.wait(SECONDS)
    peer.say(Output([Delta(request.id, 0, (301,))]))
    thread.join()
    peer.hear(Cancel)
    *_, last, end = b"".join(said).decode().split("\n\n")
    assert end == ""
    assert json.loads(last.removeprefix("data: ")) == {
        "error": {
            "message": "internal error in request my-id",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }
    until(lambda: not client.get("/v1/engine/metrics").json()["open_requests"])
    after, _, _ = account(client)
    assert after["errors", "internal_error"] - before["errors", "internal_error"] == 1
    assert after["error replies", "internal_error", "500"] == before["error replies", "internal_error", "500"]
    assert after["ended", "error", "base"] - before["ended", "error", "base"] == 1
