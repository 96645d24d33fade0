"""Named keys over HTTP: scopes, limits, tenants, and a file that changes while requests come."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_tandem.cli import top
from mlx_tandem.cli.live import ServerGone
from mlx_tandem.engine.messages import Output, Submit
from mlx_tandem.types import Delta
from tests.api.scripted import Peer, scripted_server
from tests.waiting import until

BODY = {"prompt": [300], "max_tokens": 4}
KEYS: list[dict[str, Any]] = [
    {"name": "ask", "scopes": ["inference"], "tenant": "team"},
    {"name": "asks-too", "scopes": ["inference"], "tenant": "team"},
    {"name": "other", "scopes": ["inference"]},
    {"name": "few", "scopes": ["inference"], "limits": {"requests": 1, "queued_tokens": 100, "learning": False}},
    {"name": "seldom", "scopes": ["inference", "metrics"], "limits": {"requests_per_minute": 2}},
    {"name": "small", "scopes": ["inference"], "limits": {"upload_bytes_per_minute": 100}},
    {"name": "ops", "scopes": ["metrics", "admin"]},
    {"name": "loads", "scopes": ["adapters"], "limits": {"adapters": 1}},
    {"name": "trains", "scopes": ["training"]},
    {"name": "old", "scopes": ["inference"], "expires": "2001-01-01"},
]
CANARY = "tk-canary-"


def write(path: Path, keys: list[dict[str, Any]]) -> None:
    entries = [{"sha256": hashlib.sha256(f"{CANARY}{key['name']}".encode()).hexdigest(), **key} for key in keys]
    put(path, json.dumps(entries))


def put(path: Path, text: str) -> None:
    """Replace the file as a whole by one that was written long ago."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    os.utime(new, (1e9, 1e9))
    new.replace(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    write(path, KEYS)
    return path


@pytest.fixture(scope="module")
def scripted(file: Path) -> Iterator[tuple[httpx.Client, Peer]]:
    with scripted_server(keys_file=str(file), api_key="own") as (client, peer, _):
        yield client, peer


def shown(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {CANARY}{name}"}


class Asking:
    """A request that is open until the test ends it."""

    def __init__(self, scripted: tuple[httpx.Client, Peer], name: str, path: str = "/v1/completions", **fields: object):
        client, self._peer = scripted
        body = BODY if path == "/v1/completions" else {}
        self._replies: list[httpx.Response] = []
        self._thread = threading.Thread(
            target=lambda: self._replies.append(client.post(path, json=body | fields, headers=shown(name)))
        )
        self._thread.start()
        self.request = self._peer.hear(Submit).request

    def end(self) -> httpx.Response:
        self._peer.say(Output((Delta(self.request.id, 0, (301,), finish="stop"),)))
        self._thread.join()
        return self._replies[0]


@pytest.mark.parametrize(
    ("name", "method", "path", "scope"),
    [
        ("ask", "GET", "/metrics", "metrics"),
        ("ask", "POST", "/pause", "admin"),
        ("ask", "POST", "/v1/adapters", "adapters"),
        ("ask", "DELETE", "/v1/adapters/x", "adapters"),
        ("ask", "POST", "/v1/training/start", "training"),
        ("ask", "POST", "/api/v1/create_session", "training"),
        ("ops", "POST", "/v1/completions", "inference"),
        ("ops", "POST", "/v1/messages", "inference"),
        ("ops", "POST", "/api/chat", "inference"),
        ("ops", "POST", "/tokenize", "inference"),
        ("trains", "GET", "/v1/cache/stats", "metrics"),
        ("loads", "GET", "/v1/feedback", "training"),
    ],
)
def test_a_scope_that_is_missing_is_named(
    scripted: tuple[httpx.Client, Peer], name: str, method: str, path: str, scope: str
) -> None:
    """In the form of the path's dialect, and before the body is read."""
    client, _ = scripted
    reply = client.request(method, path, headers=shown(name), content=b"{" if method == "POST" else None)
    pattern = path.replace("/adapters/x", "/adapters/{name}")
    message = f"the key '{name}' lacks the scope {scope}, which {method} {pattern} needs"
    assert reply.status_code == 403
    error = reply.json()["error"]
    if path == "/api/chat":
        assert error == message
    elif path == "/v1/messages":
        assert reply.json() == {"type": "error", "error": {"type": "permission_error", "message": message}} | {
            name: value for name, value in reply.json().items() if name == "request_id"
        }
    else:
        assert error == {"message": message, "type": "permission_error", "param": None, "code": "missing_scope"}


def test_every_key_may_ask_what_there_is(scripted: tuple[httpx.Client, Peer]) -> None:
    client, _ = scripted
    for name in ("ask", "ops", "trains", "loads"):
        for path in ("/v1/models", "/version", "/openapi.json", "/v1/adapters"):
            assert client.get(path, headers=shown(name)).status_code == 200
    assert client.get("/v1/models").status_code == 401
    assert client.get("/health").json() == client.get("/health", headers=shown("ask")).json() == {"status": "ok"}
    assert "engine" in client.get("/health", headers=shown("ops")).json()
    own = {"x-api-key": "own"}
    assert client.get("/metrics", headers=own).status_code == client.get("/v1/models", headers=own).status_code == 200


def test_a_key_for_counters_is_enough_to_watch_a_server(
    scripted: tuple[httpx.Client, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tandem top` does without learning, which is of another scope."""
    monkeypatch.setattr(top, "ONCE_SECONDS", 0.01)
    url = str(scripted[0].base_url)
    look = asyncio.run(top.once(url, f"{CANARY}ops", None))
    assert look.metrics and not look.learning
    with pytest.raises(ServerGone, match="is ok, and says no more to this key, which lacks the scope metrics"):
        asyncio.run(top.once(url, f"{CANARY}ask", None))


def test_the_document_names_the_scopes(scripted: tuple[httpx.Client, Peer]) -> None:
    client, _ = scripted
    paths = client.get("/openapi.json", headers=shown("ask")).json()["paths"]
    assert paths["/v1/completions"]["post"]["security"] == [{"bearer": ["inference"]}, {"key": ["inference"]}]
    assert paths["/v1/models"]["get"]["security"] == [{"bearer": []}, {"key": []}]
    assert paths["/health"]["get"]["security"] == []


def test_a_key_that_has_ended_is_told_so(scripted: tuple[httpx.Client, Peer]) -> None:
    client, _ = scripted
    reply = client.get("/v1/models", headers=shown("old"))
    assert (reply.status_code, reply.json()["error"]["message"]) == (401, "this API key has expired")


def test_tenants_take_turns_and_their_keys_are_one_client(scripted: tuple[httpx.Client, Peer]) -> None:
    found = []
    for name in ("ask", "asks-too", "other"):
        asking = Asking(scripted, name)
        found.append(asking.request.client)
        asking.end()
    assert found[0] == found[1] != found[2]


def test_a_response_is_there_for_its_tenant_only(scripted: tuple[httpx.Client, Peer]) -> None:
    """To read, continue, quote and remove; whoever has all scopes sees it, too."""
    client, _ = scripted
    made = Asking(scripted, "ask", "/v1/responses", input="hi").end().json()
    path = f"/v1/responses/{made['id']}"
    quote = [{"type": "item_reference", "id": made["output"][0]["id"]}, {"role": "user", "content": "and?"}]
    for method, where, body in (
        ("GET", path, None),
        ("GET", f"{path}?stream=true", None),
        ("GET", f"{path}/input_items", None),
        ("POST", "/v1/responses", {"input": "and?", "previous_response_id": made["id"]}),
        ("POST", "/v1/responses", {"input": quote}),
        ("DELETE", path, None),
    ):
        assert client.request(method, where, json=body, headers=shown("other")).status_code in (400, 404), where
    for headers in (shown("asks-too"), {"x-api-key": "own"}):
        assert client.get(path, headers=headers).json()["id"] == made["id"]
    going_on = Asking(scripted, "asks-too", "/v1/responses", input="and?", previous_response_id=made["id"]).end()
    assert going_on.status_code == 200
    assert client.delete(path, headers=shown("asks-too")).status_code == 200


def test_feedback_is_for_completions_of_the_own_tenant(scripted: tuple[httpx.Client, Peer]) -> None:
    """The reply to feedback says what the completion was."""
    client, _ = scripted
    body = {"completion_id": Asking(scripted, "ask").end().json()["id"], "thumb": "up", "choice": 5}
    refused = client.post("/v1/feedback", json=body, headers=shown("other"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "completion_not_found")
    known = client.post("/v1/feedback", json=body, headers=shown("asks-too"))
    assert (known.status_code, known.json()["error"]["param"]) == (400, "choice")


def test_a_tenant_does_not_put_itself_before_all_others(scripted: tuple[httpx.Client, Peer]) -> None:
    client, _ = scripted
    for path, body in (
        ("/v1/completions", BODY),
        ("/inference/v1/generate", {"token_ids": [300], "sampling_params": {"max_tokens": 1}}),
    ):
        refused = client.post(path, json=body | {"priority": -1}, headers=shown("other"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_scope"), path
    assert Asking(scripted, "other", priority=1).end().status_code == 200


def test_open_requests_and_tokens_of_a_key_are_limited(scripted: tuple[httpx.Client, Peer]) -> None:
    client, _ = scripted
    asking = Asking(scripted, "few")
    refused = client.post("/v1/completions", json=BODY, headers=shown("few"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "1 requests are open, the most for the key 'few' (its limit requests)" in refused.text
    assert 1 <= int(refused.headers["retry-after"]) <= 120
    Asking(scripted, "other").end()
    assert asking.end().status_code == 200
    reply = client.post("/v1/completions", json=BODY | {"max_tokens": 100}, headers=shown("few"))
    assert reply.status_code == 413 and "(its limit queued_tokens)" in reply.text
    Asking(scripted, "few").end()


def test_requests_of_a_minute_are_limited(scripted: tuple[httpx.Client, Peer]) -> None:
    client, _ = scripted
    replies = [client.get("/v1/models", headers=shown("seldom")) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert 55 <= int(replies[2].headers["retry-after"]) <= 60
    assert "(its limit requests_per_minute)" in replies[2].text
    assert client.post("/v1/messages", headers=shown("seldom")).json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("is_announced", [True, False])
def test_uploads_of_a_minute_are_limited(scripted: tuple[httpx.Client, Peer], is_announced: bool) -> None:
    client, _ = scripted
    headers = shown("small") | {"content-type": "application/json"}

    def send(size: int) -> httpx.Response:
        body = json.dumps({"prompt": "x"}).encode().ljust(size)
        return client.post("/tokenize", headers=headers, content=body if is_announced else iter([body]))

    assert send(101).status_code == 413
    if is_announced:
        assert send(60).status_code == 200
    refused = send(60)
    assert refused.status_code == 429 and "(its limit upload_bytes_per_minute)" in refused.text
    assert 1 <= int(refused.headers["retry-after"]) <= 60


def test_nothing_is_learned_from_a_key_that_says_so(scripted: tuple[httpx.Client, Peer]) -> None:
    client, _ = scripted
    for path, body in (
        ("/v1/completions", BODY | {"collect_trajectory": True}),
        ("/v1/feedback", {"completion_id": "x", "thumb": "up"}),
    ):
        reply = client.post(path, json=body, headers=shown("few"))
        assert reply.status_code == 403 and "(its limit learning)" in reply.text


@pytest.mark.promise("F3")
def test_keys_are_counted_by_name_and_nowhere_told(scripted: tuple[httpx.Client, Peer]) -> None:
    client, _ = scripted
    Asking(scripted, "ask").end()
    for path in ("/v1/nothing", "/metrics", "/pause"):
        assert CANARY not in client.get(path, headers=shown("ask")).text
    text = client.get("/metrics", headers=shown("ops")).text
    assert CANARY not in text
    found = {
        (sample.name, sample.labels["key"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "tenant" in sample.labels
    }
    assert {key for _, key in found} == {key["name"] for key in KEYS}, "only names of the file"
    assert found["tandem_key_requests_total", "ask"] >= 1 and found["tandem_key_generated_tokens_total", "ask"] >= 1


def test_the_file_is_followed_while_requests_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revoked key is refused, a new one taken, and one that is in all files is never refused."""
    monkeypatch.setattr("mlx_tandem.server.keyring.LOOK_SECONDS", 0.0)
    file = tmp_path / "keys"
    write(file, KEYS[:2])
    with scripted_server(keys_file=str(file)) as (client, peer, _):
        asking = Asking((client, peer), "asks-too")
        statuses: list[int] = []
        done = threading.Event()

        def ask_on() -> None:
            with httpx.Client(base_url=client.base_url) as own:
                while not done.is_set():
                    statuses.append(own.get("/v1/models", headers=shown("ask")).status_code)

        threads = [threading.Thread(target=ask_on) for _ in range(2)]
        for thread in threads:
            thread.start()
        for n in range(12):
            write(file, [KEYS[0], KEYS[1 + n % 2]])
            present, absent = ("asks-too", "other") if n % 2 == 0 else ("other", "asks-too")
            assert client.get("/v1/models", headers=shown(present)).status_code == 200
            assert client.get("/v1/models", headers=shown(absent)).status_code == 401
        put(file, "- name: [")
        assert client.get("/v1/models", headers=shown("other")).status_code == 200
        until(lambda: len(statuses) > 20)
        done.set()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200}
        assert asking.end().status_code == 200, "it began when its key was good"
