"""Connections that are held open, and requests that come by a name that is not ours."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest

from tests.api.scripted import scripted_server
from tests.serving import RunningServer, demo_config, serving

SECONDS = 0.4
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Impatient, and known by a name of its own."""
    with serving(demo_config(receive_timeout_s=SECONDS, allowed_hosts=("Tandem.test", "other.test:81"))) as running:
        yield running


@pytest.fixture
def sock(server: RunningServer) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        yield sock


def until_closed(sock: socket.socket) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            answer += data
    return answer


def error_of(answer: bytes) -> dict[str, str]:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_a_connection_that_says_nothing(sock):
    assert until_closed(sock) == b""


@pytest.mark.parametrize("sent", [b"P", b"POST /v1/comple", HEAD, HEAD + b"X: y\r\n", b"\r\n", GET + b"GET /li"])
def test_a_head_that_does_not_end(sock, sent):
    sock.sendall(sent)
    answer = until_closed(sock)
    late = answer[answer.rindex(b"HTTP/1.1 ") :]
    assert late.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in late
    assert error_of(late)["code"] == "request_timeout"


@pytest.mark.promise("C2")
@pytest.mark.parametrize("framing", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"])
def test_a_body_that_does_not_end(sock, framing):
    sock.sendall(HEAD + framing)
    answer = until_closed(sock)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in answer
    assert error_of(answer) | {"message": ""} == {
        "message": "",
        "type": "timeout_error",
        "param": None,
        "code": "request_timeout",
    }


@pytest.mark.promise("C2")
@pytest.mark.parametrize(
    ("begin", "drop"),
    [
        (b"GET /livez HTTP/1.1\r\nX: ", b"x"),
        (HEAD + b"Content-Length: 1000000\r\n\r\n", b" "),
        (b"", b"\r\n"),
        (GET, b"\r\n"),
    ],
)
def test_a_byte_now_and_then_is_not_enough(sock, begin, drop):
    """As many as fit between two looks, for as long as they are taken."""
    sock.sendall(begin)
    sock.settimeout(0.02)
    answer = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while True:
            try:
                data = sock.recv(65536)
            except TimeoutError:
                sock.sendall(drop)
                continue
            if not data:
                break
            answer += data
    assert answer[answer.rindex(b"HTTP/1.1 ") :].startswith(b"HTTP/1.1 408")


@pytest.mark.promise("C2")
def test_others_are_answered_beside_many_that_do_not_end(server: RunningServer):
    """Silent ones, heads and bodies that stop in the middle: they are cut off, and nobody waits for them."""
    host, port = server.url.removeprefix("http://").split(":")
    begun = (b"", b"POST /v1/comple", HEAD + b"Content-Length: 100\r\n\r\n{")
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(socket.create_connection((host, int(port)), timeout=20)) for _ in range(300)]
        for i, sock in enumerate(many):
            sock.sendall(begun[i % 3])
        assert server.complete("x", max_tokens=2).status_code == 200
        answers = [until_closed(sock) for sock in many]
    assert {answer[:12] for answer in answers} == {b"", b"HTTP/1.1 408"}


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEAD.replace(b"application/json", b"text/plain") + b"Content-Length: 9", 415),
        (HEAD + b"Content-Length: 9999999", 413),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 9", 415),
    ],
)
def test_a_body_that_is_not_read_ends_the_connection(sock, head, status):
    sock.sendall(head + b"\r\n\r\n")
    answer = until_closed(sock)
    assert answer.startswith(b"HTTP/1.1 %d" % status)
    assert b"connection: close" in answer


def test_the_rest_of_a_refused_body_that_never_comes(sock):
    sock.sendall(HEAD.replace(b"completions", b"nothing") + b"Content-Length: 100\r\n\r\n")
    answer = until_closed(sock)
    assert answer.startswith(b"HTTP/1.1 404")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_request_in_pieces_is_answered(sock):
    body = b'{"prompt": "x", "max_tokens": 1}'
    for piece in (HEAD[:5], HEAD[5:], b"Content-Length: %d\r\n\r\n" % len(body), body[:7], body[7:], GET[:9], GET[9:]):
        sock.sendall(piece)
    answer = b""
    while answer.count(b"HTTP/1.1 200") < 2:
        data = sock.recv(65536)
        assert data, answer
        answer += data


@pytest.mark.promise("C3")
def test_a_head_without_measure(sock):
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        for _ in range(1000):
            sock.sendall(b"GET / HTTP/1.1\r\n" if not _ else b"X: " + b"a" * 10_000 + b"\r\n")
    answer = until_closed(sock)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("line", [b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n"])
def test_what_is_not_http(sock, line):
    sock.sendall(line)
    answer = until_closed(sock)
    assert answer.startswith(b"HTTP/1.1 400")
    assert error_of(answer)["code"] == "invalid_request"


@pytest.mark.promise("C7")
@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"localhost", 200),
        (b"localhost:1234", 200),
        (b"LocalHost", 200),
        (b"127.0.0.1:8000", 200),
        (b"127.3.4.5", 200),
        (b"[::1]:8000", 200),
        (b"tandem.test", 200),
        (b"TANDEM.test:99", 200),
        (b"other.test:81", 200),
        (b"other.test", 403),
        (b"other.test:82", 403),
        (b"evil.test", 403),
        (b"evil.test:8000", 403),
        (b"localhost.evil.test", 403),
        (b"127.0.0.1.evil.test", 403),
        (b"localhost@evil.test", 403),
        (b"evil.test#localhost", 403),
        (b"192.168.1.1", 403),
        (b"[::2]", 403),
        (b"0x7f.1", 403),
        (b"2130706433", 403),
        (b"localhost:", 403),
        (b"localhost:80:80", 403),
        (b"localhost, evil.test", 403),
        (b"localhost\r\nHost: localhost", 403),
        (b"localhost\r\nHost: evil.test", 403),
        (b"", 403),
        (b"\xe9", 403),
    ],
)
def test_hosts(sock, host, status):
    """A page of another site can give this machine a name of its own; its requests then carry that name."""
    sock.sendall(b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
    answer = until_closed(sock)
    assert int(answer[9:12]) == status
    if status == 403:
        assert error_of(answer)["code"] == "host_not_allowed"


def test_no_host(sock):
    sock.sendall(b"GET http://localhost/health HTTP/1.1\r\nX-Forwarded-Host: localhost\r\nConnection: close\r\n\r\n")
    assert until_closed(sock).startswith(b"HTTP/1.1 403")


def test_with_a_key_any_name_will_do():
    with scripted_server(api_key="k") as (client, _, _):
        headers = {"host": "evil.test", "authorization": "Bearer k"}
        assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/v1/models", headers={"host": "evil.test"}).status_code == 401
