"""Ollama's dialect without a server: what requests become, and that a stream tells what a whole reply tells."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from msgspec import structs

from mlx_tandem.dialects.ollama.bodies import GenerateBody, Options, refuse_unsupported
from mlx_tandem.dialects.ollama.messages import chat_form
from mlx_tandem.dialects.ollama.models import _in_words
from mlx_tandem.dialects.ollama.plans import _sampling
from mlx_tandem.dialects.ollama.renderer import ChatRenderer, GenerateRenderer, OllamaRenderer
from mlx_tandem.dialects.openai.logprobs import ChatLogprobs
from mlx_tandem.dialects.turns import IMAGE_FOLLOWS, IMAGE_UNSUPPORTED
from mlx_tandem.errors import EngineDied, InvalidRequest
from mlx_tandem.generation.answers import Spoken
from mlx_tandem.generation.events import Finish, PromptRead, ReasoningDelta, TextDelta, Usage
from mlx_tandem.generation.sampling import Sampling
from mlx_tandem.types import TokenLogprob
from tests.answers import Said, said

VARYING = ("created_at", "total_duration")


def joined(stream: bytes, place: str) -> dict[str, Any]:
    """The reply that a client makes of a stream. Only its last line is done."""
    parts = [json.loads(line) for line in stream.splitlines()]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    whole = parts[-1]
    message: dict[str, Any] = {}
    for part in parts:
        own = part["message"] if place == "message" else {k: part[k] for k in ("response", "thinking") if k in part}
        for key, value in own.items():
            message[key] = value if key == "role" or key not in message else message[key] + value
    return whole | ({"message": message} if place == "message" else message)


@pytest.mark.parametrize(("kind", "place"), [(ChatRenderer, "message"), (GenerateRenderer, "response")])
@example_settings(max_examples=100)
@given(answer=said())
def test_a_stream_tells_what_a_whole_reply_tells(kind: type[OllamaRenderer], place: str, answer: Said) -> None:
    streamed = joined(answer.stream(kind("base", 0.0, 0.5)), place)
    whole = json.loads(answer.whole(kind("base", 0.0, 0.5)))
    for name in VARYING:
        assert streamed.pop(name) and whole.pop(name)
    assert streamed == whole
    assert whole["load_duration"] == 500_000_000


@example_settings(max_examples=60)
@given(answer=said())
def test_lines_are_in_the_order_of_the_answer(answer: Said) -> None:
    *lines, _ = map(json.loads, answer.stream(ChatRenderer("base", 0.0, 0.0)).splitlines())
    order: list[str] = []
    for line in lines:
        said = line["message"]
        kind = "text" if said["content"] else "reasoning" if "thinking" in said else said["tool_calls"][0]["id"]
        order += [kind] if order[-1:] != [kind] else []
    (found,) = answer.answers.choices
    assert order == [part.kind if isinstance(part, Spoken) else part.id for part in found.parts]


@pytest.mark.parametrize("kind", [ChatRenderer, GenerateRenderer])
def test_a_stream_has_the_logprobs_of_all_tokens_those_without_text_included(kind: type[OllamaRenderer]) -> None:
    tokenizer: Any = SimpleNamespace(token_bytes=lambda token: b"%d" % token)
    own = [((token,), (TokenLogprob(-0.5 * token, -9.0),)) for token in range(5)]
    events = [
        PromptRead(0, cached=0),
        ReasoningDelta(0, "Hm.", *own[0]),
        ReasoningDelta(0, "", *own[1]),
        TextDelta(0, "Yes.", *own[2]),
        TextDelta(0, "", *own[3]),
        Finish(0, "stop", None, *own[4]),
    ]
    lines = Said(events, Usage(7, 0, 5)).stream(kind("base", 0.0, 0.0, ChatLogprobs(tokenizer))).splitlines()
    told = [[one["token"] for one in json.loads(line).get("logprobs", ())] for line in lines]
    assert told == [["0"], ["1", "2"], ["3", "4"]]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [(999, "999"), (1000, "1.0K"), (10**6 - 1, "1000.0K"), (10**6, "1.0M"), (7_620_000_000, "7.6B")],
)
def test_a_number_of_parameters_in_words(parameters: int, words: str) -> None:
    assert _in_words(parameters) == words


def test_an_error_is_a_line_of_its_own() -> None:
    assert ChatRenderer("base", 0.0, 0.0).error(EngineDied("it died")) == b'{"error":"it died"}\n'


def test_messages() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}, "index": 0}, "extra": 1}
    sent = [
        {"role": "system", "content": "Be brief.", "images": None},
        {"role": "user", "content": "Add.", "images": []},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call, call | {"id": "c1"}]},
        {"role": "tool", "tool_name": "add", "content": "1"},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant"},
    ]
    made = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert chat_form(sent).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [made, {"id": "c1"} | made]},
        {"role": "tool", "name": "add", "content": "1"},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": ""},
    ]


def test_images_of_results_follow_the_results_where_the_model_sees() -> None:
    sent = [
        {"role": "tool", "tool_name": "look", "content": "a", "images": ["aQ=="]},
        {"role": "tool", "tool_call_id": "c1", "images": ["aQ=="]},
        {"role": "user", "content": "b"},
    ]
    url = {"type": "image_url", "image_url": {"url": "data:image/*;base64,aQ=="}}
    turns = chat_form(sent, sees=True)
    assert turns.messages == [
        {"role": "tool", "content": f"a\n{IMAGE_FOLLOWS}", "name": "look"},
        {"role": "tool", "content": IMAGE_FOLLOWS, "tool_call_id": "c1"},
        {"role": "user", "content": [url, url]},
        {"role": "user", "content": "b"},
    ]
    assert [*turns.fields.values()] == ["messages[0].images[0]", "messages[1].images[0]"]
    blind = chat_form(sent)
    assert [m["content"] for m in blind.messages] == [f"a\n{IMAGE_UNSUPPORTED}", IMAGE_UNSUPPORTED, "b"]
    assert blind.skipped == ["messages[0].images[0] image", "messages[1].images[0] image"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": "a", "images": ["x"]}, "messages[0].images"),
        ({"role": "user", "content": "a", "images": [3]}, "messages[0].images[0]"),
        ({"role": "robot", "content": "a"}, "messages[0].role"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function.name"),
        (3, "messages[0]"),
    ],
)
def test_wrong_messages_are_refused_by_name(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as found:
        chat_form([message])
    assert found.value.param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [("template", "x"), ("suffix", "x"), ("context", [1])],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as found:
        refuse_unsupported(GenerateBody(model="base", **{field: value}))
    assert found.value.param == field


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"mirostat": 1}, "mirostat"),
        ({"tfs_z": 0.5}, "tfs_z"),
        ({"penalize_newline": False, "repeat_penalty": 1.1}, "penalize_newline"),
        ({"repeat_last_n": 8, "frequency_penalty": 0.5}, "repeat_last_n"),
    ],
)
def test_options_that_are_not_supported_are_refused_by_name(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as found:
        refuse_unsupported(GenerateBody(model="base", options=Options(**options)))
    assert found.value.param == f"options.{param}"


@pytest.mark.parametrize(("last", "penalty", "context"), [(None, 1.3, 64), (8, 1.3, 8), (-1, 1.3, 0), (0, 1.0, 0)])
def test_a_penalty_counts_the_last_tokens_and_0_of_them_turn_it_off(
    last: int | None, penalty: float | None, context: int
) -> None:
    front: Any = None  # is asked only about the number of tokens
    sampling = _sampling(front, Options(repeat_penalty=1.3, repeat_last_n=last), 3)
    assert (sampling.repetition_penalty, sampling.repetition_context_size) == (penalty, context)


PLAIN = Sampling(repetition_context_size=64)
"""What comes of no options."""


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({}, {}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"top_k": 3}, {"top_k": 3}),
        ({"top_p": 0.3}, {"top_p": 0.3}),
        ({"min_p": 0.2}, {"min_p": 0.2}),
        ({"seed": 3}, {"seed": 3}),
        ({"seed": -1}, {}),
        ({"stop": ["a"]}, {"stop": ["a"]}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
        ({"frequency_penalty": 0.25}, {"frequency_penalty": 0.25}),
    ],
)
def test_each_option_is_one_parameter(options: dict[str, Any], made: dict[str, Any]) -> None:
    front: Any = None  # is asked only about the number of tokens
    assert _sampling(front, Options(**options), 3) == structs.replace(PLAIN, **made)


@pytest.mark.parametrize(
    ("asked", "prompt", "longest", "most"),
    [
        *((7, 10, 0, 7), (40, 10, 0, 40), (41, 10, 0, 40), (-1, 10, 0, 40), (-2, 10, 0, 40), (0, 10, 0, 40)),
        *((1, 10, 0, 1), (-1, 10, 20, 20), (30, 10, 20, 20), (-1, 30, 25, 20), (5, 50, 0, 1), (-1, 60, 0, 1)),
    ],
)
def test_an_answer_ends_where_the_context_ends(asked: int, prompt: int, longest: int, most: int) -> None:
    server = SimpleNamespace(max_generation_tokens=longest)
    client = SimpleNamespace(check_ready=lambda: None)
    front: Any = SimpleNamespace(room=lambda _: 50, client=client, config=SimpleNamespace(server=server))
    assert _sampling(front, Options(num_predict=asked), prompt).max_tokens == most


def test_values_without_effect_are_accepted() -> None:
    options = Options(mirostat=0, tfs_z=1.0, typical_p=1, penalize_newline=False, repeat_last_n=64, num_ctx=8192)
    neutral = {"suffix": "", "template": "", "context": [], "images": [], "logprobs": False}
    refuse_unsupported(GenerateBody(model="base", options=options, **neutral))
