"""Converting Anthropic's tools and choices into the form of OpenAI's chats."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_tandem import limits
from mlx_tandem.dialects.anthropic.bodies import Tool, ToolChoice
from mlx_tandem.dialects.flat_tools import flat_tools_of
from mlx_tandem.dialects.turns import Message
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.tools.offer import Tools
from mlx_tandem.strict_json import convert

_OWN = re.compile(r"[a-z][a-z0-9_]{0,50}_20[0-9]{6}|mcp_toolset|tool_search_tool_(?:regex|bm25)")
"""Types of tools that Anthropic defines. All but a few have the day of their definition at the end."""


class Offer(NamedTuple):
    """The tools of a request, and the fields of those that were left out."""

    tools: Tools | None
    skipped: tuple[str, ...]


def offer(given: Sequence[Any] | None, choice: ToolChoice | None) -> Offer:
    """Return the tools of a request. Raises InvalidRequest naming the tool or the choice.

    Tools of Anthropic's own types are left out, and so are those that only Anthropic's code execution may call. Tools
    whose loading may be deferred are offered at once.
    """
    if len(given or ()) > limits.MAX_TOOLS:
        raise InvalidRequest(f"tools has at most {limits.MAX_TOOLS} entries", param="tools")
    functions: list[Message] = []
    places: list[str] = []
    skipped: list[str] = []
    for i, tool in enumerate(given or ()):
        where = f"tools[{i}]"
        if (kind := _kind_of_skipped(tool, where)) is not None:
            skipped.append(f"{where} {kind}")
        else:
            functions.append(_function(convert(tool, Tool, where)))
            places.append(where)
    schemas = {
        function["function"]["name"]: f"{place}.input_schema" for function, place in zip(functions, places, strict=True)
    }
    return Offer(flat_tools_of(functions, *_choice(choice), places, skipped, schemas), tuple(skipped))


def _kind_of_skipped(tool: Any, where: str) -> str | None:
    """Return the kind of a tool that cannot be called from here; None for a tool of the client's own.

    Raises InvalidRequest for an unknown type, and for a key that changes how the tool is offered.
    """
    if not isinstance(tool, dict):
        return None
    kind = tool.get("type") or "custom"
    if isinstance(kind, str) and _OWN.fullmatch(kind):
        return kind
    if kind != "custom":
        raise InvalidRequest(
            f"{where}.type is {str(kind)[:64]!a}, which is no type of tools",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    if tool.get("input_examples"):
        name = f"{where}.input_examples"
        raise InvalidRequest(f"{name} is not supported", param=name, code="unsupported_parameter")
    callers = tool.get("allowed_callers")
    if isinstance(callers, list) and callers and "direct" not in callers:
        return "for other callers than the model"
    return None


def _function(tool: Tool) -> Message:
    """Return a tool in the form of OpenAI's."""
    function: Message = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> tuple[Any, bool]:
    """Return OpenAI's `tool_choice` and `parallel_tool_calls` for Anthropic's choice. Raises InvalidRequest."""
    if choice is None:
        return None, True
    parallel = not choice.disable_parallel_tool_use
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type], parallel
    if choice.name is None:
        raise InvalidRequest("tool_choice.name is required", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}, parallel
