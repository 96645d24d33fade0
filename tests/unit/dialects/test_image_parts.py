"""The images of each dialect: they become the same parts, and keep the names of their fields."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from mlx_tandem.dialects.anthropic.messages import chat_form as anthropic
from mlx_tandem.dialects.ollama.messages import chat_form as ollama
from mlx_tandem.dialects.openai.bodies import ChatBody
from mlx_tandem.dialects.openai.plans import _check_images
from mlx_tandem.dialects.responses.items import chat_form as responses
from mlx_tandem.dialects.responses.items import input_items
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.messages import chat_messages, image_sources

DATA = base64.b64encode(b"image").decode()
URL = f"data:image/png;base64,{DATA}"
AT = "https://images.test/a.png"


def said(messages: list[dict[str, Any]], fields: dict[str, str]) -> tuple[list[Any], list[tuple[str, str]]]:
    """The contents that the template gets, and the images with their fields."""
    made = chat_messages(messages, images=True)
    return [m["content"] for m in made], [tuple(source) for source in image_sources(messages, fields)]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


IMAGE = {"type": "image"}


def test_openai() -> None:
    content = [
        text("a"),
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": AT}},
        text("b"),
    ]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    assert said(messages, {}) == (
        ["s", [text("a"), IMAGE, IMAGE, text("b")]],
        [(URL, "messages[1].content[1].image_url"), (AT, "messages[1].content[2].image_url")],
    )


def test_anthropic() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    turns = anthropic(
        "s",
        [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "image", "source": source}, text("b"), text("c")]},
            {"role": "user", "content": [text("d"), {"type": "image", "source": {"type": "url", "url": AT}}]},
        ],
    )
    assert said(turns.messages, turns.fields) == (
        ["s", [text("a"), IMAGE, text("b\nc\nd"), IMAGE]],
        [(URL, "messages[1].content[0].source"), (AT, "messages[2].content[1].source")],
    )


def test_responses() -> None:
    content = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": AT, "detail": "auto"}]
    items = input_items([{"role": "user", "content": "x"}, {"role": "user", "content": content}], lambda _: None)
    turns = responses("s", items)
    assert said(turns.messages, turns.fields) == (
        ["s", "x", [text("a"), IMAGE]],
        [(AT, "input[1].content[1].image_url")],
    )


def test_ollama() -> None:
    sent = [
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "a", "images": [DATA, DATA]},
    ]
    turns = ollama(sent)
    data = f"data:image/*;base64,{DATA}"
    assert said(turns.messages, turns.fields) == (
        ["x", "y", [text("a"), IMAGE, IMAGE]],
        [(data, "messages[2].images[0]"), (data, "messages[2].images[1]")],
    )


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_only_the_user_shows_images(role: str) -> None:
    message = {"role": role, "content": [{"type": "image_url", "image_url": {"url": URL}}]}
    with pytest.raises(InvalidRequest, match="of the user only") as found:
        chat_messages([message], images=True)
    assert found.value.param == "messages[0].content[0].image_url"


def test_where_only_text_can_be_used_images_are_refused() -> None:
    message = {"role": "user", "content": [text("a"), {"type": "image_url", "image_url": {"url": URL}}]}
    with pytest.raises(InvalidRequest, match="only text") as found:
        chat_messages([message])
    assert found.value.param == "messages[0].content[1].image_url"
    assert DATA not in found.value.message


@pytest.mark.parametrize(
    ("field", "off", "on"),
    [
        ("truncate_prompt_tokens", [None], [5, -1]),
        ("collect_trajectory", [None, False], [True]),
        ("trajectory_id", [None], ["traj-1"]),
        ("scoring_function", [None], ["gsm8k"]),
        ("echo", [None, False], [True]),
    ],
)
def test_fields_that_cannot_be_used_beside_images(field: str, off: list[Any], on: list[Any]) -> None:
    for value in off:
        _check_images(ChatBody(messages=[], **{field: value}))
    for value in on:
        with pytest.raises(InvalidRequest, match="cannot be used in a chat with images") as refused:
            _check_images(ChatBody(messages=[], **{field: value}))
        assert refused.value.param == field
