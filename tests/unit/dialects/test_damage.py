"""Damaged conversations and tools of agents: they are read, or refused by the name of a field, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.dialects.anthropic.messages import chat_form as anthropic
from mlx_tandem.dialects.anthropic.tools import offer
from mlx_tandem.dialects.ollama.messages import chat_form as ollama
from mlx_tandem.dialects.responses.items import added_tools, input_items
from mlx_tandem.dialects.responses.items import chat_form as responses_form
from mlx_tandem.dialects.responses.tools import offer as offer_of_responses
from mlx_tandem.dialects.turns import Turns
from mlx_tandem.errors import InvalidRequest

ODD = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "x", [], {}, [{}], ["x"], {"type": "text"}])


def objects(kinds: list[str], inner: st.SearchStrategy[Any], keys: list[str]) -> st.SearchStrategy[Any]:
    """Objects of these types with any of the keys, whose values are odd or as `inner` has them."""
    values = ODD | inner | st.lists(inner, max_size=3)
    return st.fixed_dictionaries({}, optional={"type": st.sampled_from(kinds) | ODD, **dict.fromkeys(keys, values)})


TEXT = st.just({"type": "text", "text": "a"}) | st.just("a")
KINDS = """
text image tool_use tool_result thinking redacted_thinking server_tool_use mcp_tool_use web_search_tool_result
tool_reference search_result document input_text input_image input_file output_text refusal message function_call
function_call_output custom_tool_call custom_tool_call_output reasoning item_reference additional_tools web_search_call
namespace function custom web_search web_search_20250305 mcp_toolset base64 url
""".split()
KEYS = """
role content text source data media_type url tool_use_id id name input is_error tool_name title context image_url
file_id output call_id arguments summary tools description parameters format defer_loading allowed_callers input_schema
images tool_calls thinking function
""".split()
PIECES = st.recursive(TEXT, lambda inner: objects(KINDS, inner, KEYS), max_leaves=12)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=3) | st.lists(PIECES, max_size=4)}) | PIECES,
    max_size=4,
)


def read(make: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """What is made, or None where it is refused by name."""
    try:
        return make(*given, **options)
    except InvalidRequest as refused:
        named = refused.param and refused.message
    assert named
    return None


def responses(items: list[Any], *, sees: bool) -> Turns:
    read_items = input_items(items, lambda _: None)
    turns = responses_form("Be brief.", read_items, sees=sees)
    offer_of_responses(added_tools(read_items), None, None)
    return turns


@settings(max_examples=200)
@given(MESSAGES, st.lists(PIECES, max_size=2), st.booleans())
def test_conversations(messages: list[Any], system: list[Any], sees: bool) -> None:
    made = [read(anthropic, system, messages, sees=sees), read(responses, messages, sees=sees)]
    for turns in (*made, read(ollama, messages, sees=sees)):
        for message in [] if turns is None else turns.messages:
            assert message["role"] in ("system", "developer", "user", "assistant", "tool")
            assert isinstance(message["content"], str | list)
        parts = [part for m in turns.messages for part in m["content"]] if turns is not None else []
        shown = [part for part in parts if isinstance(part, dict) and part["type"] == "image_url"]
        assert turns is None or len(shown) == len(turns.fields)


@settings(max_examples=200)
@given(st.lists(PIECES, max_size=4))
def test_tools(tools: list[Any]) -> None:
    for found in (read(offer, tools, None), read(offer_of_responses, [("tools", tools)], None, None)):
        if found is not None:
            functions = found.tools.functions if found.tools is not None else {}
            assert all(function.name == name for name, function in functions.items())
            assert all(field.startswith("tools[") for field in found.skipped)
