"""Anthropic's dialect without a server: what requests become, and that a stream tells what a whole message tells."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from mlx_tandem import limits
from mlx_tandem.dialects.anthropic.bodies import MessagesBody, ToolChoice
from mlx_tandem.dialects.anthropic.errors import error_body
from mlx_tandem.dialects.anthropic.messages import chat_form, is_prefill
from mlx_tandem.dialects.anthropic.renderer import AtLimit, MessageRenderer
from mlx_tandem.dialects.anthropic.tools import offer
from mlx_tandem.dialects.turns import DOCUMENT_UNSUPPORTED, IMAGE_FOLLOWS, IMAGE_OVER_LIMIT, IMAGE_UNSUPPORTED
from mlx_tandem.errors import (
    EngineDied,
    Forbidden,
    InvalidRequest,
    NotFound,
    Overloaded,
    TandemError,
    Timeout,
    TooLarge,
    Unauthorized,
)
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
from mlx_tandem.generation.tools.offer import Function
from mlx_tandem.strict_json import decode
from tests.answers import Said, said

# --- streams and whole messages ------------------------------------------------------------------------------------


def events(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each with the name that its data repeats."""
    found = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert value["type"] == name.removeprefix("event: ")
        found.append(value)
    return found


def joined(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream. Every event is where Anthropic's clients expect it."""
    names = [event["type"] for event in stream]
    assert names[:2] == ["message_start", "ping"] and names[-2:] == ["message_delta", "message_stop"]
    message, is_open = stream[0]["message"], False
    texts: list[str] = []
    for event in stream[2:-2]:
        assert is_open == (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            is_open = True
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_stop":
            is_open = False
        else:
            block, delta = message["content"][event["index"]], event["delta"]
            match delta["type"]:
                case "text_delta":
                    block["text"] += delta["text"]
                case "thinking_delta":
                    assert not block["signature"]
                    block["thinking"] += delta["thinking"]
                case "signature_delta":
                    block["signature"] = delta["signature"]
                case "input_json_delta":
                    texts[event["index"]] += delta["partial_json"]
    assert not is_open
    for block, arguments in zip(message["content"], texts, strict=True):
        if block["type"] == "tool_use" and arguments:
            try:
                block["input"] = json.loads(arguments)
            except ValueError:
                block["input"] = {"INVALID_JSON": arguments}
    return message | stream[-2]["delta"] | {"usage": message["usage"] | stream[-2]["usage"]}


@example_settings(max_examples=150)
@given(said(), st.booleans())
def test_a_stream_tells_what_a_whole_message_tells(answer: Said, shows: bool) -> None:
    def renderer() -> MessageRenderer:
        made = MessageRenderer("base", 7, "max_tokens", shows_thoughts=shows)
        made.id = "msg_1"
        return made

    assert joined(events(answer.stream(renderer()))) == json.loads(answer.whole(renderer()))


USAGE = Usage(prompt=7, cached=2, completion=5, reasoning=3)


def message(*events: Event, at_limit: AtLimit = "max_tokens") -> dict[str, Any]:
    return json.loads(Said([PromptRead(0, 2), *events], USAGE).whole(MessageRenderer("base", 7, at_limit)))


def test_a_message_has_its_blocks_in_the_order_in_which_they_were_said() -> None:
    found = message(
        ReasoningDelta(0, "Hm"),
        ReasoningDelta(0, "m."),
        TextDelta(0, "Let me see."),
        ToolCallStart(0, 0, "call_a", "add"),
        ToolCallArguments(0, 0, '{"a": 1,'),
        ToolCallArguments(0, 0, ' "b": 2}'),
        ToolCallStart(0, 1, "call_b", "now"),
        TextDelta(0, ""),
        TextDelta(0, "Done."),
        Finish(0, "stop"),
    )
    thought, text, first, second, last = found.pop("content")
    assert (thought["type"], thought["thinking"], len(thought["signature"])) == ("thinking", "Hmm.", 44)
    assert (text, last) == ({"type": "text", "text": "Let me see."}, {"type": "text", "text": "Done."})
    assert first == {"type": "tool_use", "id": "call_a", "name": "add", "input": {"a": 1, "b": 2}}
    assert second == {"type": "tool_use", "id": "call_b", "name": "now", "input": {}}
    assert found.pop("id").startswith("msg_")
    assert found == {
        "type": "message",
        "role": "assistant",
        "model": "base",
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 5,
            "output_tokens_details": {"thinking_tokens": 3},
        },
    }


def test_reasons() -> None:
    def reason(*events: Event, **fields: Any) -> tuple[str, str | None]:
        found = message(*events, **fields)
        return found["stop_reason"], found["stop_sequence"]

    assert reason(Finish(0, "stop")) == ("end_turn", None)
    assert reason(Finish(0, "stop", "END")) == ("stop_sequence", "END")
    assert reason(Finish(0, "length")) == ("max_tokens", None)
    beyond: AtLimit = "model_context_window_exceeded"
    assert reason(Finish(0, "length"), at_limit=beyond) == (beyond, None)
    assert reason(ToolCallStart(0, 0, "c", "add"), Finish(0, "length")) == ("max_tokens", None)


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]", "3", '{"a": NaN}', "[" * 100_000])
def test_arguments_that_are_no_object_are_shown_as_they_are(arguments: str) -> None:
    call = ToolCallStart(0, 0, "c", "add"), ToolCallArguments(0, 0, arguments)
    (block,) = message(*call, Finish(0, "length"))["content"]
    assert block["input"] == {"INVALID_JSON": arguments}


def test_an_error_in_a_stream_has_its_event() -> None:
    (event,) = events(MessageRenderer("base", 7, "max_tokens").error(EngineDied("it died")))
    assert event == {"type": "error", "error": {"type": "overloaded_error", "message": "it died"}}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("x"), "invalid_request_error"),
        (Unauthorized("x"), "authentication_error"),
        (Forbidden("x"), "permission_error"),
        (NotFound("x"), "not_found_error"),
        (TooLarge("x"), "request_too_large"),
        (Overloaded("x", retry_after=1), "rate_limit_error"),
        (Overloaded("x", retry_after=1, status=503), "overloaded_error"),
        (Timeout("x"), "timeout_error"),
        (TandemError("x"), "api_error"),
    ],
)
def test_the_types_of_errors(error: TandemError, kind: str) -> None:
    assert json.loads(error_body(error)) == {"type": "error", "error": {"type": kind, "message": "x"}}


# --- messages, tools and choices -----------------------------------------------------------------------------------


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said} | more


CALL = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}, "caller": {"type": "direct"}}


def test_a_conversation_of_an_agent() -> None:
    system = [text("Be brief.", cache_control={"type": "ephemeral"}), text("Be right.")]
    thought = {"type": "thinking", "thinking": "Add.", "signature": "sig"}
    sent = [
        user(text("<context/>"), text("Add 1.", citations=None)),
        {"role": "assistant", "content": [thought, {"type": "redacted_thinking", "data": "x"}, text("Sure."), CALL]},
        user({"type": "tool_result", "tool_use_id": "t1", "content": [text("1"), text("2")]}, text("And?")),
        {"role": "user", "content": "Well?"},
        {"role": "system", "content": "Hurry."},
        {"role": "assistant", "content": [text("It is"), text(" ")]},
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert chat_form(system, sent).messages == [
        {"role": "system", "content": "Be brief.\nBe right."},
        {"role": "user", "content": "<context/>\nAdd 1."},
        {"role": "assistant", "content": "Sure.", "reasoning_content": "Add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "1\n2"},
        {"role": "user", "content": "And?\nWell?"},
        {"role": "system", "content": "Hurry."},
        {"role": "assistant", "content": "It is "},
    ]
    assert is_prefill(chat_form(None, sent).messages)
    assert not is_prefill(chat_form("s", sent[:1]).messages)
    with pytest.raises(InvalidRequest, match="no tool_result"):
        is_prefill(chat_form(None, sent[:2]).messages)


@pytest.mark.parametrize(("content", "said"), [("no", "Error: no"), (None, "Error: "), ([], "Error: ")])
def test_a_result_that_is_an_error_says_so(content: Any, said: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "is_error": True}
    sent = [user(result if content is None else result | {"content": content})]
    assert chat_form(None, sent).messages == [{"role": "tool", "tool_call_id": "t1", "content": said}]


def test_a_turn_of_many_blocks_is_put_together_in_one_pass() -> None:
    blocks = [{"type": "thinking", "thinking": "h" * 1000}, {"type": "text", "text": "x" * 1000}] * 10_000
    (made,) = chat_form(None, [{"role": "assistant", "content": blocks}]).messages
    assert (len(made["content"]), len(made["reasoning_content"])) == (10_000_000, 10_000_000)


def test_results_are_messages_of_their_own() -> None:
    results = [{"type": "tool_result", "tool_use_id": f"t{i}", "content": str(i)} for i in range(2)]
    assert [m["content"] for m in chat_form(None, [user(*results)]).messages] == ["0", "1"]


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ([user({"type": "image", "source": {}})], "messages[0].content[0].source.type"),
        ([user({"type": "image", "source": {"type": "url"}})], "messages[0].content[0].source.url"),
        ([user({"type": "image", "source": {"type": "base64"}})], "messages[0].content[0].source.data"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], "messages[0].content[0].type"),
        ([user(text("a"), {"type": "document", "source": {}})], "messages[0].content[1].type"),
        ([user(CALL)], "messages[0].content[0].type"),
        ([{"role": "assistant", "content": [{"type": "a_tool_use"}]}], "messages[0].content[0].type"),
        ([user({"type": "tool_reference", "tool_name": "f"})], "messages[0].content[0].type"),
        ([user({"text": "a"})], "messages[0].content[0].type"),
        ([user({"type": "text"})], "messages[0].content[0].text"),
        ([user({"type": 3})], "messages[0].content[0].type"),
        ([user({"type": "tool_result"})], "messages[0].content[0].tool_use_id"),
        (
            [user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]})],
            "messages[0].content[0].content[0].source",
        ),
        (
            [user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "web_search_tool_result"}]})],
            "messages[0].content[0].content[0].type",
        ),
        ([{"role": "tool", "content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        (["a"], "messages[0]"),
    ],
)
def test_wrong_messages_are_refused_by_name(sent: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as found:
        chat_form(None, sent)
    assert found.value.param == param
    assert param in found.value.message


def offered(*tools: Any, choice: ToolChoice | None = None) -> Any:
    """What the model is offered."""
    return offer(tools, choice).tools


def test_tools_and_choices() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = {"name": "add", "description": "Adds.", "input_schema": schema, "type": "custom", "cache_control": None}
    plain = {"name": "now", "input_schema": {"type": "object"}, "allowed_callers": ["direct"], "strict": True}
    both = offered(given, plain)
    assert both.functions == {
        "add": Function("add", "Adds.", schema),
        "now": Function("now", None, {"type": "object"}, True),
    }
    assert (both.choice, both.parallel) == ("auto", True)
    for choice, found in (
        (ToolChoice("auto"), (["add", "now"], "auto", True)),
        (ToolChoice("any", disable_parallel_tool_use=True), (["add", "now"], "required", False)),
        (ToolChoice("tool", "add"), (["add"], "required", True)),
        (ToolChoice("tool", "now", disable_parallel_tool_use=True), (["now"], "required", False)),
    ):
        made = offered(given, plain, choice=choice)
        assert ([*made.functions], made.choice, made.parallel) == found
    assert offered(given, plain, choice=ToolChoice("none")) is None
    with pytest.raises(InvalidRequest, match=r"tool_choice\.name"):
        offered(given, choice=ToolChoice("tool"))


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "websearch", "name": "web_search"}, "tools[1].type"),
        ({"type": 5, "name": "web_search"}, "tools[1].type"),
        ({"type": "web_search_2025", "name": "web_search"}, "tools[1].type"),
        ({"name": "f"}, "tools[1].input_schema"),
        ({"input_schema": {}}, "tools[1].name"),
        ({"name": "a b", "input_schema": {}}, "tools[1].name"),
        ({"name": "f", "input_schema": {}, "input_examples": [{}]}, "tools[1].input_examples"),
        ("f", "tools[1]"),
    ],
)
def test_wrong_tools_are_refused_by_name(tool: Any, param: str) -> None:
    """Those that are left out count."""
    with pytest.raises(InvalidRequest) as found:
        offer([{"type": "bash_20250124", "name": "bash"}, tool], None)
    assert found.value.param == param
    assert param in found.value.message


def test_tools_that_run_elsewhere_are_left_out_and_named() -> None:
    own = {"name": "add", "input_schema": {"type": "object"}}
    found = offer(
        [
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "mcp_toolset", "mcp_server_name": "x"},
            {"type": "tool_search_tool_regex", "name": "x"},
            own | {"allowed_callers": ["code_execution_20250825"], "name": "other"},
            own | {"allowed_callers": ["direct", "code_execution_20250825"], "defer_loading": True},
        ],
        None,
    )
    assert found.tools is not None and [*found.tools.functions] == ["add"], "a deferred tool is offered at once"
    assert found.skipped == (
        "tools[0] web_search_20250305",
        "tools[1] mcp_toolset",
        "tools[2] tool_search_tool_regex",
        "tools[3] for other callers than the model",
    )
    assert offer([{"type": "web_search_20250305", "name": "web_search"}], None).tools is None
    with pytest.raises(InvalidRequest, match=r"left out: tools\[0\] web_search_20250305") as refused:
        offer([{"type": "web_search_20250305", "name": "web_search"}], ToolChoice("tool", "web_search"))
    assert refused.value.param == "tool_choice"


# --- what coding agents send ---------------------------------------------------------------------------------------

BILLING = "x-anthropic-billing-header: cc_version=2.1.197.84c; cc_entrypoint=cli; cch=%s;"


@pytest.mark.parametrize(
    ("system", "said"),
    [
        ([text(BILLING % "a1b2c"), text("Be brief.")], "Be brief."),
        ([text(BILLING % "00000" + "\n"), text("Be brief.")], "Be brief."),
        ([text(BILLING % "a1b2c" + "\nBe brief.\nBe right.")], "Be brief.\nBe right."),
        (BILLING % "a1b2c" + "\n\nBe brief.", "Be brief."),
        ([text("Be brief."), text(BILLING % "a1b2c")], "Be brief."),
        ([text("What is " + BILLING % "a1b2c")], "What is " + BILLING % "a1b2c"),
        ("", ""),
    ],
)
def test_the_line_that_differs_between_requests_is_dropped(system: Any, said: str) -> None:
    assert chat_form(system, [user(text("hi"))]).messages[0] == {"role": "system", "content": said}
    assert chat_form(BILLING % "a1b2c", [user(text("hi"))]).messages == [{"role": "user", "content": "hi"}]


def test_blocks_of_tools_that_ran_elsewhere_are_left_out_and_named() -> None:
    found = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}
    sent = [
        user(text("hi")),
        {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s1", "name": "web_search"}, found]},
        user(text("And?")),
        {"role": "assistant", "content": [text("a"), {"type": "mcp_tool_use"}, {"type": "mcp_tool_result"}, text("b")]},
        user(text("So?")),
    ]
    turns = chat_form(None, sent)
    assert [m["content"] for m in turns.messages] == ["hi", "", "And?", "ab", "So?"]
    assert turns.skipped == [
        "messages[1].content[0] server_tool_use",
        "messages[1].content[1] web_search_tool_result",
        "messages[3].content[1] mcp_tool_use",
        "messages[3].content[2] mcp_tool_result",
    ]


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aQ=="}}


def result(id: str, *content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": [*content]} | more


def test_pieces_of_results() -> None:
    found = {"type": "search_result", "title": "T", "source": "s", "content": [text("x"), text("y")]}
    words = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "abc"},
        "title": "D",
        "context": "c",
    }
    pages = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aQ=="}}
    sent = [user(result("t1", {"type": "tool_reference", "tool_name": "WebFetch"}, found, words, pages, PICTURE))]
    turns = chat_form(None, sent)
    (message,) = turns.messages
    assert turns.skipped == [
        "messages[0].content[0].content[3] document",
        "messages[0].content[0].content[4].source image",
    ]
    assert message["content"].split("\n") == [
        "The tool WebFetch can be called now.",
        *("T", "s", "x", "y"),
        *("D", "c", "abc"),
        DOCUMENT_UNSUPPORTED,
        IMAGE_UNSUPPORTED,
    ]


def test_images_of_results_follow_the_results_where_the_model_sees() -> None:
    sent = [
        user(
            result("t1", text("a"), PICTURE), result("t2", PICTURE, is_error=True), result("t3", text("c")), text("d")
        ),
        {"role": "assistant", "content": [CALL]},
        user(result("t1", PICTURE)),
    ]
    turns = chat_form(None, sent, sees=True)
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aQ=="}}
    assert turns.messages == [
        {"role": "tool", "tool_call_id": "t1", "content": f"a\n{IMAGE_FOLLOWS}"},
        {"role": "tool", "tool_call_id": "t2", "content": f"Error:\n{IMAGE_FOLLOWS}"},
        {"role": "tool", "tool_call_id": "t3", "content": "c"},
        {"role": "user", "content": [url, url, {"type": "text", "text": "d"}]},
        {"role": "assistant", "content": "", "tool_calls": [ANY]},
        {"role": "tool", "tool_call_id": "t1", "content": IMAGE_FOLLOWS},
        {"role": "user", "content": [url]},
    ]
    assert turns.fields == {
        "messages[3].content[0].image_url": "messages[0].content[0].content[1].source",
        "messages[3].content[1].image_url": "messages[0].content[1].content[0].source",
        "messages[6].content[0].image_url": "messages[2].content[0].content[0].source",
    }


@pytest.mark.parametrize("own", [0, 3])
def test_the_oldest_images_of_results_are_left_out_if_there_are_too_many(own: int) -> None:
    """Those of the user are not: too many of them are refused."""
    most = limits.MAX_IMAGES
    sent = [user(*[PICTURE] * own), user(*(result(f"t{i}", PICTURE) for i in range(most + 2)))]
    turns = chat_form(None, sent, sees=True)
    results = [m["content"] for m in turns.messages if m["role"] == "tool"]
    assert turns.skipped == [f"messages[1].content[{i}].content[0].source image" for i in range(2 + own)]
    assert results == [IMAGE_OVER_LIMIT] * (2 + own) + [IMAGE_FOLLOWS] * (most - own)


# --- fields --------------------------------------------------------------------------------------------------------

REQUEST = {"model": "base", "messages": [], "max_tokens": 5}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_control", {"type": "ephemeral"}),
        ("container", None),
        ("context_management", {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        ("context_management", {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]}),
        ("diagnostics", {"previous_message_id": None}),
        ("mcp_servers", []),
        ("metadata", {"user_id": "u", "other": 1}),
        ("output_config", {"effort": "low"}),
        ("service_tier", "auto"),
        ("speed", "fast"),
        ("thinking", {"type": "adaptive", "display": "omitted"}),
        ("thinking", {"type": "enabled", "budget_tokens": 1024}),
    ],
)
def test_accepted(field: str, value: Any) -> None:
    assert decode(json.dumps(REQUEST | {field: value}).encode(), MessagesBody)


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("container", "c", "container"),
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}, "context_management.edits[0].type"),
        (
            "context_management",
            {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}]},
            "context_management.edits[0].keep.type",
        ),
        ("inference_geo", "eu", "inference_geo"),
        ("output_config", {"task_budget": {"type": "tokens", "total": 9}}, "output_config.task_budget"),
        ("mcp_servers", [{"type": "url"}], "mcp_servers"),
        ("output_config", {"format": {"type": "json_schema"}}, "output_config.format.schema"),
        ("thinking", {"type": "between_tools"}, "thinking.type"),
        ("thread", {"type": "create"}, "thread"),
        ("thinking", {"type": "enabled", "budget_tokens": 0}, "thinking.budget_tokens"),
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", 2.5, "max_tokens"),
        ("stop_sequences", "a", "stop_sequences"),
        ("nonsense", 1, "nonsense"),
    ],
)
def test_refused_by_name(field: str, value: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as found:
        decode(json.dumps(REQUEST | {field: value}).encode(), MessagesBody)
    assert found.value.param == param
    assert param in found.value.message
