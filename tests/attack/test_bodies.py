"""Bodies and connections that are not what they should be."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import until

JSON = {"content-type": "application/json"}
GOOD = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'


def post(server, body: bytes, **headers: str):
    return server.client.post("/v1/chat/completions", content=body, headers=JSON | headers)


def with_content(text: bytes) -> bytes:
    return b'{"messages": [{"role": "user", "content": ' + text + b'}], "max_tokens": 1}'


@pytest.mark.promise("C4", "C5")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b"3",
        GOOD[:-1],
        GOOD + b"x",
        GOOD + GOOD,
        b"\xef\xbb\xbf" + GOOD,
        b"\xff\xfe" + GOOD,
        GOOD.decode().encode("utf-16"),
        with_content(b'"\xff"'),
        with_content(b'"\xc3"'),
        with_content(b'"\xed\xa0\x80"'),
        with_content(b'"\x00"'),
        with_content(b'"\n"'),
        with_content(b"'hi'"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'{"max_tokens": 1, "max_tokens": 2, "messages": []}',
        b"// comment\n" + GOOD,
        b'{"messages": [],}',
    ],
)
def test_malformed_bodies(server, body):
    response = post(server, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in response.text


def test_the_place_is_named(server):
    def param(body: bytes) -> str:
        response = post(server, body)
        assert response.status_code == 400
        return response.json()["error"]["param"]

    assert param(b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}') == "content"
    assert param(with_content(b'"a\\ud800b"')) == "messages[0].content"
    assert param(b'{"stop": ["ok", "\\udfff"], "messages": []}') == "stop[1]"
    assert param(b'{"messages": [], "temperature": {"a": [[[[[[1]]]]]]}}') in ("temperature", "messages")


TEXTS = ["\0", "\u2028\u2029", "\x1b[31m", "🦊" * 50, "\u202e", "\ufeff", "é" * 100, "\U0010ffff"]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_any_legal_text_is_answered(server, text):
    assert server.chat(text, max_tokens=1).status_code == 200
    assert server.complete(text, max_tokens=1).status_code == 200
    assert post(server, with_content(json.dumps(text).encode())).status_code == 200


@pytest.mark.promise("G4")
@pytest.mark.parametrize(
    "media", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx", "text/json"]
)
def test_the_media_type_must_be_json(server, media):
    response = server.client.post("/v1/chat/completions", content=GOOD, headers={"content-type": media})
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.promise("C6")
def test_compressed_bodies_are_refused(server):
    assert post(server, gzip.compress(GOOD), **{"content-encoding": "gzip"}).status_code == 415


def test_parameters_of_the_media_type_are_allowed(server):
    response = post(server, GOOD, **{"content-type": "Application/JSON; charset=utf-8"})
    assert response.status_code == 200


@pytest.mark.promise("C1")
def test_a_body_over_the_limit(server):
    response = server.client.post("/v1/chat/completions", content=b" " * (1 << 20) + GOOD, headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "too_large"


def exchange(server, request: bytes) -> bytes:
    """Raw bytes out, what comes back until the server closes or has answered once."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        answer = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(request)  # fails when it is refused before all was sent
        with contextlib.suppress(ConnectionResetError):
            while b"}}" not in answer and (data := sock.recv(65536)):
                answer += data
        return answer


def exchange_all(server, request: bytes) -> bytes:
    """Raw bytes out and no more, then what comes back until the server closes."""
    host, port = server.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(request)
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(65536):
            answer += data
    return answer


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.promise("C1")
def test_a_chunked_body_over_the_limit(server):
    """No length is announced; the limit is met while reading."""
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    answer = exchange(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 40)
    assert answer.startswith(b"HTTP/1.1 413")


def test_a_length_over_the_limit_is_refused_before_the_body_comes(server):
    assert exchange(server, HEAD + b"Content-Length: 99999999999\r\n\r\n").startswith(b"HTTP/1.1 413")


@pytest.mark.promise("C1")
@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"Content-Length: abc\r\n\r\n",
        b"Bad Header: x\r\n\r\n",
        b"X: " + b"a" * (1 << 20) + b"\r\n\r\n",
    ],
)
def test_broken_heads(server, headers):
    answer = exchange(server, HEAD + headers)
    assert answer == b"" or answer.split(b" ")[1] in (b"400", b"431")


def errors_of(server) -> dict[str, float]:
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    return {s.labels["code"]: s.value for f in families for s in f.samples if s.name == "tandem_errors_total"}


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 1000\r\n\r\n" + GOOD, b"Transfer-Encoding: chunked\r\n\r\n9\r\n{"]
)
def test_a_client_that_gives_up_in_the_middle_of_its_body(server, framing):
    """Its connection ends without waiting for the rest, nothing is answered, and nothing counts as a failure."""
    before = errors_of(server)
    host, port = server.url.removeprefix("http://").split(":")
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=20) as sock:  # less than a body may take to come
            sock.sendall(HEAD + framing)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(65536) == b""
    assert errors_of(server) == before


def test_a_post_without_a_length_is_told_so(server):
    """Without a length there is no body (RFC 9112, 6.3), so what follows the head is no part of the request."""
    for body in (b"", GOOD):
        first, _, rest = exchange_all(server, HEAD + b"\r\n" + body).partition(b"}}")
        assert first.startswith(b"HTTP/1.1 400")
        assert b"Content-Length" in first
        assert rest.startswith(b"HTTP/1.1 400") is bool(body)


def test_a_request_before_garbage_is_answered(server):
    get = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    post = HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD
    for valid in (get, post, get + post):
        answer = exchange_all(server, valid + b"garbage\r\n\r\n")
        assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200"] * valid.count(b"HTTP/1.1") + [b"400"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_post_and_then_the_end_is_answered_wholly(server, stream):
    body = json.dumps(json.loads(GOOD) | {"stream": stream, "max_tokens": 300, "temperature": 0}).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    answer = exchange_all(server, request)
    assert b"HTTP/1.1 200" in answer
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}}")
    assert b'"finish_reason":"stop"' in answer


@pytest.mark.promise("C9")
def test_pipelined_requests_are_answered_in_order(server):
    host, port = server.url.removeprefix("http://").split(":")
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(request * 3 + b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert answer.count(b"HTTP/1.1 200") == 4
    assert answer.endswith(b'{"status":"ok"}')


def test_a_long_prompt_is_refused_by_its_tokens(server):
    response = server.chat("word " * 100_000)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert response.json()["error"]["param"] == "messages"


def memory(server) -> int:
    """The bytes that the front has in memory."""
    status = Path(f"/proc/{server.process.pid}/statm").read_text()
    return int(status.split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.promise("C11")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_many_bodies_that_never_end(server):
    """They share a limit on their bytes. Whoever sends another body is answered meanwhile, be it small or large."""
    size = (1 << 20) - 1
    head = HEAD + b"Content-Length: %d\r\n\r\n" % (size + 1)
    host, port = server.url.removeprefix("http://").split(":")
    before = memory(server)
    with contextlib.ExitStack() as stack:
        for _ in range(160):
            sock = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                sock.sendall(head + b" " * size)
        until(lambda: server.client.get("/v1/engine/metrics").json()["refused"].get("received_bodies", 0) >= 90)
        assert memory(server) - before < 116 << 20
        assert server.chat("hi", max_tokens=1).status_code == 200
        assert post(server, GOOD + b" " * 900_000).status_code == 200
