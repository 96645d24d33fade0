"""The API key: what is asked for it, how it is presented, and that it is nowhere to be read."""

from __future__ import annotations

import ast
import inspect
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from mlx_tandem.config import Config, EngineConfig, ModelConfig, ServerConfig
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.routes import ROUTES
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.server import auth
from mlx_tandem.server.app import create_app
from mlx_tandem.server.keyring import Keyring
from mlx_tandem.server.keys import check_exposure, read_key
from mlx_tandem.server.serve import run
from tests.serving import ROOT, RunningServer, demo_config, serving

KEY = "sk-canary-51c0ffee"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
REFUSED = {
    "message": "a valid API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY",
    "type": "authentication_error",
    "param": None,
    "code": "invalid_api_key",
}


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    with serving(demo_config(api_key=KEY)) as server:
        yield server


OTHER_FORMS = {route.path for route in ROUTES if route.errors is not None and route.header is None}
"""Paths whose errors have the form of another dialect than OpenAI's."""


def app_of(config: Config) -> Starlette:
    def launch() -> tuple[socket.socket, object]:
        raise AssertionError("nothing is started here")

    return create_app(ServerFront(config, launch))


def routes() -> list[tuple[str, str]]:
    app = app_of(demo_config())
    found = [(m, r.path) for r in app.routes if isinstance(r, Route) for m in r.methods or () if m != "HEAD"]
    assert len(found) == len(app.routes) > 10
    return [(m, path.replace("{", "").replace("}", "")) for m, path in found]


@pytest.mark.promise("C7", "F2")
def test_every_route_asks_for_the_key(guarded):
    tried = [*routes(), ("GET", "/"), ("GET", "/nothing"), ("GET", "/docs"), ("GET", "/health//"), ("POST", "/health")]
    tried += [("HEAD", "/health"), ("GET", "//health"), ("GET", "/health/../v1/models"), ("OPTIONS", "/v1/models")]
    public = set()
    for method, path in tried:
        reply = guarded.client.request(method, guarded.url + path, json=BODY if method in ("POST", "PUT") else None)
        if reply.status_code == 200:
            public.add(path)
            continue
        assert reply.status_code == 401, (method, path)
        assert reply.headers["www-authenticate"] == "Bearer"
        if path in OTHER_FORMS:
            assert REFUSED["message"] in json.dumps(reply.json()["error"])
        else:
            assert method == "HEAD" or reply.json() == {"error": REFUSED}
    assert public == {"/health", "/health/", "/livez", "/liveness", "/readyz"}


def test_health_tells_strangers_only_its_status(guarded):
    for path in ("/health", "/health/", "/readyz", "/livez", "/liveness"):
        assert guarded.client.get(path).json() == {"status": "ok"}
    known = guarded.client.get("/health", headers={"authorization": f"Bearer {KEY}"}).json()
    assert known["engine"]["model_type"] == "qwen3"


@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER {KEY}"])
def test_the_key_opens(guarded, value):
    reply = guarded.client.post("/v1/chat/completions", json=BODY, headers={"authorization": value})
    assert reply.status_code == 200
    missing = guarded.client.get("/v1/nothing", headers={"authorization": value})
    assert missing.status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", b"Bearer " + KEY.encode()[:-1])],
        [(b"authorization", b"Bearer " + KEY.encode() + b"x")],
        [(b"authorization", b"Bearer  " + KEY.encode())],
        [(b"authorization", b"Bearer\t" + KEY.encode())],
        [(b"authorization", b"Bearer " + KEY.encode() + b" x")],
        [(b"authorization", b"Bearer " + KEY.upper().encode())],
        [(b"authorization", b"Bearer " + KEY.encode() + b"\xe9")],
        [(b"authorization", "Bearer \U0001f98a".encode())],
        [(b"authorization", b"Basic " + KEY.encode())],
        [(b"authorization", b"Bearer Bearer " + KEY.encode())],
        [(b"authorization", b"Bearer " + KEY.encode())] * 2,
        [(b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer " + KEY.encode())],
        [(b"authorization", b"Bearer " + KEY.encode() + b", Bearer " + KEY.encode())],
        [(b"proxy-authorization", b"Bearer " + KEY.encode())],
        [(b"x-api-key", b"Bearer " + KEY.encode())],
        [(b"x-api-key", KEY.encode())] * 2,
        [(b"cookie", b"authorization=Bearer " + KEY.encode())],
    ],
)
def test_anything_else_does_not(guarded, headers):
    reply = guarded.client.get("/v1/models", headers=headers)
    assert (reply.status_code, reply.json()) == (401, {"error": REFUSED})


@pytest.mark.promise("F13")
def test_wrong_keys_have_one_answer_however_often_they_come(guarded):
    """Whatever they have in common with the right one, which opens all the while."""
    wrong = [*(KEY[:n] for n in range(1, len(KEY))), KEY + "x", KEY.swapcase(), *(f"{n}{KEY[1:]}" for n in range(60))]
    answers = set()
    for key in wrong:
        reply = guarded.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        answers.add((reply.status_code, reply.text, reply.headers["www-authenticate"]))
    assert len(answers) == 1 and next(iter(answers))[0] == 401
    assert guarded.client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


@pytest.mark.promise("F3")
def test_a_key_elsewhere_does_not(guarded):
    for query in (f"api_key={KEY}", f"key={KEY}", f"authorization=Bearer%20{KEY}"):
        assert guarded.client.get(f"/v1/models?{query}").status_code == 401
    assert guarded.client.post("/v1/chat/completions", json=BODY | {"api_key": KEY}).status_code == 401
    host, port = guarded.url.removeprefix("http://").split(":")
    assert httpx.get(f"http://user:{KEY}@{host}:{port}/v1/models").status_code == 401


def test_each_request_of_a_connection_is_asked(guarded):
    """A request with the key does not open the door for the one behind it."""
    host, port = guarded.url.removeprefix("http://").split(":")
    opened = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    closed = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(opened + closed + b"\r\n" + opened + closed + b"Connection: close\r\n\r\n")
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"401", b"200", b"401"]


def test_a_refusal_leaves_the_connection_usable(guarded):
    """The body of a refused request is dropped, unless there is much of it."""
    host, port = guarded.url.removeprefix("http://").split(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(head + b"Content-Length: 1000\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}}"):  # before its body has come
            answer += sock.recv(65536)
        sock.sendall(b" " * 1000 + b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        while data := sock.recv(65536):
            answer += data
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"401", b"200"]
    for announced in (b"Content-Length: 1000000", b"Transfer-Encoding: chunked", b"Expect: 100-continue"):
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            sock.sendall(head + announced + b"\r\n\r\n")
            answer = b""
            while data := sock.recv(65536):
                answer += data
            assert answer.startswith(b"HTTP/1.1 401")
            assert b"connection: close" in answer


@pytest.mark.promise("F3", "H2")
def test_the_key_is_not_told(tmp_path):
    """Neither the right one nor those that were tried: not in logs, metrics or errors."""
    file = tmp_path / "key"
    file.write_text(KEY + "\nsecond line\n")
    file.chmod(0o644)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.program", msgspec.json.encode(demo_config(api_key_file=str(file))).decode()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    port = int(process.stdout.readline().split()[1])
    told = []
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for value in (f"Bearer {KEY}x", f"Basic {KEY}", f"Bearer {KEY}"):
            headers = {"authorization": value}
            told.append(client.get(f"/v1/nothing?key={KEY}", headers=headers).text)
            told.append(client.post("/v1/chat/completions", content=b"{", headers=headers).text)
            told.append(client.get("/metrics", headers=headers).text)
            told.append(client.get("/health", headers=headers).text)
        assert "tandem_errors_total" in told[-2]
    process.terminate()
    _, log = process.communicate(timeout=30)
    assert KEY not in log and KEY not in "".join(told)
    assert "the key file can be read by others" in log


def key_of(server: ServerConfig) -> str:
    return read_key(server.api_key, server.api_key_file)


def settings(**server: object) -> ServerConfig:
    return ServerConfig(**server)


@pytest.mark.parametrize("text", [KEY, KEY + "\n", f"  {KEY}\t\r\nanother\n", "x" * 4096])
def test_key_files(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    assert key_of(settings(api_key_file=str(file))) == text.split("\n")[0].strip()


@pytest.mark.parametrize(
    "content", [b"", b"\n" + KEY.encode(), b"  \n", b"two words\n", b"\xc3\xa9\n", b"a\0b", b"x" * 4097]
)
def test_key_files_that_hold_no_key(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest) as raised:
        key_of(settings(api_key_file=str(file)))
    assert raised.value.param == "api_key_file"
    assert KEY not in raised.value.message


def test_settings_without_a_key() -> None:
    assert key_of(settings()) == ""
    with pytest.raises(InvalidRequest, match="cannot be read"):
        key_of(settings(api_key_file="/does/not/exist"))
    with pytest.raises(InvalidRequest, match="printable ASCII"):
        key_of(settings(api_key="a b"))


def test_a_key_file_that_cannot_be_used_ends_the_start() -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        app_of(demo_config(api_key_file="/does/not/exist"))


@pytest.mark.promise("H5")
@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_key_file_that_others_can_read_is_told(tmp_path, caplog, mode, warned):
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(mode)
    with caplog.at_level(logging.WARNING, "mlx_tandem"):
        key_of(settings(api_key_file=str(file)))
    assert ("the key file can be read by others" in caplog.text) == warned


@pytest.mark.promise("G5")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "203.0.113.1", "tandem.test"])
def test_an_address_that_others_reach_needs_a_key(host):
    """It is said before anything is bound: this machine has not all of these addresses."""
    config = Config(EngineConfig(ModelConfig("nothing")), settings(host=host, port=0))
    with pytest.raises(InvalidRequest, match="set an API key"):
        run(config)
    check_exposure(settings(host=host, api_key=KEY))
    check_exposure(settings(host=host, api_key_file="somewhere"))
    check_exposure(settings(host=host, keys_file="somewhere"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_none(host):
    check_exposure(settings(host=host))


@pytest.mark.promise("F1")
def test_secrets_are_not_compared_with_equals() -> None:
    """It would tell by its time how much of a key was right."""
    for node in (node for source in (auth, Keyring) for node in ast.walk(ast.parse(inspect.getsource(source)))):
        if isinstance(node, ast.Compare) and any(isinstance(o, (ast.Eq, ast.NotEq, ast.In)) for o in node.ops):
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            assert not names & {"key", "digest", "credential"}, ast.unparse(node)
