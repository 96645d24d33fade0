"""Who gets past the gate, by the headers of a request: a table of all that may be shown."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import compile_path

from mlx_tandem.config import ServerConfig
from mlx_tandem.dialects.anthropic.errors import ERRORS
from mlx_tandem.generation.metrics import Metrics
from mlx_tandem.generation.prompted import OWNER
from mlx_tandem.server.auth import Gate
from mlx_tandem.server.keyring import Keyring

KEY = "s3cret"
BEARER, OWN = (b"authorization", b"Bearer s3cret"), (b"x-api-key", b"s3cret")
WRONG, WRONG_OWN = (b"authorization", b"Bearer other"), (b"x-api-key", b"other")
HOST = (b"host", b"localhost:8000")
PUBLIC = ("/health", "/livez")


def ask(
    *headers: tuple[bytes, bytes],
    key: str = "",
    file: str = "",
    method: str = "POST",
    path: str = "/v1/completions",
    **server: Any,
) -> tuple[int, Any]:
    """The status of a refusal and its code; or 200, and whether the request has shown the key."""
    passed: list[bool] = []
    sent: list[Any] = []
    metrics = Metrics()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["key_shown"])

    async def send(message: Any) -> None:
        sent.append(message)

    public = [compile_path(path)[0] for path in PUBLIC]
    gate = Gate(app, Keyring(key, file), ServerConfig(**server), metrics, {"/v1/messages": ERRORS.write}, public)
    scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
    asyncio.run(gate(scope, None, send))  # type: ignore[arg-type]
    if passed:
        assert not sent
        return 200, passed[0]
    start, body = sent
    error = json.loads(body["body"])["error"]
    code = error.get("code", error["type"])
    assert metrics.error_replies == (
        {(start["status"], error["code"]): 1} if "code" in error else metrics.error_replies
    )
    challenges = [value for name, value in start["headers"] if name == b"www-authenticate"]
    assert challenges == ([b"Bearer"] if start["status"] == 401 else [])
    return start["status"], code


@pytest.mark.parametrize(
    ("headers", "opens"),
    [
        ((), False),
        ((BEARER,), True),
        ((OWN,), True),
        (((b"authorization", b"bEARER s3cret"),), True),
        ((WRONG,), False),
        ((WRONG_OWN,), False),
        (((b"authorization", b"Basic s3cret"),), False),
        (((b"authorization", b"s3cret"),), False),
        (((b"authorization", b"Bearer  s3cret"),), False),
        (((b"authorization", b"Bearer s3cret "),), False),
        (((b"authorization", b"Bearer "),), False),
        (((b"authorization", b"Bearer S3CRET"),), False),
        (((b"x-api-key", b""),), False),
        ((BEARER, WRONG_OWN), True),
        ((WRONG, OWN), True),
        ((WRONG, WRONG_OWN), False),
        ((BEARER, BEARER), False),
        ((WRONG, BEARER), False),
        ((OWN, OWN), False),
        ((OWN, WRONG_OWN), False),
        ((BEARER, BEARER, OWN), True),
    ],
)
def test_the_key(headers: tuple[tuple[bytes, bytes], ...], opens: bool) -> None:
    assert ask(HOST, *headers, key=KEY) == ((200, True) if opens else (401, "invalid_api_key"))
    assert ask(HOST, *headers) == (200, True), "no key is asked for"


@pytest.mark.parametrize("path", [*sorted(PUBLIC), "/metrics", "/v1/models", "/health//", "/version"])
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_what_needs_no_key(path: str, method: str) -> None:
    is_public = method == "GET" and path in PUBLIC
    expected = (200, False) if is_public else (401, "invalid_api_key")
    assert ask(HOST, key=KEY, method=method, path=path) == expected
    assert ask(HOST, BEARER, key=KEY, method=method, path=path) == (200, True)


LOCAL = [b"localhost", b"LocalHost:1", b"127.0.0.1:8000", b"[::1]:8000", b"127.9.9.9"]
FOREIGN = [b"evil.example", b"127.0.0.1.evil.example", b"localhost.", b"", b"a b", b"localhost:x", b"localhost@evil"]
ALLOWED = {"allowed_hosts": ("Good.example", "port.example:9")}


def hosts(*values: bytes, **options: Any) -> int:
    return ask(*((b"host", value) for value in values), **options)[0]


def test_the_host_that_a_request_names() -> None:
    """Without a key and other hosts, only this machine's names pass: a web page may send a browser anywhere else."""
    for host in LOCAL:
        assert hosts(host) == hosts(host, **ALLOWED) == 200
    for host in FOREIGN:
        assert hosts(host) == hosts(host, **ALLOWED) == 403
        assert ask((b"host", host))[1] == "host_not_allowed"
        assert hosts(host, host="0.0.0.0") == 200, "an address that other machines reach has any name"
    for host, passes in (
        (b"good.example", True), (b"GOOD.example:5", True), (b"port.example:9", True), (b"port.example", False),
        (b"port.example:8", False), (b"sub.good.example", False),
    ):  # fmt: skip
        assert hosts(host) == 403
        assert hosts(host, **ALLOWED) == (200 if passes else 403)
        assert hosts(host, host="0.0.0.0", **ALLOWED) == (200 if passes else 403), (
            "they are checked where they are named"
        )
    assert hosts() == hosts(b"localhost", b"localhost") == hosts(b"localhost", b"evil.example") == 403


def test_a_key_stands_for_the_host_unless_hosts_are_named() -> None:
    assert ask((b"host", b"evil.example"), BEARER, key=KEY) == (200, True)
    assert ask((b"host", b"evil.example"), key=KEY)[0] == 401
    assert ask((b"host", b"evil.example"), BEARER, key=KEY, **ALLOWED)[0] == 403
    assert ask((b"host", b"good.example"), BEARER, key=KEY, **ALLOWED) == (200, True)


def test_refusals_have_the_form_of_the_path() -> None:
    assert ask(HOST, key=KEY, path="/v1/messages") == (401, "authentication_error")
    assert ask((b"host", b"evil.example"), path="/v1/messages") == (403, "permission_error")
    assert ask(HOST, key=KEY, path="/v1/messages/batches") == (401, "authentication_error"), "no route, and below one"
    assert ask(HOST, key=KEY, path="/v1/messagesx") == (401, "invalid_api_key"), "not below"


@pytest.mark.parametrize(
    ("path", "header", "opens"),
    [
        ("/api/v1/asample", (b"x-api-key", b"tml-s3cret"), True),
        ("/api/v1/asample", OWN, True),
        ("/api/v1/asample", BEARER, True),
        ("/api/v1/asample", (b"x-api-key", b"tml-tml-s3cret"), False),
        ("/api/v1/asample", (b"x-api-key", b"tml-other"), False),
        ("/api/v1/asample", (b"x-api-key", b"tml-"), False),
        ("/api/v1asample", (b"x-api-key", b"tml-s3cret"), False),
        ("/v1/completions", (b"x-api-key", b"tml-s3cret"), False),
    ],
)
def test_the_key_may_stand_behind_the_beginning_of_tinker_s_keys(
    path: str, header: tuple[bytes, bytes], opens: bool
) -> None:
    assert ask(header, key=KEY, path=path) == ((200, True) if opens else (401, "invalid_api_key"))


def test_a_key_that_begins_like_tinker_s_is_shown_as_it_is() -> None:
    assert ask((b"x-api-key", b"tml-own"), key="tml-own", path="/api/v1/asample") == (200, True)


def owner_of(*headers: tuple[bytes, bytes], key: str = "", file: str = "") -> str:
    """Who owns what a request to Tinker's API makes."""
    found: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(OWNER.get())

    gate = Gate(app, Keyring(key, file), ServerConfig(allowed_hosts=("a",)), Metrics(), {}, ())
    scope = {"type": "http", "method": "POST", "path": "/api/v1/asample", "headers": [(b"host", b"a"), *headers]}
    asyncio.run(gate(scope, None, None))  # type: ignore[arg-type]
    return found[0]


def test_what_is_made_belongs_to_the_key() -> None:
    a, b = owner_of((b"x-api-key", b"tml-a")), owner_of((b"x-api-key", b"tml-b"))
    assert a == owner_of((b"x-api-key", b"tml-a")) != b and "tml" not in a
    assert owner_of(OWN, key=KEY) == owner_of((b"x-api-key", b"tml-s3cret"), key=KEY) == owner_of(BEARER, key=KEY) == ""


def test_what_is_made_with_named_keys_belongs_to_their_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("- {name: a, key: a-key, tenant: t}\n- {name: b, key: b-key, tenant: t}\n- {name: c, key: c-key}\n")
    file.chmod(0o600)
    owners = [owner_of((b"x-api-key", b"tml-%c-key" % name), file=str(file), key=KEY) for name in b"abc"]
    assert owners == ["t", "t", "c"]
    assert owner_of(OWN, file=str(file), key=KEY) == ""


def test_named_keys_in_two_headers(tmp_path: Path) -> None:
    """One is enough; two of different callers stand for nobody, and neither does a header that comes twice."""
    file = tmp_path / "keys"
    file.write_text("- {name: a, key: a-key}\n- {name: b, key: b-key}\n")
    file.chmod(0o600)
    a, b = (b"authorization", b"Bearer a-key"), (b"x-api-key", b"b-key")
    for headers, status in (((a,), 200), ((b,), 200), ((a, b), 401), ((a, WRONG_OWN), 200), ((a, a), 401)):
        assert ask(HOST, *headers, file=str(file))[0] == status


def test_a_connection_that_is_not_http_reaches_nothing() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it was passed on")

    gate = Gate(app, Keyring("", ""), ServerConfig(), Metrics(), {}, ())
    asyncio.run(gate({"type": "websocket", "path": "/v1/models", "headers": []}, None, None))  # type: ignore[arg-type]
