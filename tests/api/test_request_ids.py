"""The id that every reply carries: the client's own, when it can be repeated, else one of the server's."""

from __future__ import annotations

import re
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving import RunningServer

OURS = re.compile(r"(req|chatcmpl|cmpl)-[0-9a-f]{24}")
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def ids(server: RunningServer, sent: list[bytes], path: str = "/livez") -> list[str]:
    """What the reply to a GET with these X-Request-Id headers has for its own."""
    headers = [(b"x-request-id", value) for value in sent]
    return server.client.get(path, headers=headers).headers.get_list("x-request-id")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/livez", None, 200),
        ("GET", "/v1/models", None, 200),
        ("GET", "/metrics", None, 200),
        ("GET", "/nothing", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("POST", "/v1/completions", {"prompt": "x", "no_such": 1}, 400),
        ("POST", "/v1/chat/completions", CHAT, 200),
        ("POST", "/v1/chat/completions", CHAT | {"stream": True}, 200),
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, 200),
    ],
)
def test_every_reply_has_one(server, method, path, body, status):
    reply = server.client.request(method, path, json=body)
    assert reply.status_code == status
    (own,) = reply.headers.get_list("x-request-id")
    assert OURS.fullmatch(own)
    if status == 200 and body is not None:
        assert own in reply.text, "a completion has one id"
    echoed = server.client.request(method, path, json=body, headers={"x-request-id": "trace/1:a"})
    assert echoed.headers.get_list("x-request-id") == ["trace/1:a"]


LEGAL = [*range(0x20, 0x7F), *range(0x80, 0x100), 0x09]
"""Bytes that the value of a header may have."""

VALUES = st.one_of(*(st.lists(st.sampled_from(some), min_size=1, max_size=150) for some in (LEGAL, LEGAL[1:95])))


@pytest.mark.promise("F11")
@given(VALUES.map(lambda value: bytes(value).strip(b" \t")))
@settings(max_examples=200)
def test_an_id_is_repeated_if_it_is_short_and_printable(server, value):
    (own,) = ids(server, [value])
    text = value.decode("latin-1")
    assert own == text or OURS.fullmatch(own)
    assert (own == text) is bool(re.fullmatch(r"[!-~]{1,128}", text))


@pytest.mark.parametrize("sent", [[b"a", b"b"], [b"a", b"a"], [b"a b"], [b"\xe9"], [b"x" * 129], [b""]])
def test_other_ids_are_replaced(server, sent):
    (own,) = ids(server, sent)
    assert OURS.fullmatch(own)


@pytest.mark.parametrize("value", [b"a\x00b", b"a\x7fb", b"a\x1b[31m", b"a\rX-Evil: 1", b"a\nX-Evil 1"])
def test_what_is_no_header_value(server, value):
    """Nothing of it comes back."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(
            b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: " + value + b"\r\n\r\n"
        )
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert b"evil" not in answer.lower() and b"\x1b" not in answer and b"\0" not in answer
    assert answer.count(b"x-request-id: ") == answer.count(b"HTTP/1.1 ") == 1
