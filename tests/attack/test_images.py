"""Requests with images, as attackers send them: a real server with its workers, over an engine that tests speak for."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from msgspec import structs

from mlx_tandem.engine.messages import Output, Submit
from mlx_tandem.types import Delta, Request, VisionInfo
from tests.api.scripted import INFO, Peer, scripted_server
from tests.images import data_url, picture, png_header, vision_folder

CHAT = "/v1/chat/completions"
FIELD = "messages[0].content[1].image_url"


class Reading(NamedTuple):
    """A server whose model reads images, the engine's end, and the id of the placeholder."""

    client: httpx.Client
    peer: Peer
    token: int


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
    folder, token = vision_folder(tmp_path_factory.mktemp("vision"))
    info = structs.replace(INFO, vocab_size=token + 1, max_model_len=1024, vision=VisionInfo(token))
    limits = {"max_image_request_bytes": 24 << 20, "allow_image_hosts": ("localhost",)}
    with scripted_server(info, folder, **limits) as (client, peer, _):
        client.timeout = httpx.Timeout(120.0)  # The first image waits for its process.
        yield Reading(client, peer, token)


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*urls: str) -> dict[str, Any]:
    content = [{"type": "text", "text": "What is this?"}, *map(part, urls)]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4}


def answered(reading: Reading, path: str, body: dict[str, Any]) -> tuple[Request, httpx.Response]:
    """The request that the engine gets for a body, and the reply to the answer of one token."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(reading.client.post, path, json=body)
        request = reading.peer.hear(Submit).request
        reading.peer.say(Output([Delta(request.id, 0, (5,), finish="stop")]))
        return request, reply.result()


def test_the_image_of_an_earlier_turn_is_not_processed_again(reading: Reading) -> None:
    """Under any URL of the same file; another file is another image."""
    first, second = picture(140, 28), picture(28, 140)

    def counts() -> list[float]:
        text = reading.client.get("/metrics").text
        return [
            float(next(line for line in text.splitlines() if line.startswith(f"tandem_kept_image_{name} ")).split()[1])
            for name in ("hits_total", "misses_total", "bytes")
        ]

    hits, misses, _ = counts()
    (one,) = answered(reading, CHAT, chat(data_url(first)))[0].images
    again, other = answered(reading, CHAT, chat(data_url(first, "image/x-same"), data_url(second)))[0].images
    assert (again.digest, again.arrays) == (one.digest, one.arrays) and other.digest != one.digest
    now = counts()
    assert now[:2] == [hits + 1, misses + 2]
    assert now[2] >= len(one.arrays) + len(other.arrays)


BASE64 = base64.b64encode(picture(56, 28)).decode()
SOURCE = {"type": "base64", "media_type": "image/png", "data": BASE64}
BODIES = {
    CHAT: chat(data_url(picture(56, 28))),
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{BASE64}"}]}
        ],
        "max_output_tokens": 4,
    },
    "/v1/messages": {
        "model": "base",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}],
    },
    "/api/chat": {
        "model": "base",
        "stream": False,
        "messages": [{"role": "user", "content": "x", "images": [BASE64]}],
    },
    "/api/generate": {"model": "base", "stream": False, "prompt": "x", "images": [BASE64]},
}
"""A body with the same image for each dialect."""


@pytest.mark.parametrize("path", BODIES)
def test_every_dialect_gives_the_engine_the_image(reading: Reading, path: str) -> None:
    request, reply = answered(reading, path, BODIES[path])
    assert reply.status_code == 200, reply.text
    (image,) = request.images
    assert (image.tokens, len(image.digest)) == (2, 16)
    assert request.prompt[image.start : image.start + 2] == (reading.token,) * 2
    assert request.prompt.count(reading.token) == 2
    usage = reply.json().get("usage")
    if usage is not None:
        counted = usage.get("prompt_tokens", usage.get("input_tokens"))
        assert counted == len(request.prompt)


def test_images_of_several_turns_keep_their_order(reading: Reading) -> None:
    sizes = ((56, 28), (28, 28), (84, 28))
    turns = [chat(data_url(picture(*size)))["messages"][0] for size in sizes]
    messages = [turns[0], {"role": "assistant", "content": "a cat"}, *turns[1:]]
    request, _ = answered(reading, CHAT, {"messages": messages, "max_tokens": 4})
    assert [image.tokens for image in request.images] == [2, 1, 3]
    assert [image.start for image in request.images] == sorted(image.start for image in request.images)
    assert len({image.digest for image in request.images}) == 3


def test_the_text_of_a_placeholder_is_text(reading: Reading) -> None:
    body = chat(data_url(picture(56, 28)))
    body["messages"][0]["content"][0]["text"] = "<|image_pad|><|image_pad|>"
    request, _ = answered(reading, CHAT, body)
    assert request.prompt.count(reading.token) == request.images[0].tokens == 2


@pytest.mark.parametrize(("path", "count"), [("/tokenize", "count"), ("/v1/messages/count_tokens", "input_tokens")])
def test_the_tokens_of_images_are_counted(reading: Reading, path: str, count: str) -> None:
    body: dict[str, Any] = BODIES["/v1/messages" if "messages" in path else CHAT]
    request, _ = answered(reading, "/v1/messages" if "messages" in path else CHAT, body)
    kept = {key: value for key, value in body.items() if key in ("model", "messages")}
    reply = reading.client.post(path, json=kept)
    assert reply.json()[count] == len(request.prompt), reply.text


BOMB = data_url(png_header(50_000, 50_000))
WRONG = {
    "a bomb": (BOMB, "pixels"),
    "a line": (data_url(picture(402, 2)), "times as long"),
    "a broken file": (data_url(b"\x89PNG\r\n\x1a\n" + b"\xff" * 64), "image"),
    "a file that is cut off": (data_url(picture(64, 64)[:2000]), "cut off"),
    "another format": (data_url(picture(8, 8, "BMP"), "image/bmp"), "PNG"),
    "nothing": ("data:image/png;base64,", "image"),
    "no base64": ("data:image/png;base64,!!!", "base64"),
    "no media type": ("data:text/html;base64,AAAA", "data:image"),
    "not encoded": ("data:image/svg+xml,<svg/>", "data:image"),
    "too many bytes": (data_url(bytes((16 << 20) + 3)), "bytes"),
    "a file": ("file:///etc/passwd", "data:"),
    "a path": ("/etc/passwd", "data:"),
    "an empty text": ("", "data:"),
    "another host": ("http://images.test/a.png", "allow-image-hosts"),
    "metadata of a cloud": ("http://169.254.169.254/latest/meta-data", "allow-image-hosts"),
    "this machine": ("http://localhost/a.png", "public internet"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_used_is_refused_by_its_field(reading: Reading, what: str) -> None:
    url, why = WRONG[what]
    reply = reading.client.post(CHAT, json=chat(url))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, FIELD)
    assert why in error["message"]
    assert len(reply.content) < 1000


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/responses", "input[0].content[0].image_url"),
        ("/v1/messages", "messages[0].content[0].source"),
        ("/api/chat", "messages[0].images[0]"),
        ("/api/generate", "images[0]"),
    ],
)
def test_every_dialect_names_the_field_of_a_bomb(reading: Reading, path: str, field: str) -> None:
    text = json.dumps(BODIES[path]).replace(BASE64, BOMB.partition(",")[2])
    reply = reading.client.post(path, content=text, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert field in reply.text and "pixels" in reply.text


def test_too_many_images_are_refused(reading: Reading) -> None:
    reply = reading.client.post(CHAT, json=chat(*[BOMB] * 17))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages[0].content[17].image_url")


def test_a_prompt_that_images_make_too_long_is_refused(reading: Reading) -> None:
    reply = reading.client.post(CHAT, json=chat(*[data_url(picture(224, 224))] * 16))
    assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("field", ["truncate_prompt_tokens", "echo"])
def test_what_cannot_be_done_with_images_is_refused(reading: Reading, field: str) -> None:
    reply = reading.client.post(CHAT, json=BODIES[CHAT] | {field: 1 if "tokens" in field else True})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


def test_bodies_without_images_keep_their_limit(reading: Reading) -> None:
    text = "x" * (1 << 20)
    assert reading.client.post("/v1/completions", json={"prompt": text}).status_code == 413
    assert reading.client.post(CHAT, content=b" " * (25 << 20)).status_code in (413, 415)


def test_images_are_not_logged(reading: Reading, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    answered(reading, CHAT, BODIES[CHAT])
    reading.client.post(CHAT, json=chat(data_url(picture(64, 64)[:2000])))
    assert BASE64[:40] not in caplog.text
    assert base64.b64encode(picture(64, 64)).decode()[:40] not in caplog.text


def test_a_model_that_reads_text_refuses_images_by_name(tmp_path: Path) -> None:
    with scripted_server() as (client, _, _):
        for path, body in BODIES.items():
            reply = client.post(path, json=body)
            assert reply.status_code == 400, (path, reply.text)
            assert "this model reads text only" in reply.text
        assert client.post(CHAT, json=BODIES[CHAT]).json()["error"]["param"] == FIELD


def test_a_folder_whose_images_the_engine_does_not_serve_refuses_them(tmp_path: Path) -> None:
    folder, token = vision_folder(tmp_path)
    info = structs.replace(INFO, vision=VisionInfo(token, "the weights of the encoder are missing"))
    with scripted_server(info, folder) as (client, _, _):
        error = client.post(CHAT, json=BODIES[CHAT]).json()["error"]
        assert (error["param"], error["message"]) == (FIELD, f"{FIELD}: the weights of the encoder are missing")
