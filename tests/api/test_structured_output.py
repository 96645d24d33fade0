"""Answers that must match a schema, a pattern, a choice or a grammar, over HTTP on the built-in model."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mlx_tandem import demo
from mlx_tandem.generation.tokenizer import Tokenizer
from tests.api.test_chat import events, text_of
from tests.json_schemas import REFUSED, SUPPORTED, Schema

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
QUESTION = "Who is it?"
TOKENIZER = Tokenizer.load(Path(demo.MODEL_PATH))
LARGE: dict[str, Any] = {
    "allOf": [{"anyOf": [{"type": "object", "properties": {f"{i}{j}": {}}} for j in range(8)]} for i in range(6)]
}
"""A small text with 8^6 alternatives."""


def valid(text: str, schema: Schema = SCHEMA) -> bool:
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return bool(kind(schema).is_valid(json.loads(text)))


def test_schemas_of_every_category_are_matched(server):
    """A part of the corpus; benchmarks/schemas.py asks for all of it."""
    some = [schema for schemas in SUPPORTED.values() for schema in schemas[:: max(len(schemas) // 6, 1)]][:60]
    assert len(some) == 60

    def ask(schema: Schema) -> list[dict[str, Any]]:
        body = {"temperature": 1.0, "n": 2, "max_tokens": 400, "guided_json": schema}
        reply = server.complete("JSON:", **body)
        assert reply.status_code == 200, (schema, reply.text)
        return reply.json()["choices"]

    finished = 0
    with ThreadPoolExecutor(8) as pool:
        for schema, choices in zip(some, pool.map(ask, some), strict=True):
            for choice in choices:
                if choice["finish_reason"] == "stop":
                    finished += 1
                    assert valid(choice["text"], schema), (schema, choice)
    assert finished >= 100


@pytest.mark.parametrize("fields", [{"n": 3}, {"model": "json"}, {"frequency_penalty": 1.0}, {"logprobs": True}, {}])
def test_a_stream_says_what_the_whole_reply_says(server, fields):
    body = {"temperature": 1.0, "seed": 3, "max_tokens": 200, "response_format": FORMAT, **fields}
    whole = server.chat(QUESTION, **body).json()
    chunks = events(server.chat(QUESTION, stream=True, **body))
    for choice in whole["choices"]:
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "stop" and valid(text)
        assert text_of(chunks, choice["index"]) == text


def test_neighbours_change_nothing_and_are_not_changed(server):
    asked = [
        {"temperature": 1.0, "seed": i, "max_tokens": 60} | ({"response_format": FORMAT} if i % 2 else {})
        for i in range(10)
    ]
    alone = [server.chat(QUESTION, **body).json()["choices"] for body in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda body: server.chat(QUESTION, **body).json()["choices"], asked))
    assert together == alone


@pytest.mark.parametrize(
    ("fields", "matches"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, valid),
        ({"guided_json": json.dumps(SCHEMA)}, valid),
        ({"guided_regex": "[a-c]{2}-\\d{1,3}x"}, lambda text: re.fullmatch("[a-c]{2}-\\d{1,3}x", text)),
        ({"guided_choice": ["yes", "no", "may be"]}, lambda text: text in ("yes", "no", "may be")),
        ({"guided_grammar": 'root ::= "(" ("a" | root) ")"'}, lambda text: re.fullmatch("\\(+a\\)+", text)),
        ({"guided_choice": ["yes"], "guided_decoding_backend": "xgrammar"}, lambda text: text == "yes"),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, valid),
        ({"structured_outputs": {"regex": "a{3}"}}, lambda text: text == "aaa"),
        ({"structured_outputs": {"choice": ["b", "c"]}}, lambda text: text in "bc"),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, lambda text: text == "x"),
        ({"structured_outputs": {"json_object": True}}, lambda text: isinstance(json.loads(text), dict)),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            lambda text: text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False),
        ),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_each_field_constrains_both_routes(server, fields, matches):
    body = {"temperature": 1.0, "seed": 1, "max_tokens": 100, **fields}
    said = server.chat(QUESTION, **body).json()["choices"][0]
    if said["finish_reason"] == "stop":
        assert matches(said["message"]["content"]), said
    said = server.complete(QUESTION, **body).json()["choices"][0]
    assert said["finish_reason"] in ("stop", "length")
    if said["finish_reason"] == "stop":
        assert matches(said["text"]), said


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "text"}}, {"response_format": None}, {"guided_json": None}]
)
def test_what_constrains_nothing_changes_nothing(server, fields):
    body = {"temperature": 0, "max_tokens": 20}
    assert server.chat(QUESTION, **body, **fields).json()["choices"] == server.chat(QUESTION, **body).json()["choices"]


def test_a_limit_of_tokens_may_cut_an_answer_off(server):
    choice = server.complete(QUESTION, max_tokens=3, temperature=0, response_format=FORMAT).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith("{")


def test_a_number_ends_although_the_model_wants_digits_only(server):
    digits = [i for i in range(1024) if TOKENIZER.token_text(i)[:1].isdigit()]
    for schema in ({"type": "number"}, {"type": "integer"}, {"type": "array", "items": {}, "maxItems": 1}):
        body = {"logit_bias": {str(i): 100 for i in digits}, "guided_json": schema, "max_tokens": 400}
        choice = server.complete("JSON:", temperature=1.0, seed=3, **body).json()["choices"][0]
        assert choice["finish_reason"] == "stop", choice
        assert valid(choice["text"], schema)


def test_an_answer_may_begin_with_a_thought_unless_that_is_switched_off(server):
    for thinks in (True, False):
        body = {"chat_template_kwargs": {"enable_thinking": thinks}, "response_format": FORMAT, "max_tokens": 400}
        (reply,) = server.chat(QUESTION, temperature=1.0, seed=2, **body).json()["choices"]
        assert thinks or not reply["message"].get("reasoning_content")
        if reply["finish_reason"] == "stop":
            assert valid(reply["message"]["content"])


def test_logprobs_are_those_of_the_model(server):
    """What the grammar forbids keeps its probability, so that logprobs mean the same with and without one."""
    body = {"temperature": 0, "max_tokens": 1, "logprobs": 3}
    free = server.complete("The answer is", **body).json()["choices"][0]["logprobs"]
    bound = server.complete("The answer is", guided_choice=["yes", "no"], **body).json()["choices"][0]["logprobs"]
    assert bound["top_logprobs"] == free["top_logprobs"] or set(free["top_logprobs"][0]) <= set(
        bound["top_logprobs"][0]
    )
    assert bound["token_logprobs"][0] < -0.01


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {"const": 2}}}}},
            "response_format.json_schema.schema.not",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "text"}}, "guided_json.type"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"guided_regex": "a{2"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_choice": ["a"] * 2000}, "guided_choice"),
        ({"guided_grammar": "start: x"}, "guided_grammar"),
        ({"guided_grammar": "hello"}, "guided_grammar"),
        ({"guided_regex": "a" * (520 << 10)}, "guided_regex"),
        ({"guided_json": LARGE}, "guided_json"),
        ({"structured_outputs": {"yaml": 1}}, "structured_outputs.yaml"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": {"if": {}, "then": False}}}, "structured_outputs.json.if"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"guided_choice": ["a"], "response_format": FORMAT}, "guided_choice"),
        ({"guided_choice": ["a"], "min_tokens": 2}, "min_tokens"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
        ({"guided_choice": ["a"], "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"guided_json": True, "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else None,
)
def test_what_cannot_be_enforced_is_refused_by_its_field(server, fields, param):
    for stream in (False, True):
        reply = server.chat(QUESTION, max_tokens=5, stream=stream, **fields)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param
        assert len(reply.content) < 1200


@pytest.mark.parametrize("name", REFUSED)
def test_schemas_are_refused_by_the_keyword(server, name):
    schema, where = REFUSED[name]
    body = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = server.chat(QUESTION, max_tokens=5, response_format=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == f"response_format.json_schema.schema{where}"


def function(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


TOOLS = [
    function("add", {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": [1, 2]}}, strict=True),
    function("say", {"text": {"type": "string", "maxLength": 8}}),
]


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """The calls of a message, whose arguments must be valid for their tool."""
    found = []
    for call in message.get("tool_calls") or []:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        (tool,) = [t["function"] for t in TOOLS if t["function"]["name"] == name]
        assert valid(json.dumps(arguments), tool["parameters"]), call
        found.append((name, arguments))
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"add", "say"}), ({"type": "function", "function": {"name": "say"}}, {"say"})]
)
def test_a_required_call_is_made_with_valid_arguments(server, choice, names, stream):
    for seed in range(3):
        body = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "temperature": 1.0, "seed": seed}
        if stream:
            deltas = [
                c["delta"]
                for e in events(server.chat(QUESTION, max_tokens=300, stream=True, **body))
                for c in e["choices"]
            ]
            pieces = [d["tool_calls"][0]["function"] for d in deltas if d.get("tool_calls")]
            name, arguments = pieces[0]["name"], "".join(p["arguments"] for p in pieces)
            message = {"tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
        else:
            (reply,) = server.chat(QUESTION, max_tokens=300, **body).json()["choices"]
            assert reply["finish_reason"] == "tool_calls"
            message = reply["message"]
            assert not message["content"]
        ((name, _),) = calls_of(message)
        assert name in names


def test_calls_of_strict_tools_are_valid_where_they_may_be_left_out(server):
    for seed in range(4):
        body = {"tools": TOOLS, "temperature": 1.0, "seed": seed, "max_tokens": 60}
        (reply,) = server.chat("What is 4 plus 2?", **body).json()["choices"]
        if reply["finish_reason"] != "length":
            calls_of(reply["message"])


def test_beside_tools_an_answer_is_a_call_or_matches_its_format(server):
    for seed in range(3):
        body = {"tools": TOOLS, "response_format": FORMAT, "temperature": 1.0, "seed": seed, "max_tokens": 300}
        (reply,) = server.chat("What is 4 plus 2?", **body).json()["choices"]
        if reply["finish_reason"] == "stop":
            assert valid(reply["message"]["content"])
        elif reply["finish_reason"] == "tool_calls":
            assert calls_of(reply["message"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "response_format": FORMAT}, "response_format"),
        (
            {"tools": [function("f", {"a": {"not": {"const": 2}}}, strict=True)]},
            "tools[0].function.parameters.properties.a.not",
        ),
        (
            {"tools": [function("f", {"a": {"not": {"const": 2}}}, strict=True)], "tool_choice": "required"},
            "tools[0].function.parameters.properties.a.not",
        ),
    ],
)
def test_tools_that_cannot_be_enforced_are_refused(server, fields, param):
    reply = server.chat(QUESTION, max_tokens=5, **({"tools": TOOLS} | fields))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


BAD: dict[str, Any] = {"type": "object", "properties": {"a": {"oneOf": [{"const": 1, "not": {"const": 2}}]}}}
NOT = "properties.a.oneOf[0].not"
FLAT = {"name": "f", "strict": True, "parameters": BAD}
USER = [{"role": "user", "content": "hi"}]
MESSAGE = {"model": "base", "max_tokens": 5, "messages": USER}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/chat/completions", {"messages": USER, "functions": [FLAT]}, f"functions[0].parameters.{NOT}"),
        (
            "/v1/responses",
            {"input": "hi", "tools": [{"type": "function", **FLAT}]},
            f"tools[0].parameters.{NOT}",
        ),
        (
            "/v1/responses",
            {"input": "hi", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", **FLAT}]}]},
            f"tools[0].tools[0].parameters.{NOT}",
        ),
        (
            "/v1/responses",
            {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": BAD}}},
            f"text.format.schema.{NOT}",
        ),
        (
            "/v1/messages",
            MESSAGE | {"tools": [{"name": "f", "strict": True, "input_schema": BAD}]},
            f"tools[0].input_schema.{NOT}",
        ),
        (
            "/v1/messages",
            MESSAGE | {"output_config": {"format": {"type": "json_schema", "schema": BAD}}},
            f"output_config.format.schema.{NOT}",
        ),
        ("/api/chat", {"model": "base", "messages": USER, "format": BAD}, f"format.{NOT}"),
        (
            "/v1/chat/completions",
            {"messages": USER, "tools": [{"type": "function", "function": FLAT}], "response_format": FORMAT},
            f"tools[0].function.parameters.{NOT}",
        ),
    ],
)
def test_an_error_about_a_schema_names_the_place_in_the_request(server, path, body, place):
    for stream in (False, True):
        reply = server.client.post(path, json=body | {"stream": stream})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        said = error if isinstance(error, str) else error["message"]
        assert said.startswith(f"{place}: the keyword not"), said
        if isinstance(error, dict) and "param" in error:
            assert error["param"] == place


def test_a_tool_that_is_not_strict_is_enforced_as_far_as_it_can_be(server):
    """Neither a word that is no type nor a schema elsewhere keeps the rest from being enforced."""
    tool = function("f", {"a": {"type": "any"}, "b": {"enum": [7]}, "c": {"$ref": "https://example.org/s"}})
    tool["function"]["parameters"]["properties"]["a"]["maxLength"] = 3
    body = {"tools": [tool], "tool_choice": "required", "temperature": 1.0, "max_tokens": 1}
    assert server.chat(QUESTION, **body).status_code == 200
    refused = tool["function"] | {"strict": True}
    reply = server.chat(QUESTION, **(body | {"tools": [{"type": "function", "function": refused}]}))
    assert reply.json()["error"]["param"].startswith("tools[0].function.parameters.properties.")


def test_what_cannot_be_enforced_of_tools_that_are_not_strict_is_left_out(server):
    lenient = function("f", {"a": {"type": "array", "items": {"enum": [1]}, "maxItems": 2, "uniqueItems": True}})
    body = {"tools": [lenient], "tool_choice": "required", "temperature": 1.0, "seed": 1, "max_tokens": 200}
    (reply,) = server.chat(QUESTION, **body).json()["choices"]
    assert json.loads(reply["message"]["tool_calls"][0]["function"]["arguments"])["a"] in ([], [1], [1, 1])
