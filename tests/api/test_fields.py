"""Each field of each dialect, over a scripted engine: what the engine is asked for, and which values turn it off."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from msgspec import structs

from mlx_tandem.engine.messages import Output, Submit
from mlx_tandem.types import Delta, Request
from tests.api.scripted import INFO, Peer, scripted_server

HELLO = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "base", "messages": HELLO, "max_tokens": 9},
    "/v1/completions": {"model": "base", "prompt": "hi", "max_tokens": 9},
    "/v1/messages": {"model": "base", "messages": HELLO, "max_tokens": 9},
    "/v1/responses": {"model": "base", "input": "hi", "max_output_tokens": 9},
    "/api/chat": {"model": "base", "messages": HELLO, "options": {"num_predict": 9}, "stream": False},
    "/api/generate": {"model": "base", "prompt": "hi", "options": {"num_predict": 9}, "stream": False},
}
EMBEDDINGS = "/v1/embeddings"
OPENAI, OLLAMA = ("/v1/chat/completions", "/v1/completions"), ("/api/chat", "/api/generate")
ALL = [p for p in BODIES if p not in OLLAMA]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[httpx.Client, Peer]]:
    with scripted_server(structs.replace(INFO, hidden_size=8)) as (client, peer, _):
        yield client, peer


def asked(served: tuple[httpx.Client, Peer], path: str, **fields: Any) -> Request:
    """What the engine is asked for. Its seed and number are left out: they differ from request to request."""
    client, peer = served
    body = BODIES.get(path, {"model": "base"}) | fields
    if path in OLLAMA:
        body["options"] = BODIES[path]["options"] | fields.get("options", {})
    found: list[Request] = []

    def answer() -> None:
        found.append(request := peer.hear(Submit).request)
        peer.say(Output([Delta(request.id, k, (301,), None, "stop") for k in range(request.n)]))

    answering = threading.Thread(target=answer)
    answering.start()
    reply = client.post(path, json=body)
    answering.join()
    assert found, reply.text  # the reply itself is of no interest here: this engine draws no logprobs
    (request,) = found
    seed = request.params.seed if "seed" in fields or "seed" in fields.get("options", {}) else 0
    return structs.replace(request, id=0, params=structs.replace(request.params, seed=seed))


def check(served: tuple[httpx.Client, Peer], path: str, fields: dict[str, Any], made: dict[str, Any]) -> None:
    """What differs from the request without these fields is `made`: members of the request and of its parameters."""
    plain, own = asked(served, path), asked(served, path, **fields)
    of_request = {name: value for name, value in made.items() if name in Request.__struct_fields__}
    params = {name: value for name, value in made.items() if name not in of_request}
    assert own == structs.replace(plain, params=structs.replace(plain.params, **params), **of_request)


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize(
    ("field", "value", "made"),
    [
        ("temperature", 0.5, {"temperature": 0.5}),
        ("temperature", 0, {"temperature": 0}),
        ("top_p", 0.3, {"top_p": 0.3}),
    ],
)
def test_what_every_dialect_has(
    served: tuple[httpx.Client, Peer], path: str, field: str, value: Any, made: dict[str, Any]
) -> None:
    check(served, path, {field: value}, made)


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ({"top_k": 3}, {"top_k": 3}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"min_p": 0.2}, {"min_p": 0.2}),
        ({"min_tokens": 2}, {"min_tokens": 2}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"repetition_penalty": 0}, {"repetition_penalty": 1.0}),
        ({"repetition_context_size": 4}, {"repetition_context": 4}),
        ({"repetition_context_size": 5000}, {}),
        ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
        ({"frequency_penalty": -0.5}, {"frequency_penalty": -0.5}),
        ({"xtc_threshold": 0.2}, {"xtc_threshold": 0.2}),
        ({"logit_bias": {"7": 2, "5": -1}}, {"logit_bias": ((5, -1.0), (7, 2.0))}),
        ({"allowed_token_ids": [5, 6]}, {"allowed_token_ids": (5, 6)}),
        ({"stop_token_ids": [7]}, {"stop_token_ids": (7,)}),
        ({"seed": 3}, {"seed": 3}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"max_tokens": 4}, {"max_tokens": 4}),
        ({"n": 3}, {"n": 3}),
        ({"priority": -2}, {"priority": -2}),
        ({"speculation": False}, {"speculate": False}),
        ({"speculation": True}, {}),
        ({"prompt_logprobs": 2}, {"prompt_logprobs": 2}),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": 0}),
    ],
)
def test_openai(served: tuple[httpx.Client, Peer], path: str, fields: dict[str, Any], made: dict[str, Any]) -> None:
    check(served, path, fields, made)


@pytest.mark.parametrize(
    ("path", "fields", "made"),
    [
        ("/v1/chat/completions", {"max_completion_tokens": 4}, {"max_tokens": 4}),
        ("/v1/chat/completions", {"logprobs": True}, {"logprobs": 0}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
        ("/v1/chat/completions", {"logprobs": False}, {}),
        ("/v1/completions", {"logprobs": 2}, {"logprobs": 2}),
        ("/v1/completions", {"logprobs": 0}, {"logprobs": 0}),
        ("/v1/completions", {"logprobs": 1, "echo": True}, {"logprobs": 1, "prompt_logprobs": 1}),
        ("/v1/completions", {"echo": True}, {}),
        ("/v1/messages", {"top_k": 3}, {"top_k": 3}),
        ("/v1/messages", {"top_k": 0}, {}),
        ("/v1/messages", {"max_tokens": 0}, {"max_tokens": 1}),
        ("/v1/responses", {"max_output_tokens": 16}, {"max_tokens": 16}),
        ("/v1/responses", {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}, {"logprobs": 2}),
        ("/v1/responses", {"include": ["message.output_text.logprobs"]}, {"logprobs": 0}),
    ],
)
def test_fields_of_one_dialect(
    served: tuple[httpx.Client, Peer], path: str, fields: dict[str, Any], made: dict[str, Any]
) -> None:
    check(served, path, fields, made)


@pytest.mark.parametrize("path", OLLAMA)
@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({"temperature": 0}, {"temperature": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"min_p": 0.2}, {"min_p": 0.2}),
        ({"seed": 3}, {"seed": 3}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"repeat_penalty": 1.5, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"repeat_penalty": 1.5, "repeat_last_n": 3}, {"repetition_penalty": 1.5, "repetition_context": 3}),
        ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
        ({"num_predict": 4}, {"max_tokens": 4}),
    ],
)
def test_ollama(served: tuple[httpx.Client, Peer], path: str, options: dict[str, Any], made: dict[str, Any]) -> None:
    check(served, path, {"options": options}, made)


@pytest.mark.parametrize("path", OLLAMA)
def test_logprobs_of_ollama(served: tuple[httpx.Client, Peer], path: str) -> None:
    check(served, path, {"logprobs": True}, {"logprobs": 0})
    check(served, path, {"logprobs": True, "top_logprobs": 2}, {"logprobs": 2})
    check(served, path, {"logprobs": False}, {})


@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ({"priority": -2}, {"priority": -2}),
        ({"pooling": "last"}, {"pooling": "last"}),
        ({"truncate_prompt_tokens": 2}, {"prompt": (303, 304)}),
        ({"truncate_prompt_tokens": 9}, {}),
    ],
)
def test_embeddings(served: tuple[httpx.Client, Peer], fields: dict[str, Any], made: dict[str, Any]) -> None:
    prompt = {"input": [[301, 302, 303, 304]]}
    own, plain = (asked(served, EMBEDDINGS, **prompt, **more) for more in (fields, {}))
    assert own == structs.replace(plain, **made)


def test_what_is_said_first_is_part_of_the_prompt(served: tuple[httpx.Client, Peer]) -> None:
    """In each dialect's own place, it makes the same prompt."""
    system = [{"role": "system", "content": "Be brief."}]
    chat = asked(served, "/v1/chat/completions", messages=[*system, *HELLO], enable_thinking=False)
    for path, fields in (
        ("/v1/messages", {"system": "Be brief."}),
        ("/v1/messages", {"system": [{"type": "text", "text": "Be brief."}]}),
        ("/api/chat", {"messages": [*system, *HELLO], "think": False}),
        ("/api/generate", {"system": "Be brief.", "think": False}),
    ):
        assert asked(served, path, **fields).prompt == chat.prompt, path
    thinks = asked(served, "/v1/chat/completions", messages=[*system, *HELLO]).prompt
    for path, fields in (("/v1/responses", {"instructions": "Be brief."}), ("/api/generate", {"system": "Be brief."})):
        assert asked(served, path, **fields).prompt == thinks, path


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/chat/completions", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"min_tokens": 10}, "min_tokens"),
        ("/v1/completions", {"prompt": [[300], [300] * 200], "max_tokens": 57}, "max_tokens"),
        ("/v1/completions", {"prompt": [[300] * 200, [300]], "max_tokens": 57}, "max_tokens"),
        ("/v1/completions", {"prompt": [[300], [300] * 256]}, "prompt"),
        ("/v1/completions", {"n": 9}, "n"),
        ("/v1/completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/completions", {"allowed_token_ids": []}, "allowed_token_ids"),
        ("/v1/completions", {"logit_bias": {"1024": 1}}, "logit_bias"),
        ("/v1/completions", {"stop_token_ids": [1024]}, "stop_token_ids"),
        ("/v1/completions", {"stop": ["a", ""]}, "stop"),
        ("/v1/responses", {"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ("/v1/responses", {"metadata": {"a": "x" * 70_000}}, "metadata"),
        ("/v1/responses", {"previous_response_id": "resp_0"}, "previous_response_id"),
        ("/api/chat", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_refused_by_name(served: tuple[httpx.Client, Peer], path: str, fields: dict[str, Any], param: str) -> None:
    """Each is the only thing that is wrong, and nothing reaches the engine."""
    reply = served[0].post(path, json=BODIES[path] | fields)
    assert reply.status_code in (400, 404), reply.text
    error = reply.json()["error"]
    if "param" in error:
        assert error["param"] == param
    else:  # the other dialects have the name in the message
        assert param in (error if isinstance(error, str) else error["message"])


def test_a_budget_of_thoughts_counts_below_the_longest_answer(served: tuple[httpx.Client, Peer]) -> None:
    def budget(tokens: int, **fields: Any) -> Any:
        thinking = {"type": "enabled", "budget_tokens": tokens}
        thoughts = asked(served, "/v1/messages", thinking=thinking, **fields).params.thoughts
        return None if thoughts is None else thoughts.tokens

    assert [budget(tokens) for tokens in (8, 9, 10)] == [8, None, None]
    assert asked(served, "/v1/messages", thinking={"type": "disabled"}) == asked(served, "/v1/messages")


@pytest.mark.parametrize(
    ("path", "fields", "answer"),
    [
        ("/v1/chat/completions", {"max_completion_tokens": 40, "max_tokens": 90}, 40),
        ("/v1/chat/completions", {"max_completion_tokens": 40, "max_tokens": None}, 40),
        ("/v1/chat/completions", {"max_tokens": 40}, 40),
        ("/v1/completions", {"max_tokens": 40}, 40),
        ("/v1/completions", {"max_tokens": None}, INFO.max_model_len // 2),
    ],
)
def test_a_prompt_is_cut_to_what_the_answer_leaves(
    served: tuple[httpx.Client, Peer], path: str, fields: dict[str, Any], answer: int
) -> None:
    """Its last tokens are kept."""
    text = " ".join(map(str, range(300)))
    long = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    found = asked(served, path, **long | fields, truncate_prompt_tokens=-1)
    assert (len(found.prompt), found.params.max_tokens) == (INFO.max_model_len - answer, answer)
    fewer = asked(served, path, **long | fields | {"max_tokens": 9}, truncate_prompt_tokens=5)
    assert fewer.prompt == found.prompt[-5:]
