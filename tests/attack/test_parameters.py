"""Every numeric parameter with every value at and around its bounds: 200, or a 400 that names it."""

from __future__ import annotations

import json
import math

import pytest

from mlx_tandem import limits
from mlx_tandem.config import ServerConfig

JSON = {"content-type": "application/json"}
ELSEWHERE = ("logprobs", "logit_bias", "weight", "reward", "reward_weight", "reward_tokens", "version")
ELSEWHERE += ("max_output_tokens", "dimensions", "fps", "starting_after", "limit", "choice", "feedback_score")
ELSEWHERE += ("false_promotion", "false_take_back", "min_answers")  # of A/B tests of aliases
ELSEWHERE += ("expires_after_s",)  # of files
CHAT = [name for name in limits.PARAMETERS if name not in ELSEWHERE]
LENGTHS = ("max_tokens", "max_completion_tokens", "min_tokens")  # these may be legal and still more than fits
ODD = ["0", "-1", "NaN", "Infinity", "-Infinity", "1e308", "-1e308", "1e-300", "1e999", "2147483648"]
ODD += ["9223372036854775808", "1" + "0" * 400, "true", "false", '"1"', "[]", "{}", "[1]", "1.5", "-0.0"]


def values(name: str) -> list[str]:
    """JSON texts."""
    r = limits.PARAMETERS[name]
    step = 1 if r.integer else 1e-9 + abs(r.high) * 1e-9
    bounds = [r.low - step, r.low, r.high, r.high + step]
    return [json.dumps(int(b) if r.integer else b) for b in bounds] + ODD


def legal(name: str, text: str) -> bool:
    r = limits.PARAMETERS[name]
    value = json.loads(text)
    if isinstance(value, bool) or not isinstance(value, int if r.integer else (int, float)):
        return False
    if value == 0 and name in ("repetition_penalty", "truncate_prompt_tokens"):
        return name == "repetition_penalty"  # off; no token at all
    high = ServerConfig().max_n if name == "n" else r.high
    return r.low <= value <= high and math.isfinite(value)


def nested(depth: int) -> object:
    return {"a": nested(depth - 1)} if depth else 1


def check(response, name: str, text: str, param: str) -> None:
    if response.status_code == 400:
        assert response.json()["error"]["param"] == param, (name, text, response.text)
    else:
        assert response.status_code == 200, (name, text, response.text)
    if not legal(name, text):
        assert response.status_code == 400, (name, text)
    elif name not in LENGTHS:
        assert response.status_code == 200, (name, text, response.text)


@pytest.mark.promise("D0")
@pytest.mark.parametrize("name", CHAT)
def test_numbers_in_chat(server, name):
    for text in values(name):
        extra = ', "logprobs": true' if name == "top_logprobs" else ""
        if name == "repetition_context_size":
            extra += ', "repetition_penalty": 1.3'
        if name not in ("max_tokens", "max_completion_tokens"):
            extra += ', "max_tokens": 1'
        body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "ignore_eos": true, "{name}": {text}{extra}}}'
        check(server.client.post("/v1/chat/completions", content=body, headers=JSON), name, text, name)
    assert server.chat("hi", **({"max_tokens": 1} | {name: None})).status_code == 200


@pytest.mark.promise("D0")
@pytest.mark.parametrize("name", ["logprobs", "logit_bias"])
def test_numbers_in_completions(server, name):
    for text in values(name):
        if name == "logprobs" and text == "false":
            continue  # mlx-lm's word for none
        field = f'"{name}": {{"5": {text}}}' if name == "logit_bias" else f'"{name}": {text}'
        body = f'{{"prompt": "hi", "max_tokens": 1, {field}}}'
        check(server.client.post("/v1/completions", content=body, headers=JSON), name, text, name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"1024": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1.0": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"99999999999999999999": 1}),
        ("logit_bias", {str(i): 0 for i in range(1025)}),
        ("logit_bias", [1]),
        ("logit_bias", {"1": 1, "01": 1}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1024]),
        ("allowed_token_ids", [True]),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", [1] * 16_385),
        ("stop_token_ids", [1024]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**63]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [1] * 65),
        ("stop_token_ids", 5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 9),
        ("stop", "x" * 257),
        ("stop", 3),
        ("stop", [3]),
        ("stop", {}),
        ("stop", [["a"]]),
        ("stream", 1),
        ("stream", "true"),
        ("ignore_eos", 1),
        ("stream_options", {"include_usage": True}),
        ("model", 3),
        ("user", 3),
        ("metadata", {"a": 10**30}),
        ("metadata", []),
        ("store", "yes"),
        ("service_tier", 1),
        ("top_logprobs", 3),
    ],
)
def test_values_that_are_refused(server, field, value):
    response = server.chat("hi", **{field: value})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].split(".")[0].split("[")[0] == field


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("logit_bias", {"x" * 5000: 1}, "'xxx"),
        ("logit_bias", {"\x1b[31m\n": 1}, "'\\x1b[31m\\n' in logit_bias is not a token id"),
        ("logit_bias", {"1": 1, "01": 1}, "logit_bias names token 1 twice"),
        ("seed", 2**63, "seed must be an integer between -9223372036854775808 and 9223372036854775807"),
        ("max_tokens", 0, "max_tokens must be an integer between 1 and 1048576"),
        ("temperature", 9, "temperature must be a number between 0 and 2"),
        ("presence_penalty", 2.5, "presence_penalty must be a number between -2 and 2"),
        ("stop_token_ids", [10**4000], "stop_token_ids[0] = 1000"),
    ],
)
def test_errors_are_short_and_print_whole_numbers(server, field, value, says):
    response = server.chat("hi", **{field: value})
    error = response.json()["error"]
    assert (response.status_code, error["param"].partition("[")[0]) == (400, field)
    assert error["message"].startswith(says)
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    "fields",
    [
        {"user": 3, "model": 4, "stream": "x"},
        {"zzz": 1, "user": 3, "aaa": 2},
        {"tools": [1], "best_of": 4, "user": 3},
        {"logit_bias": {"b": 1, "a": 2, "1": "x"}},
        {"metadata": {"b": float("inf"), "a": 10**30}},
        {"stream_options": {"zz": 1, "include_usage": 3}, "stream": True},
        {"messages": [{"role": "root", "content": 3, "name": 4}]},
        {"messages": [{"role": "user", "content": "x", "b": float("nan"), "a": 10**30}]},
    ],
)
def test_errors_do_not_depend_on_the_order_of_keys(server, fields):
    def reversed_keys(value):
        if isinstance(value, dict):
            return {k: reversed_keys(v) for k, v in reversed(value.items())}
        return [reversed_keys(v) for v in value] if isinstance(value, list) else value

    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} | fields
    texts = [json.dumps(b) for b in (body, reversed_keys(body))]
    said = [server.client.post("/v1/chat/completions", content=t, headers=JSON).json()["error"] for t in texts]
    assert said[0] == said[1]


@pytest.mark.parametrize("field", ["best_of", "use_beam_search", "structural_tag"])
def test_what_is_known_and_cannot_be_done_is_named(server, field):
    response = server.chat("hi", **{field: 2})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", field)


@pytest.mark.promise("D9")
@pytest.mark.parametrize(
    "field",
    [
        "Temperature",
        "__class__",
        "max_tokens ",
        "é",
        "a" * 5000,
    ],
)
def test_unknown_fields_are_named(server, field):
    response = server.chat("hi", **{field: 1})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "unknown_parameter"
    assert error["param"] == ascii(field[:64])[1:-1]
    assert len(response.content) < 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f g"}}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
        ("tools", [{"type": "custom", "custom": {"name": "f"}}]),
        ("tools", {}),
        ("functions", 2),
        ("reasoning_effort", "enormous"),
        ("tool_choice", "required"),
        ("tool_choice", "any"),
        ("tool_choice", {"type": "function"}),
        ("response_format", {"type": "structural_tag"}),
        ("response_format", {"type": "json_object", "schema": {}}),
        ("guided_json", 2),
        ("guided_regex", "(?=a)"),
        ("response_format", {"type": "text", "schema": {}}),
        ("chat_template_kwargs", {"bos_token": "x"}),
        ("chat_template_kwargs", {"two words": 1}),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"add_generation_prompt": False}),
        ("chat_template_kwargs", {"enable_thinking": "yes"}),
        ("chat_template_kwargs", {"__class__": 1}),
        ("chat_template", "{{ 1 }}"),
        ("audio", {}),
        ("prompt", "x"),
        ("stream_options", {"x": 1}),
    ],
)
def test_what_is_not_supported_is_named(server, field, value):
    response = server.chat("hi", **{field: value})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].split(".")[0].split("[")[0] == field


@pytest.mark.promise("E8")
@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        ([[]], "messages[0]"),
        ([None], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": {}}], "messages[0].content"),
        ([{"role": "root", "content": "x"}], "messages[0].role"),
        ([{"role": "<|im_start|>", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "x", "evil": 10**30}], "messages[1].evil"),
        ([{"role": "user", "content": "x", "evil": {"a": [1, 10**30]}}], "messages[0].evil.a[1]"),
        ([{"role": "user", "content": "x", "deep": nested(40)}], "messages"),
        ([{"role": "user", "content": "x", "wide": [0] * 140_000}], "messages"),
        ([{"role": "user", "content": "x", "é" * 500: 10**30}], "messages[0]." + "\\xe9" * 40),
        ([{"role": "user", "content": "x", "tool_call_id": 3}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "content": "x", "tool_calls": [3]}], "messages[0].tool_calls[0]"),
        ([{"role": "tool", "tool_call_id": "a", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "http://127.0.0.1"}]}], "messages[0]"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages"),
        ([{"role": "user", "content": "x"}] * 4097, "messages"),
    ],
)
def test_messages_that_are_refused(server, messages, param):
    response = server.client.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


@pytest.mark.promise("D6")
@pytest.mark.parametrize("stream", [False, True])
def test_extreme_but_legal_sampling_answers(server, stream):
    extremes = [
        {"temperature": 1e-300},
        {"temperature": 2, "top_p": 1e-6, "top_k": 1, "min_p": 1},
        {"temperature": 2, "top_p": 0, "xtc_probability": 1, "xtc_threshold": 0},
        {"temperature": 2, "xtc_probability": 1, "xtc_threshold": 0, "top_k": 3, "top_p": 0.5, "logprobs": True},
        {"repetition_penalty": 0.01, "repetition_context_size": 1},
        {"allowed_token_ids": [1023] * 16_384, "ignore_eos": True},
        {"temperature": 2, "presence_penalty": -2, "frequency_penalty": -2, "repetition_penalty": 0.01},
        {"logit_bias": {str(i): -100 for i in range(1024)}},
        {"logit_bias": {str(i): 100 for i in range(1024)}, "temperature": 0},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1, "n": 16},
        {"stop": ["\0", "🦊" * 256, "a", "b", "c", "d", "e", "f"]},
    ]
    for fields in extremes:
        response = server.chat("Once", max_tokens=4, stream=stream, **fields)
        assert response.status_code == 200, (fields, response.text)
        assert "error" not in response.text
