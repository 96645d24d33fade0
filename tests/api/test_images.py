"""Images through a real server: what it says is what mlx-vlm says of the same arrays, in every API and beside texts."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlx_tandem.config import Config
from mlx_tandem.dialects.turns import IMAGE_FOLLOWS
from mlx_tandem.generation.vision.client import _setup
from mlx_tandem.generation.vision.layouts import LAYOUTS
from mlx_tandem.generation.vision.messages import GroupJob, Job, Made
from mlx_tandem.generation.vision.videos import BLOCK, TOKEN
from mlx_tandem.generation.vision.worker import Worker
from mlx_tandem.model.vision import library
from mlx_tandem.model_folder import VISION_FAMILIES
from mlx_tandem.types import Image
from tests.images import data_url, frames_url, picture
from tests.serving import RunningServer, demo_config, serving
from tests.tiny_models import VOCAB
from tests.tiny_vision import BEGIN, FAMILIES, IMAGE, VIDEO, Oracle, make

pytestmark = [
    pytest.mark.restarts,
    pytest.mark.skipif(not library.is_installed(), reason="mlx-vlm is not installed"),
]

PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava": (
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
        },
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "qwen3_5": (
        {
            **{"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 64, "max_pixels": 64 * 32},
            **{"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2},
        },
        {},
    ),
}
"""The files preprocessor_config.json and processor_config.json of a family's folder."""


START = "<|vision_start|>"
"""Stands before each image in the qwen families, which find their images by it."""

TEMPLATE = """{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}\
{% for p in m.content %}{{ p.text if p.type == 'text' else 'BLOCK' if p.type == 'video' else 'PLACEHOLDER' }}\
{% endfor %}{% endif %}{% endfor %}[a]"""


def write_texts(folder: Path, family: str) -> None:
    """Write a tokenizer of bytes, a chat template and the processor's settings into a folder."""
    layout = LAYOUTS[VISION_FAMILIES[family].layout]
    words = {"<|pad|>": 0, "<|bos|>": 1, "<|eos|>": 2}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        words[byte] = len(words)
    words |= {f"unused-{i}": i for i in range(len(words), VOCAB) if i not in (IMAGE, BEGIN, VIDEO)}
    words |= {layout.token: IMAGE, START: BEGIN, TOKEN: VIDEO}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|bos|>", "<|eos|>", START, layout.token, TOKEN]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    placeholder = START * bool(FAMILIES[family].grid[0]) + layout.placeholder
    template = TEMPLATE.replace("PLACEHOLDER", placeholder).replace("BLOCK", BLOCK)
    image_processor, processor = PROCESSORS[family]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>"}))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor))
    (folder / "processor_config.json").write_text(json.dumps(processor))


@dataclass
class Seeing:
    """A server whose model reads images, and mlx-vlm's own model of its folder."""

    family: str
    server: RunningServer
    oracle: Oracle
    worker: Worker
    tokenizer: Tokenizer

    def ask(self, *parts: str | bytes, path: str = "/v1/chat/completions") -> dict[str, Any]:
        """Return the reply to a message of texts and images."""
        content = [
            {"type": "text", "text": p}
            if isinstance(p, str)
            else {"type": "image_url", "image_url": {"url": data_url(p)}}
            for p in parts
        ]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 5, "temperature": 0}
        reply = self.server.client.post(path, json=body | {"return_token_ids": True, "ignore_eos": True})
        assert reply.status_code == 200, reply.text
        return reply.json()  # type: ignore[no-any-return]

    def expected(self, prompt: Sequence[int], pictures: Sequence[bytes]) -> list[int]:
        """What mlx-vlm says after a prompt, whose images are these."""
        images, start = [], 0
        for each in pictures:
            made = self.worker._made(Job(each, False))
            assert isinstance(made, Made)
            start = list(prompt).index(IMAGE, start)
            images.append(Image(made.digest, start, sum(made.runs), made.arrays))
            start += sum(made.runs)
        return self.oracle.greedy(tuple(prompt), images, 5)[0]


@pytest.fixture(scope="module", params=PROCESSORS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = make(tmp_path_factory.mktemp("vision") / request.param, request.param)
    write_texts(folder, request.param)
    config: Config = structs.replace(demo_config(folder), adapters=(), adapter_root="")
    config = structs.replace(
        config, engine=structs.replace(config.engine, model=structs.replace(config.engine.model, max_model_len=400))
    )
    setup = _setup(folder)
    assert setup is not None
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "llava":  # one family runs compiled; another needs dozens of kernels of its own
            patch.setenv("MLX_DISABLE_COMPILE", "1")
        with serving(config) as server:
            server.client.timeout = httpx.Timeout(120.0)  # the first image waits for its process
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            yield Seeing(request.param, server, Oracle(folder), Worker(setup, 60.0), tokenizer)


ONE, OTHER = picture(40, 20), picture(41, 20)


def said(reply: dict[str, Any]) -> list[int]:
    return list(reply["choices"][0]["token_ids"])


def test_answers_are_those_of_mlx_vlm(seeing: Seeing) -> None:
    for parts in (("Hi",), ("Hi", ONE, "there"), ("Hi", OTHER, "there"), (ONE, "and", OTHER, "?")):
        reply = seeing.ask(*parts)
        pictures = [part for part in parts if isinstance(part, bytes)]
        assert said(reply) == seeing.expected(reply["prompt_token_ids"], pictures), parts
        assert reply["usage"]["prompt_tokens"] == len(reply["prompt_token_ids"])


def test_a_video_is_told_by_its_frames_and_their_times(seeing: Seeing) -> None:
    """By what mlx-vlm says of the groups that the prompt has, each behind the text with its time."""
    if not VISION_FAMILIES[seeing.family].videos:
        pytest.skip("the family has no videos")
    frames = [picture(32, 24), picture(32, 24, "JPEG"), picture(32, 24, "JPEG", quality=5)]
    content = [
        {"type": "text", "text": "Hi"},
        {"type": "video_url", "video_url": {"url": frames_url(frames)}, "fps": 4},
        {"type": "text", "text": "?"},
    ]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 5, "temperature": 0}
    reply = seeing.server.client.post(
        "/v1/chat/completions", json=body | {"return_token_ids": True, "ignore_eos": True}
    ).json()
    prompt = reply["prompt_token_ids"]
    images, start = [], 0
    for own in (frames[:2], frames[2:]):
        made = seeing.worker._group(GroupJob([Job(frame, False) for frame in own], 3))
        start = prompt.index(VIDEO, start)
        images.append(Image(made.digest, start, made.runs[0], made.arrays))
        start += made.runs[0]
    assert said(reply) == seeing.oracle.greedy(tuple(prompt), images, 5)[0]
    written = seeing.tokenizer.decode(prompt, skip_special_tokens=False).replace(TOKEN * made.runs[0], TOKEN)
    # The first group lies in the middle between 0 and 0.25 seconds, and the frame of the second one is repeated.
    assert f"Hi<0.1 seconds>{BLOCK}<0.5 seconds>{BLOCK}?" in written


def test_an_image_is_found_again_and_another_under_the_same_text_is_not(seeing: Seeing) -> None:
    text = "What do you see in this picture?"
    first, again, other = (
        seeing.ask(text, picture(30, 21)),
        seeing.ask(text, picture(30, 21)),
        seeing.ask(text, picture(30, 22)),
    )
    assert said(first) == said(again) and again["prompt_token_ids"] == first["prompt_token_ids"]
    begin = first["prompt_token_ids"].index(IMAGE)

    def cached(reply: dict[str, Any]) -> int:
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(again) > begin >= cached(other)


def test_rows_with_images_and_texts_share_batches(seeing: Seeing) -> None:
    asked: list[tuple[str | bytes, ...]] = [
        ("a", ONE, "b"),
        ("only text",),
        ("c", OTHER),
        ("a", ONE, "b"),
        ("more text",),
    ]
    alone = [said(seeing.ask(*parts)) for parts in asked]
    with ThreadPoolExecutor(len(asked)) as threads:
        assert [said(reply) for reply in threads.map(lambda parts: seeing.ask(*parts), asked)] == alone


def test_every_api_reads_the_same_image(seeing: Seeing) -> None:
    text = seeing.ask("Hi", ONE)["choices"][0]["message"]["content"]
    data = base64.b64encode(ONE).decode()
    greedy = {"temperature": 0, "model": "tandem-demo"}
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content: list[dict[str, Any]] = [{"type": "text", "text": "Hi"}, {"type": "image", "source": source}]
    messages = {"messages": [{"role": "user", "content": content}], "max_tokens": 5}
    reply = seeing.server.client.post("/v1/messages", json=greedy | messages)
    assert reply.status_code == 200, reply.text
    assert reply.json()["content"][0]["text"] == text
    content = [{"type": "input_text", "text": "Hi"}, {"type": "input_image", "image_url": data_url(ONE)}]
    asked = {"input": [{"role": "user", "content": content}], "max_output_tokens": 16}
    reply = seeing.server.client.post("/v1/responses", json=greedy | asked)
    assert reply.status_code == 200, reply.text
    assert reply.json()["output"][-1]["content"][0]["text"].startswith(text)


def test_an_image_of_a_tool_s_result_is_seen(seeing: Seeing) -> None:
    """It follows the results, as if the user showed it."""
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(ONE).decode()}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image", "source": source}]}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [call]}]
    asked: dict[str, Any] = {"model": "tandem-demo", "temperature": 0, "max_tokens": 5}
    body = asked | {"messages": [*talk, {"role": "user", "content": [result]}]}
    reply = seeing.server.client.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    assert "x-tandem-skipped" not in reply.headers
    told = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    shown = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [told]},
        {"role": "tool", "tool_call_id": "t1", "content": IMAGE_FOLLOWS},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(ONE)}}]},
    ]
    same = seeing.server.client.post("/v1/chat/completions", json=asked | {"messages": shown}).json()
    assert reply.json()["content"][0]["text"] == same["choices"][0]["message"]["content"]
    usage = reply.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == same["usage"]["prompt_tokens"]
