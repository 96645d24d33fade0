"""Requests with images, as attackers send them: a real server with its workers, over an engine that tests speak for."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from msgspec import structs
from safetensors.numpy import load

from mlx_tandem.engine.messages import Output, Submit
from mlx_tandem.types import Delta, Request, VisionInfo
from tests.api.scripted import INFO, Peer, scripted_server
from tests.images import data_url, frames_url, picture, png_header, vision_folder

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
    vision = VisionInfo(token, video_token=token + 1)
    info = structs.replace(INFO, vocab_size=token + 2, max_model_len=1024, vision=vision)
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


FRAMES = [picture(56, 28), picture(56, 28, "JPEG"), picture(56, 28, "JPEG", quality=5)]
"""Three frames of 2 tokens each."""


def video(kind: str, frames: Sequence[bytes], fps: float | None = None) -> dict[str, Any]:
    """A chat with a text and a video in one of its forms."""
    given: Any = {"url": frames_url(frames)} if kind == "video_url" else [data_url(frame) for frame in frames]
    body = chat()
    body["messages"][0]["content"].append({"type": kind, kind: given} | ({"fps": fps} if fps else {}))
    return body


@pytest.mark.parametrize("kind", ["video_url", "video"])
def test_the_groups_of_a_video_go_to_the_engine_one_behind_the_other(reading: Reading, kind: str) -> None:
    """Each is found processed when it comes again, also in a longer video."""
    hits = reading_hits(reading)
    body = video(kind, FRAMES)
    body["messages"][0]["content"].append(part(data_url(picture(28, 28))))
    request, reply = answered(reading, CHAT, body)
    assert reply.json()["usage"]["prompt_tokens"] == len(request.prompt)
    first, second, image = request.images
    assert (first.tokens, second.start, second.tokens, image.tokens) == (2, first.start + 2, 2, 1)
    assert request.prompt[first.start : first.start + 5] == (reading.token + 1,) * 4 + (reading.token,)
    assert [(i.time, i.follows) for i in request.images] == [(0, False), (1, True), (0, False)]
    arrays = load(first.arrays)
    assert arrays["video_grid_thw"].tolist() == [[1, 2, 4]]
    assert arrays["pixel_values_videos"].shape == (8, 3 * 2 * 14 * 14)
    again, _ = answered(reading, CHAT, body)
    assert again.images == request.images and reading_hits(reading) >= hits + 3
    other, _ = answered(reading, CHAT, video(kind, [FRAMES[0], FRAMES[1], FRAMES[0]]))
    assert other.images[0].digest == first.digest and other.images[1].digest != second.digest


def reading_hits(reading: Reading) -> float:
    """How many images and groups were found processed."""
    text = reading.client.get("/metrics").text
    line = next(line for line in text.splitlines() if line.startswith("tandem_kept_image_hits_total "))
    return float(line.split()[1])


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


@pytest.mark.promise("G2")
@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_used_is_refused_by_its_field(reading: Reading, what: str) -> None:
    url, why = WRONG[what]
    reply = reading.client.post(CHAT, json=chat(url))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, FIELD)
    assert why in error["message"]
    assert len(reply.content) < 1000


@pytest.mark.promise("G3")
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


VIDEO_FIELD = "messages[0].content[1].video"


def test_what_a_video_cannot_hold_is_refused_by_its_field(reading: Reading) -> None:
    """By the number of its frame, where all have one field."""
    lost = [FRAMES[0], FRAMES[1], FRAMES[2][:60]]
    large = bytes((16 << 20) + 3)
    for body, field, why in (
        (video("video_url", lost), f"{VIDEO_FIELD}_url", "frame 2 is"),
        (video("video", lost), f"{VIDEO_FIELD}[2]", "frame 2 is"),
        (video("video", [FRAMES[0], picture(28, 28)]), f"{VIDEO_FIELD}[1]", "another size"),
        (video("video", [*FRAMES[:2], picture(28, 28)]), f"{VIDEO_FIELD}[2]", "another size"),
        (video("video", [FRAMES[0], png_header(50_000, 50_000)]), f"{VIDEO_FIELD}[1]", "pixels"),
        (video("video_url", [FRAMES[0], large]), f"{VIDEO_FIELD}_url", "bytes"),
        (video("video", [b""] * 129), VIDEO_FIELD, "at most 128 frames"),
        (video("video", FRAMES, 0.001), "messages[0].content[1].fps", "between"),
    ):
        error = reading.client.post(CHAT, json=body).json()["error"]
        assert error["param"] == field, error
        assert why in error["message"] and len(error["message"]) < 400


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


def test_a_family_without_videos_refuses_them_by_name(tmp_path: Path) -> None:
    folder, token = vision_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llava"}))
    info = structs.replace(INFO, vision=VisionInfo(token))
    with scripted_server(info, folder) as (client, _, _):
        error = client.post(CHAT, json=video("video", FRAMES)).json()["error"]
        why = "videos are not served for models of the type 'llava', only images"
        assert (error["param"], error["message"]) == (VIDEO_FIELD, f"{VIDEO_FIELD}: {why}")


def test_a_folder_without_a_placeholder_of_videos_refuses_them(tmp_path: Path) -> None:
    folder, token = vision_folder(tmp_path)
    with scripted_server(structs.replace(INFO, vision=VisionInfo(token)), folder) as (client, _, _):
        error = client.post(CHAT, json=video("video", FRAMES)).json()["error"]
        assert error["param"] == VIDEO_FIELD and "not served for this model" in error["message"]


def test_a_model_that_reads_text_refuses_images_by_name(tmp_path: Path) -> None:
    with scripted_server() as (client, _, _):
        for kind in ("video", "video_url"):
            assert "this model reads text only" in client.post(CHAT, json=video(kind, FRAMES)).text
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
