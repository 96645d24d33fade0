"""The dialect of responses without a server: items, the store, and that a stream tells what a whole response tells."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from mlx_tandem import limits
from mlx_tandem.config import ServerConfig
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.openai.logprobs import ChatLogprobs
from mlx_tandem.dialects.response_store import Conversation, ResponseStore, Stored
from mlx_tandem.dialects.responses.bodies import ResponseBody
from mlx_tandem.dialects.responses.items import added_tools, chat_form, input_items
from mlx_tandem.dialects.responses.plans import MANY_ITEMS, _conversation, _settings
from mlx_tandem.dialects.responses.renderer import ResponseRenderer
from mlx_tandem.dialects.responses.replay import replayed
from mlx_tandem.dialects.responses.tools import offer
from mlx_tandem.dialects.turns import DOCUMENT_UNSUPPORTED, IMAGE_FOLLOWS, IMAGE_UNSUPPORTED
from mlx_tandem.errors import EngineDied, InvalidRequest, NotFound, TooLarge
from mlx_tandem.generation.events import (
    Event,
    Finish,
    PromptRead,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.generation.tools.offer import Tools
from mlx_tandem.strict_json import decode
from mlx_tandem.types import SamplingParams, TokenLogprob
from tests.answers import NAMES, Said, said

# --- streams and whole responses -----------------------------------------------------------------------------------


def events(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream, which are numbered and each have the name that their data repeats."""
    found = []
    for number, block in enumerate(stream.decode().removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert value["type"] == name.removeprefix("event: ")
        assert value["sequence_number"] == number
        found.append(value)
    return found


PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


def check_item(stream: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Take the events of one item from the front of a stream; return the item as the deltas tell it."""
    added = stream.pop(0)
    assert (added["type"], added["output_index"]) == ("response.output_item.added", index)
    item = added["item"]
    assert item["status"] == "in_progress"
    place = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        assert item["arguments"] == ""
        name, key, more = "function_call_arguments", "arguments", {}
    elif item["type"] == "custom_tool_call":
        assert item["input"] == ""
        name, key, more = "custom_tool_call_input", "input", {}
    else:
        name, key, more = PARTS[item["type"]], "text", {"content_index": 0}
        assert item["content"] == []
        begun = stream.pop(0)
        assert begun.items() >= ({"type": "response.content_part.added"} | place | more).items()
        assert (begun["part"]["type"], begun["part"]["text"]) == (name, "")
    pieces, logprobs = [], []
    while (event := stream.pop(0))["type"] == f"response.{name}.delta":
        assert event.items() >= (place | more).items()
        pieces.append(event["delta"])
        logprobs += event.get("logprobs", [])
    text = "".join(pieces) or ("{}" if key == "arguments" else "")
    assert event.items() >= ({"type": f"response.{name}.done", key: text} | place | more).items()
    if key == "text":
        ended = stream.pop(0)
        assert ended.items() >= ({"type": "response.content_part.done"} | place | more).items()
        told = {"logprobs": logprobs} if item["type"] == "message" else {}
        assert event.items() >= told.items()
        assert ended["part"] == begun["part"] | {"text": text} | told
        item |= {"content": [ended["part"]]}
    done = stream.pop(0)
    assert (done["type"], done["output_index"]) == ("response.output_item.done", index)
    expected = item | ({key: text} if key != "text" else {})
    assert done["item"] == expected | {"status": done["item"]["status"]}
    return done["item"]


TOKENIZER = cast(Tokenizer, SimpleNamespace(token_bytes=lambda token: b"%d" % token))


@example_settings(max_examples=300)
@given(said(stops=(None,), tokens=2), st.booleans(), st.sets(st.sampled_from(NAMES)))
def test_a_stream_tells_what_a_whole_response_tells(answer: Said, with_logprobs: bool, customs: set[str]) -> None:
    kept: list[Any] = []

    def renderer() -> ResponseRenderer:
        logprobs = ChatLogprobs(TOKENIZER) if with_logprobs else None
        keep = lambda *response: kept.append(response)  # noqa: E731
        made = ResponseRenderer("resp_1", {"model": "base"}, keep, customs=customs, logprobs=logprobs)
        made._created = 5  # so that two of them are equal
        return made

    whole = json.loads(answer.whole(renderer()))
    stream = events(answer.stream(renderer()))
    for name in ("response.created", "response.in_progress"):
        begun = stream.pop(0)
        assert (begun["type"], begun["response"]["status"]) == (name, "in_progress")
        assert (begun["response"]["output"], begun["response"]["usage"]) == ([], None)
    output = []
    while stream[0]["type"] == "response.output_item.added":
        output.append(check_item(stream, len(output)))
    (last,) = stream
    assert last["type"] == f"response.{whole['status']}"
    for response in (whole, last["response"]):
        assert response.pop("completed_at") >= 5
    assert last["response"] == whole
    assert whole["output"] == output
    assert [(id, out) for id, _, out, _ in kept] == [("resp_1", output)] * 2
    assert len({item["id"] for item in output}) == len(output)


def stored(answer: Said, renderer: Callable[[Any], ResponseRenderer], *, stream: bool) -> tuple[bytes, Stored]:
    """The bytes of a reply, and what the store keeps of it."""
    store = ResponseStore()
    made = renderer(lambda id, body, output, deltas: store.put(id, body, Conversation(), output, deltas))
    return answer.stream(made) if stream else answer.whole(made), store.get("resp_1")


@example_settings(max_examples=300)
@given(said(stops=(None,), tokens=2), st.booleans(), st.sets(st.sampled_from(NAMES)), st.integers(0, 30))
def test_a_stored_response_is_streamed_as_it_was(answer: Said, shown: bool, customs: set[str], after: int) -> None:
    def renderer(keep: Any) -> ResponseRenderer:
        logprobs = ChatLogprobs(TOKENIZER) if shown else None
        names = {"add": "own"}
        settings = {"model": "base", "temperature": 0.5, "tools": [{}]}
        return ResponseRenderer("resp_1", settings, keep, namespaces=names, customs=customs, logprobs=logprobs)

    original, kept = stored(answer, renderer, stream=True)
    assert b"".join(replayed(kept, None)) == original
    rest = original.split(b"\n\n")[after + 1 : -1]
    assert b"".join(replayed(kept, after)) == b"".join(event + b"\n\n" for event in rest)
    whole, kept = stored(answer, renderer, stream=False)
    replay = events(b"".join(replayed(kept, None)))
    assert replay[-1]["response"] == json.loads(whole)
    done = [event["item"] for event in replay if event["type"] == "response.output_item.done"]
    assert done == json.loads(whole)["output"]


def test_a_stream_that_waits_for_its_reader_holds_no_decoded_logprobs() -> None:
    text = [TextDelta(0, "a", (5,) * 50, (TokenLogprob(-1.0, -1.0, ((5, -1.0),) * 20),) * 50) for _ in range(20)]
    answer = Said([PromptRead(0, 0), *text, Finish(0, "stop", None)], Usage(7))
    logprobs = ChatLogprobs(TOKENIZER)
    _, kept = stored(answer, lambda keep: ResponseRenderer("resp_1", {}, keep, logprobs=logprobs), stream=True)
    tracemalloc.start()
    replay = replayed(kept, None)
    assert next(replay)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < len(kept.body) / 2


@pytest.mark.parametrize(
    "between", [[ReasoningDelta(0, "r")], [ToolCallStart(0, 0, "c", "now"), ToolCallArguments(0, 0, "{}")]]
)
def test_logprobs_of_tokens_without_text_stay_with_their_message(between: list[Event]) -> None:
    """Those before an item of another kind belong to no message; others belong to the text that they surround."""

    def text(piece: str, token: int) -> Event:
        return TextDelta(0, piece, (token,), (TokenLogprob(-1.0, -1.0),))

    said = [text("", 1), *between, text("", 2), text("a", 3), text("", 4), ReasoningDelta(0, "s"), text("", 0)]
    answer = Said([PromptRead(0, 0), *said, ReasoningDelta(0, "t"), Finish(0, "stop", None)], Usage(7))
    whole = json.loads(answer.whole(ResponseRenderer("resp_1", {}, None, logprobs=ChatLogprobs(TOKENIZER))))
    last = events(answer.stream(ResponseRenderer("resp_1", {}, None, logprobs=ChatLogprobs(TOKENIZER))))[-1]
    for output in (whole["output"], last["response"]["output"]):
        first, message, thought = output
        assert first["type"] != "message" and thought["content"][0]["text"] == "st"
        (part,) = message["content"]
        assert (part["text"], [entry["token"] for entry in part["logprobs"]]) == ("a", ["2", "3", "4"])


def test_a_failure_ends_the_stream_with_the_failed_response() -> None:
    renderer = ResponseRenderer("resp_1", {"model": "base"}, lambda *_: pytest.fail("it is not kept"))
    *_, last = events(renderer.open() + renderer.error(EngineDied("it died")))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "it died"}


SETTINGS: dict[str, Any] = {
    "model": "m", "instructions": None, "previous_response_id": None, "max_output_tokens": None,
    "max_tool_calls": None, "temperature": 0.5, "top_p": 0.75, "top_logprobs": 0, "tools": [], "tool_choice": "auto",
    "parallel_tool_calls": True, "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}, "verbosity": "medium"}, "truncation": "disabled", "background": False,
    "store": True, "metadata": {}, "service_tier": "default", "safety_identifier": None, "prompt_cache_key": None,
    "user": None,
}  # fmt: skip
"""What a response repeats of a request that says nothing."""


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, {}),
        ({"temperature": 1.5, "top_p": 0.1}, {}),  # the engine's values are told
        ({"max_output_tokens": 16}, {"max_output_tokens": 16}),
        ({"text": {"verbosity": "low"}}, {"text": {"format": {"type": "text"}, "verbosity": "low"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}},
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "medium"}},
        ),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning": {"effort": "low", "summary": None}}),
        *(
            ({name: value}, {name: value})
            for name, value in {
                "instructions": "i", "previous_response_id": "p", "max_tool_calls": 3, "top_logprobs": 2, "tools": [1],
                "tool_choice": "none", "parallel_tool_calls": False, "store": False, "metadata": {"a": 1},
                "safety_identifier": "s", "prompt_cache_key": "k", "user": "u",
            }.items()
        ),
    ],
)  # fmt: skip
def test_a_response_repeats_its_request(asked: dict[str, Any], told: dict[str, Any]) -> None:
    body = decode(json.dumps(asked).encode(), ResponseBody)
    assert _settings(body, "m", SamplingParams(max_tokens=9, temperature=0.5, top_p=0.75)) == SETTINGS | told


# --- items ---------------------------------------------------------------------------------------------------------


def part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text, "annotations": []}


def test_a_conversation_of_an_agent() -> None:
    sent = [
        {"role": "developer", "content": [part("Be right.")]},
        {"type": "message", "role": "user", "content": [part("a"), part("b")]},
        {"role": "user", "content": "c"},
        {"type": "reasoning", "id": "rs_1", "summary": [part("short", "summary_text")], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "id": "m", "content": [part("Sure.", "output_text")]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [part("noon")]},
        {"type": "function_call_output", "call_id": "c2", "output": None},
        {"type": "reasoning", "summary": [], "content": [part("long", "reasoning_text")]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in (("c1", "add", '{"a": 1}'), ("c2", "now", "{}"))
    ]
    items = input_items(sent, lambda _: None)
    assert chat_form("Be brief.", items).messages == [
        {"role": "system", "content": "Be brief.\nBe right."},
        {"role": "user", "content": "ab"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "Sure.", "reasoning_content": "short", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "assistant", "content": "No.", "reasoning_content": "long"},
    ]
    assert chat_form(None, input_items("Hi", lambda _: None)).messages == [{"role": "user", "content": "Hi"}]


def test_references_are_replaced_by_what_the_store_has() -> None:
    item = {"type": "message", "role": "assistant", "id": "msg_1", "content": "a"}
    stored = {"msg_1": _json(item).encode()}
    for reference in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}):
        assert input_items([reference], stored.get) == [item]
    mixed: list[Any] = [{"id": "msg_1"}, {"role": "user", "content": "b"}, {"id": "msg_1"}]
    found = input_items(mixed, stored.get)
    assert found == [item, mixed[1], item]
    assert found[0] is found[2], "an item that is named twice is decoded once"
    with pytest.raises(InvalidRequest, match=r"input\[0\]\.id"):
        input_items([{"type": "item_reference", "id": "msg_2"}], stored.get)


@pytest.mark.promise("C12")
def test_references_are_counted_before_anything_is_decoded() -> None:
    stored = {"a": b"not JSON " * 4, "b": b'{"type": "message", "role": "user", "content": ""}'}
    with pytest.raises(TooLarge) as found:
        input_items([{"id": "b"}, {"id": "a"}, {"id": "b"}], stored.get, len(stored["a"]) + 2 * len(stored["b"]) - 1)
    assert found.value.param == "input[2].id"
    assert len(input_items([{"id": "b"}] * 3, stored.get, 3 * len(stored["b"]))) == 3


def test_a_long_conversation_is_refused_before_it_is_decoded() -> None:
    store = ResponseStore()
    store.put("a", b"", Conversation((b"not JSON",), limits.MAX_MESSAGES - 1), [{"id": "i", "text": "x"}])
    assert store.conversation("a", 31).count == limits.MAX_MESSAGES
    with pytest.raises(TooLarge, match="has over 30 bytes") as found:
        store.conversation("a", 30)
    assert found.value.param == "previous_response_id"
    store.put("b", b"", Conversation((b"",), limits.MAX_MESSAGES), [{"id": "j"}])
    with pytest.raises(TooLarge, match="has over 4096 items"):
        store.conversation("b", 1000)


def test_logprobs_are_no_part_of_a_conversation() -> None:
    store = ResponseStore()
    part = {"type": "output_text", "text": "a", "logprobs": [{"token": "a"}]}
    store.put("r", b"{}", Conversation(), [{"id": "m", "type": "message", "content": [part]}])
    kept = {"id": "m", "type": "message", "content": [{"type": "output_text", "text": "a"}]}
    assert asyncio.run(store.decoded(store.conversation("r", 1000))) == [kept]
    assert json.loads(store.item("m") or b"") == kept
    assert "logprobs" in part, "the answer itself is not changed"


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}, "input[0].content[0].image_url"),
        ({"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].type"),
        ({"type": "compaction", "id": "x", "encrypted_content": "x"}, "input[0].type"),
        ({"type": "web_search_calls", "id": "x"}, "input[0].type"),
        ({"type": "custom_tool_call", "call_id": "x", "name": "x"}, "input[0].input"),
        ({"type": "additional_tools"}, "input[0].tools"),
        ({"type": "function_call_output", "call_id": "x", "output": [{"type": "x"}]}, "input[0].output[0].type"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
        ({"role": "robot", "content": "x"}, "input[0].role"),
        ({"type": ["message"]}, "input[0].type"),
        (3, "input[0]"),
    ],
)
def test_wrong_items_are_refused_by_name(item: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as found:
        chat_form(None, input_items([item], lambda _: None))
    assert found.value.param == param


ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}


def offered(tools: list[Any], choice: Any = None, parallel: bool | None = None) -> Tools | None:
    """What the model is offered."""
    return offer([("tools", tools)], choice, parallel).tools


def test_tools_and_choices() -> None:
    tools = [ADD, {"type": "function", "name": "now", "description": "Time.", "defer_loading": True}]
    made = offered(tools)
    assert made is not None and [*made.functions] == ["add", "now"]
    assert (made.choice, made.parallel, made.functions["now"].description) == ("auto", True, "Time.")
    named = offered(tools, {"type": "function", "name": "now"}, False)
    assert named is not None and ([*named.functions], named.choice, named.parallel) == (["now"], "required", False)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    some = offered(tools, allowed)
    assert some is not None and ([*some.functions], some.choice) == (["add"], "auto")
    assert offered(tools, "none") is None


PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
}


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    group = {"type": "namespace", "name": "own", "tools": [{"type": "custom", "name": "run"}, ADD]}
    found = offer([("tools", [PATCH]), ("input[2].tools", [group])], {"type": "custom", "name": "patch"}, None)
    assert found.tools is not None and found.tools.choice == "required"
    (patch,) = found.tools.functions.values()
    assert patch.description == "Patches.\n\nThe input matches this grammar (lark):\nstart: /a/"
    assert patch.parameters is not None and patch.parameters["required"] == ["input"]
    assert (found.namespaces, found.customs) == ({"run": "own", "add": "own"}, {"patch", "run"})


WEB = {"type": "web_search", "external_web_access": True}


def test_tools_that_run_elsewhere_are_left_out_and_named() -> None:
    group = {"type": "namespace", "name": "own", "tools": [{"type": "web_search_preview_2025_03_11"}]}
    found = offer([("tools", [WEB, ADD, {"type": "local_shell"}, group]), ("input[0].tools", [WEB])], None, None)
    assert found.tools is not None and [*found.tools.functions] == ["add"]
    assert found.skipped == (
        "tools[0] web_search",
        "tools[2] local_shell",
        "tools[3].tools[0] web_search_preview_2025_03_11",
        "input[0].tools[0] web_search",
    )
    with pytest.raises(InvalidRequest, match=r"left out: tools\[0\] web_search") as refused:
        offered([WEB], "required")
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("tool", "choice", "param"),
    [
        ({"type": "web_searches"}, None, "tools[1].type"),
        ({"type": "function"}, None, "tools[1].name"),
        ({"type": "custom"}, None, "tools[1].name"),
        ({"type": "custom", "name": "a name"}, None, "tools[1].name"),
        ({"type": ["function"]}, None, "tools[1].type"),
        (ADD | {"name": "a name"}, None, "tools[1].name"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}, None, "tools[1].tools[0].type"),
        ({"type": "namespace", "name": "n", "tools": [ADD | {"name": "a name"}]}, None, "tools[1].tools[0].name"),
        (ADD, {"type": "function"}, "tool_choice.name"),
        (ADD, {"type": "mcp"}, "tool_choice.type"),
        (ADD, {"type": "allowed_tools", "tools": []}, "tool_choice.mode"),
    ],
)
def test_wrong_tools_are_refused_by_name(tool: Any, choice: Any, param: str) -> None:
    """Those that are left out count."""
    with pytest.raises(InvalidRequest) as found:
        offered([WEB, tool], choice)
    assert found.value.param == param
    assert param in found.value.message


def test_items_of_tools_that_ran_elsewhere_are_left_out_and_named() -> None:
    sent = [
        {"role": "user", "content": "a"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "local_shell_call", "call_id": "c1", "action": {}},
        {"type": "local_shell_call_output", "id": "c1", "output": "x"},
        {"type": "additional_tools", "role": "developer", "tools": [ADD]},
        {"role": "assistant", "content": "b"},
    ]
    turns = chat_form(None, sent, before=1)
    assert [m["content"] for m in turns.messages] == ["a", "b"]
    assert turns.skipped == [
        "input[0] web_search_call",
        "input[1] local_shell_call",
        "input[2] local_shell_call_output",
    ]
    assert added_tools(sent, before=1) == [("input[3].tools", [ADD])]


def test_calls_of_custom_tools_come_back_as_the_model_said_them() -> None:
    sent = [
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c1", "name": "patch", "input": "a\n"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    function = {"name": "patch", "arguments": {"input": "a\n"}}
    assert chat_form(None, sent).messages == [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]


def test_images_of_results_follow_the_results_where_the_model_sees() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,aQ==", "detail": "high"}
    sent = [
        {"type": "function_call_output", "call_id": "c1", "output": [part("a"), part("b"), image, part("c")]},
        {"type": "function_call_output", "call_id": "c2", "output": [image]},
        {"role": "user", "content": "d"},
    ]
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aQ=="}}
    turns = chat_form(None, sent, sees=True)
    assert turns.messages == [
        {"role": "tool", "tool_call_id": "c1", "content": f"ab\n{IMAGE_FOLLOWS}\nc"},
        {"role": "tool", "tool_call_id": "c2", "content": IMAGE_FOLLOWS},
        {"role": "user", "content": [url, url]},
        {"role": "user", "content": "d"},
    ]
    assert [*turns.fields.values()] == ["input[0].output[2].image_url", "input[1].output[0].image_url"]
    assert turns.skipped == []
    file = {"type": "input_file", "filename": "a.pdf", "file_data": "aQ=="}
    blind = chat_form(None, [*sent, {"type": "custom_tool_call_output", "call_id": "c3", "output": [file]}])
    assert [m["content"] for m in blind.messages] == [
        f"ab\n{IMAGE_UNSUPPORTED}\nc",
        IMAGE_UNSUPPORTED,
        "d",
        DOCUMENT_UNSUPPORTED,
    ]
    assert blind.skipped == [
        "input[0].output[2].image_url image",
        "input[1].output[0].image_url image",
        "input[3].output[0] document",
    ]


# --- fields --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("include", ["reasoning.encrypted_content"]),
        ("reasoning", {"effort": "low", "summary": "auto"}),
        ("text", {"format": {"type": "text"}, "verbosity": "low"}),
        ("truncation", "auto"),
        ("background", False),
        ("top_logprobs", 0),
        ("prompt_cache_key", "k"),
        ("conversation", None),
    ],
)
def test_accepted(field: str, value: Any) -> None:
    assert decode(json.dumps({"input": "x", field: value}).encode(), ResponseBody)


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("include", ["nonsense"], "include[0]"),
        ("text", {"format": {"type": "grammar"}}, "text.format.type"),
        ("background", True, "background"),
        ("top_logprobs", 99, "top_logprobs"),
        ("conversation", "c", "conversation"),
        ("prompt", {"id": "p"}, "prompt"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("nonsense", 1, "nonsense"),
    ],
)
def test_refused_by_name(field: str, value: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as found:
        decode(json.dumps({"input": "x", field: value}).encode(), ResponseBody)
    assert found.value.param == param
    assert param in found.value.message


# --- the store -----------------------------------------------------------------------------------------------------


@example_settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60), st.booleans()), max_size=30), st.integers(1, 4))
def test_the_store_keeps_the_newest_responses_that_fit(steps: list[tuple[int, int, bool]], most: int) -> None:
    store, kept = ResponseStore(most, 600), {}
    for number, (name, size, deletes) in enumerate(steps):
        if deletes and kept:
            gone = [*kept][name % len(kept)]
            store.delete(gone)
            del kept[gone]
            continue
        item = {"id": f"msg_{number}", "text": "y" * size}
        body, asked = b"x" * size, [{"role": "user", "content": str(number)}]
        store.put(f"resp_{number}", body, Conversation().followed_by(asked), [item])
        kept[f"resp_{number}"] = body, [*asked, item]
        bytes_of = {k: len(b) + len(_json(c)) + 1 + len(_json(c[-1])) for k, (b, c) in kept.items()}
        while len(kept) > most or sum(bytes_of[k] for k in kept) > 600:
            del kept[next(iter(kept))]
    for number in range(len(steps)):
        id = f"resp_{number}"
        if id in kept:
            body, conversation = kept[id]
            assert store.body(id) == body
            assert asyncio.run(store.decoded(store.conversation(id, 600))) == conversation
            assert json.loads(store.item(f"msg_{number}") or b"") == conversation[-1]
        else:
            assert store.item(f"msg_{number}") is None
            with pytest.raises(NotFound):
                store.conversation(id, 600)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def test_responses_that_fill_the_store_exactly_are_kept() -> None:
    store = ResponseStore(2, 100)
    for id in "ab":
        store.put(id, b"x" * 50, Conversation(), [])
    assert store.body("a") == store.body("b") == b"x" * 50
    store.put("c", b"x" * 60, Conversation((b"y" * 30,), 1), [], b"z" * 10)
    assert store.body("c") == b"x" * 60
    store.put("d", b"x" * 60, Conversation((b"y" * 30,), 1), [], b"z" * 11)
    with pytest.raises(NotFound):
        store.body("d")


def test_a_response_over_the_limit_is_not_kept() -> None:
    store = ResponseStore(5, 100)
    store.put("a", b"x", Conversation(), [])
    store.put("b", b"x" * 200, Conversation(), [])
    assert store.body("a") == b"x"
    with pytest.raises(NotFound, match="does not exist here, or no longer"):
        store.body("b")
    with pytest.raises(NotFound) as unknown:
        store.delete("b")
    assert unknown.value.param == "response_id"


def test_the_loop_turns_between_long_conversations_that_came_at_once() -> None:
    async def run() -> list[int]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def plan() -> int:
            conversation, made, _ = await _conversation(front, body)
            assert conversation.count == len(made.messages) == MANY_ITEMS + 1
            return turns

        front = cast(ServerFront, SimpleNamespace(config=config, responses=ResponseStore(), reads_images=False))
        counting = asyncio.create_task(count())
        seen = await asyncio.gather(*(plan() for _ in range(8)))
        counting.cancel()
        return seen

    config = SimpleNamespace(server=ServerConfig())
    body = ResponseBody(input=[{"role": "user", "content": "x"}] * (MANY_ITEMS + 1))
    seen = asyncio.run(run())
    assert seen == sorted(set(seen)), "each was put together in a turn of its own"
