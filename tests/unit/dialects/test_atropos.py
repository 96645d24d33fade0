"""Atropos' trajectory API as this server has it."""

from __future__ import annotations

import asyncio
import gzip
import inspect
import json
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mlx_tandem.dialects.atropos import handlers
from mlx_tandem.dialects.atropos.routes import ROUTES
from mlx_tandem.dialects.route import Received
from mlx_tandem.errors import Forbidden, InvalidRequest, NotFound, Overloaded, TandemError, TooLarge, UnsupportedMedia
from mlx_tandem.strict_json import decode, dumps
from mlx_tandem.training.atropos import hub as hubs
from mlx_tandem.training.atropos.hub import EnvironmentBody, Group, Hub, OwnTrainer, batch, filling
from tests.atropos_dialogue import REGISTRATION, Ask, dialogue, environment, group, recorded

TABLE = {(route.method, route.path): route for route in ROUTES if route.header is None}


def asking(hub: Hub) -> Ask:
    """What answers requests as the server's application does, without the server."""
    front: Any = SimpleNamespace(learning=SimpleNamespace(default=SimpleNamespace(hub=hub)))

    def ask(method: str, path: str, body: Any) -> tuple[int, Any]:
        route = TABLE[method, path]
        content = json.dumps(body).encode()
        try:
            if route.reads == "bytes":
                found = route.handler(front, Received(gzip.compress(content), "application/json", "gzip"))
            else:
                found = route.handler(front, *([] if route.body is None else [decode(content, route.body)]))
            found = asyncio.run(found) if inspect.iscoroutine(found) else found
        except TandemError as e:
            return e.status, None
        return 200, found if isinstance(found, str) else json.loads(found if isinstance(found, bytes) else dumps(found))

    return ask


def test_it_answers_as_atropos_does():
    for real, own in zip(recorded(), dialogue(asking(Hub())), strict=True):
        assert own == real


def test_what_it_refuses():
    ask = asking(Hub())
    assert ask("GET", "/batch", None)[1]["status"] == "error"
    assert ask("POST", "/register", {"batch_size": 8})[0] == 400
    assert ask("POST", "/register", REGISTRATION | {"batch_size": 0})[0] == 400
    assert ask("GET", "/status-env", {"env_id": 0})[0] == 404
    assert ask("POST", "/disconnect-env", {"env_id": -1})[1]["status"] == "failure"
    assert ask("POST", "/scored_data", {"tokens": [["x"]], "masks": [], "scores": []})[0] == 400
    assert ask("POST", "/scored_data_list", group(4))[0] == 400
    empty = {"tokens": [], "masks": [], "scores": []}
    assert ask("POST", "/scored_data", empty)[0] == 400, "any number of them would have room"
    assert ask("POST", "/scored_data", group(4) | {"env_id": 2**70})[0] == 400


def test_a_server_without_it_says_how_to_have_it():
    off: Any = SimpleNamespace(learning=None)
    with pytest.raises(NotFound, match="--atropos-api"):
        handlers.status(off)
    with pytest.raises(Forbidden):
        handlers.refuse_browser(off)
    guarded = {(r.method, r.path) for r in ROUTES if r.header == "sec-fetch-site"}
    assert guarded == {("GET", "/batch"), ("GET", "/reset_data")}, "those that change something without a body"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (Received(b"[]", "text/plain", "identity"), UnsupportedMedia),
        (Received(b"[]", "application/json", "br"), UnsupportedMedia),
        (Received(b"[]", "application/json", "gzip"), InvalidRequest),
        (Received(gzip.compress(b"[]")[:-4], "application/json", "gzip"), InvalidRequest),
        (Received(gzip.compress(b" " * 2000), "application/json", "gzip"), TooLarge),
    ],
)
def test_bodies_are_unpacked_within_a_limit(body: Received, error: type[Exception], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handlers, "MOST_UNPACKED", 1000)
    front: Any = SimpleNamespace(learning=SimpleNamespace(default=SimpleNamespace(hub=Hub())))
    with pytest.raises(error) as raised:
        asyncio.run(handlers.scored_data_list(front, body))
    assert type(raised.value) is error


@pytest.mark.parametrize("several", [False, True])
def test_a_large_body_is_decoded_beside_the_loop_and_one_at_a_time(monkeypatch: pytest.MonkeyPatch, several: bool):
    front: Any = SimpleNamespace(learning=SimpleNamespace(default=SimpleNamespace(hub=started())))
    at_once, inside = [], []
    begun, go_on = threading.Event(), threading.Event()

    def slow(content: bytes, kind: type[Any]) -> Any:
        inside.append(threading.get_ident())
        at_once.append(len(inside))
        begun.set()
        assert go_on.wait(20)
        inside.pop()
        return decode(content, kind)

    monkeypatch.setattr(handlers, "decode", slow)
    content = json.dumps([group(4)] if several else group(4)).encode()
    handler = handlers.scored_data_list if several else handlers.scored_data

    async def work() -> list[Any]:
        posts = [
            asyncio.create_task(handler(front, Received(content, "application/json", "identity"))) for _ in range(3)
        ]
        await asyncio.to_thread(begun.wait, 20)  # the loop goes on while a body is decoded
        assert threading.get_ident() not in inside
        go_on.set()
        return await asyncio.gather(*posts)

    assert [found["status"] for found in asyncio.run(work())] == ["received"] * 3
    assert at_once == [1, 1, 1]
    assert handlers.status(front)["queue_size"] == 3


def started() -> Hub:
    hub = Hub()
    hub.register(msgspec.convert(REGISTRATION, hubs.Registration))
    assert hub.take() is None
    return hub


def made(size: int, env_id: int | None = None, mark: int = 0) -> Group:
    return msgspec.convert(group(size, env_id, mark), Group)


def test_so_much_waits_and_no_more(monkeypatch: pytest.MonkeyPatch):
    hub = started()
    hub.join(msgspec.convert(environment("a"), EnvironmentBody))
    monkeypatch.setattr(hubs, "MOST_GROUP", 16)
    hub.put(made(16))
    for _ in range(27):
        hub.put(made(4))
    hub.put(made(3, 0))  # it waits in a buffer, and counts
    with pytest.raises(Overloaded) as raised:
        hub.put(made(4))
    assert raised.value.status == 503, "with which an environment tries again"
    own = OwnTrainer(hub)
    assert hub.take() is None, "a group of 16 fills no batch of 8"
    found = asyncio.run(own.batch())
    assert found is not None and [len(group.tokens) for group in found] == [16], "but learning needs no exact batch"
    assert hub.take() is not None
    hub.reset()
    monkeypatch.setattr(hubs, "MOST_TOKENS", 40)
    hub.put(made(8))
    hub.put(made(2))
    with pytest.raises(Overloaded):
        hub.put(made(2))
    hub.reset()
    monkeypatch.setattr(hubs, "MOST_BYTES", 5000)
    for field, value in (("messages", [[{"content": "x" * 3000}]]), ("images", ["x" * 3000]), ("env_id", 1)):
        large = msgspec.convert(group(2) | {"ref_logprobs": [0.5] * 600, field: value}, Group)
        hub.put(large)
        with pytest.raises(Overloaded) as raised:
            hub.put(large)
        assert raised.value.status == 503
        hub.reset()
    monkeypatch.setattr(hubs, "MOST_ENVIRONMENTS", 1)
    hub = started()
    said = msgspec.convert(environment("a"), EnvironmentBody)
    assert hub.join(said) == (0, "a_0")
    with pytest.raises(TandemError, match="1 environments"):
        hub.join(said)


def test_the_oldest_groups_make_a_batch():
    queue = [made(2, 0), made(4, 1), made(2, 0), made(4, 0), made(4, 1)]
    assert batch(queue, 8, {}) == [1, 0, 2], "packs of four"
    assert batch(queue, 8, {0: 0.5}) == [0, 2, 1]
    assert batch(queue, 8, {1: 1.0}) == [1, 4]
    assert batch(queue, 8, {2: 0.5}) == [], "an environment with a share that has nothing to give"
    assert batch(queue, 6, {}) == batch(queue, 32, {}) == batch([], 8, {}) == []


def test_groups_of_odd_sizes_are_put_together():
    assert filling([3, 2, 1], 4) == (0, 2)
    assert filling([2, 3, 2], 4) == (0, 2)
    assert filling([3, 3], 4) == filling([], 4) == ()
