"""Fetching images: from which addresses, and what ends a transfer. The servers are real ones on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.vision.fetching import Fetcher, is_public
from mlx_tandem.limits import MAX_IMAGE_BYTES

FIELD = "messages[0].content[1].image_url"
BODY = b"the bytes of an image"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "255.255.255.255",
        "224.0.0.1",
        "198.18.0.1",
        "192.0.2.1",
        "240.0.0.1",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fd00::1",
        "fec0::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "2002:7f00:1::1",
        "2001:0:7f00:1:0:0:80ff:fffe",
    ],
)
def test_an_address_that_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001:80b::200e"])
def test_a_public_address(address: str) -> None:
    assert is_public(address)


@given(st.ip_addresses(network="10.0.0.0/8") | st.ip_addresses(network="fc00::/7") | st.ip_addresses(network="::/32"))
def test_no_address_of_a_private_network_is_public(address: object) -> None:
    assert not is_public(str(address))


@asynccontextmanager
async def answering(reply: bytes, *, more: bytes = b"", seen: list[bytes] | None = None) -> AsyncIterator[int]:
    """A server that answers with `reply`, then `more` until the client leaves; its port."""

    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, EOFError):
            head = await reader.readuntil(b"\r\n\r\n")
            if seen is not None:
                seen.append(head)
            writer.write(reply)
            while more:
                writer.write(more)
                await writer.drain()
            if reply.endswith(b"\r\n"):
                await reader.read()  # It says no more until the client leaves.
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await ended.wait()


def ok(body: bytes, *headers: bytes) -> bytes:
    lines = b"".join(h + b"\r\n" for h in headers)
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%s\r\n" % (len(body), lines) + body


async def fetched(port: int, *, seconds: float = 10.0, path: str = "/a.png?x=1") -> bytes:
    host = f"127.0.0.1:{port}"
    return await Fetcher([host], accepts=lambda address: True, seconds=seconds).fetch(f"http://{host}{path}", FIELD)


def refused(*replies: bytes, more: bytes = b"", seconds: float = 10.0) -> str:
    """The error for an image that is answered like this."""

    async def run() -> str:
        async with answering(b"".join(replies), more=more) as port:
            with pytest.raises(InvalidRequest) as found:
                await fetched(port, seconds=seconds)
        assert found.value.param == FIELD
        return found.value.message

    return asyncio.run(run())


def test_an_image_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # Nothing listens there.
    seen: list[bytes] = []

    async def run() -> bytes:
        async with answering(ok(BODY), seen=seen) as port:
            return await fetched(port)

    assert asyncio.run(run()) == BODY
    head = seen[0].lower()
    assert head.startswith(b"get /a.png?x=1 http/1.1\r\n")
    assert b"user-agent: mlx-tandem\r\n" in head and b"accept-encoding: identity\r\n" in head


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused(status: int) -> None:
    assert "redirect" in refused(b"HTTP/1.1 %d X\r\nlocation: /b.png\r\ncontent-length: 0\r\n\r\n" % status)


@pytest.mark.parametrize("status", [204, 206, 403, 404, 500])
def test_another_status_is_refused(status: int) -> None:
    assert str(status) in refused(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status)


def test_what_does_not_end_is_refused() -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    assert refused(head, more=bytes(1 << 20)) == f"{FIELD} has over {MAX_IMAGE_BYTES} bytes"


def test_headers_that_do_not_end_are_refused() -> None:
    assert "could not be fetched" in refused(b"HTTP/1.1 200 OK\r\n", more=b"x: " + b"y" * 10_000 + b"\r\n")


def test_a_server_that_says_nothing_is_given_up() -> None:
    assert "within 1 s" in refused(b"HTTP/1.1 200 OK\r\n", seconds=1.0)


@pytest.mark.parametrize("reply", [b"", b"garbage\r\n\r\n", ok(BODY)[:-1]])
def test_a_broken_reply_is_refused(reply: bytes) -> None:
    assert "could not be fetched" in refused(reply)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://other.test/a", "allow-image-hosts"),
        ("http://images.test:81/a", "allow-image-hosts"),
        ("https://images.test:80/a", "allow-image-hosts"),
        ("http://images.test.evil.test/a", "allow-image-hosts"),
        ("http://images.test@other.test/a", "password"),
        ("http://user:secret@images.test/a", "password"),
        ("http://images.test:x/a", "valid"),
        ("http://[::1/a", "valid"),
        ("http:///a", "allow-image-hosts"),
        ("http://images.test/a b", "characters"),
        ("http://images.test/a\r\nx: y", "characters"),
        ("http://images.test\\@other.test/", "characters"),
        ("http://images.test/é", "characters"),
        ("http://images.test/" + "a" * 5000, "characters"),
    ],
)
def test_a_url_of_another_place_is_refused(url: str, why: str) -> None:
    fetcher = Fetcher(["images.test"])
    with pytest.raises(InvalidRequest, match=why) as found:
        asyncio.run(fetcher.fetch(url, FIELD))
    assert found.value.param == FIELD
    assert "secret" not in found.value.message


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "169.254.169.254"])
def test_a_host_with_a_private_address_is_refused_though_it_is_named(host: str) -> None:
    """However its address is written: what counts is what the name is resolved to."""
    with pytest.raises(InvalidRequest, match=r"public internet|cannot be resolved"):
        asyncio.run(Fetcher([host]).fetch(f"http://{host}/a", FIELD))


def test_the_address_that_was_checked_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is resolved to another address the next time gains nothing by it."""
    looked_up: list[str] = []

    async def run() -> bytes:
        async with answering(ok(BODY)) as port:
            loop = asyncio.get_running_loop()

            async def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
                looked_up.append(host)
                address = "127.0.0.1" if len(looked_up) == 1 else "127.0.0.2"
                return [(2, 1, 6, "", (address, port))]

            monkeypatch.setattr(loop, "getaddrinfo", resolve)
            fetcher = Fetcher([f"rebinding.test:{port}"], accepts=lambda address: address == "127.0.0.1")
            return await fetcher.fetch(f"http://rebinding.test:{port}/a", FIELD)

    assert asyncio.run(run()) == BODY
    assert looked_up == ["rebinding.test"]


def test_one_address_that_is_not_public_is_enough_to_refuse_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
            return [(2, 1, 6, "", (address, port)) for address in ("8.8.8.8", "10.0.0.1")]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        await Fetcher(["two.test"]).fetch("http://two.test/a", FIELD)

    with pytest.raises(InvalidRequest, match="public internet"):
        asyncio.run(run())
