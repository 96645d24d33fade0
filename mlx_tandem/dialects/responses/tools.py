"""Reading the tools of responses: functions, custom tools, and namespaces, which are groups of both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.dialects.flat_tools import flat_tools_of
from mlx_tandem.dialects.turns import Message
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.tools.offer import Tools
from mlx_tandem.strict_json import convert

INPUT = "input"
"""The one argument of the function that a custom tool is to the model."""


class _Function(Struct):
    """A function of the client's own."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Form(Struct):
    """The form of a custom tool's input. The model is told the grammar; it is not enforced."""

    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class _Custom(Struct):
    """A tool of the client's own whose input is a text."""

    name: str
    description: str | None = None
    format: _Form | None = None


class _Allowed(Struct):
    """A choice that allows some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class _Namespace(Struct):
    """A group of tools. The model sees the tools alone, so no two of a request have the same name."""

    name: str
    tools: list[Any]
    description: str | None = None


class _Place(NamedTuple):
    """A tool of a request: where it is, its type, and the namespace that it is in; "" for none."""

    where: str
    given: Any
    kind: str
    namespace: str


_SERVED = ("function", "custom")
"""Types of tools that are offered to the model."""

_OWN = re.compile(
    r"web_search(?:_preview)?(?:_20\d\d_\d\d_\d\d)?|file_search|computer(?:_use_preview)?|mcp|code_interpreter"
    r"|image_generation|local_shell|shell|apply_patch|tool_search|programmatic_tool_calling"
)
"""Types of tools that OpenAI defines."""


@dataclass(frozen=True)
class Offer:
    """The tools of a request; None if it offers none to the model.

    `namespaces` has the namespace of each tool that is in one, `customs` the names of the custom tools, and `skipped`
    the fields of the tools that were left out.
    """

    tools: Tools | None
    namespaces: Mapping[str, str]
    customs: frozenset[str]
    skipped: tuple[str, ...]


def offer(given: Iterable[tuple[str, Sequence[Any]]], choice: Any, parallel: bool | None) -> Offer:
    """Return what a request offers in its lists of tools, each of which comes with its field.

    Tools of OpenAI's own types are left out. Raises InvalidRequest naming the tool or the choice.
    """
    places = [place for where, tools in given for place in _places(tools, where, nested=True)]
    own = [place for place in places if place.kind in _SERVED]
    skipped = tuple(f"{place.where} {place.kind}" for place in places if place.kind not in _SERVED)
    tools = [_described(place) for place in own]
    schemas = {tool["function"]["name"]: f"{place.where}.parameters" for tool, place in zip(tools, own, strict=True)}
    if isinstance(choice, dict):
        tools, choice = _chosen(tools, choice)
    offered = flat_tools_of(tools, choice, parallel, [place.where for place in own], skipped, schemas)
    return Offer(
        offered,
        {place.given["name"]: place.namespace for place in own if place.namespace},
        frozenset(place.given["name"] for place in own if place.kind == "custom"),
        skipped,
    )


def _places(tools: Sequence[Any], param: str, *, nested: bool) -> Iterator[_Place]:
    """Yield the tools of a list, and with `nested` those in its namespaces. Raises InvalidRequest."""
    if len(tools) > limits.MAX_TOOLS:
        raise InvalidRequest(f"{param} has at most {limits.MAX_TOOLS} entries", param=param)
    for i, tool in enumerate(tools):
        where = f"{param}[{i}]"
        kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
        if nested and kind == "namespace":
            group = convert(tool, _Namespace, where)
            inner = _places(group.tools, f"{where}.tools", nested=False)
            yield from (place._replace(namespace=group.name) for place in inner)
            continue
        if kind not in _SERVED and not (isinstance(kind, str) and _OWN.fullmatch(kind)):
            raise InvalidRequest(
                f"{where}.type is {str(kind)[:64]!a}, which is no type of tools{'' if nested else ' in a namespace'}",
                param=f"{where}.type",
                code="unsupported_parameter",
            )
        yield _Place(where, tool, kind, "")


def _described(place: _Place) -> Message:
    """Return a tool in the form of OpenAI's chats. Raises InvalidRequest naming it."""
    if place.kind == "custom":
        return {"type": "function", "function": _as_function(convert(place.given, _Custom, place.where))}
    function = convert(place.given, _Function, place.where)
    described: Message = {"name": function.name}
    for key in ("description", "parameters", "strict"):
        if (value := getattr(function, key)) is not None:
            described[key] = value
    return {"type": "function", "function": described}


def _as_function(tool: _Custom) -> Message:
    """Return the function that a custom tool is to the model. Its only argument is the input."""
    told = [] if tool.description is None else [tool.description]
    if tool.format is not None and tool.format.definition is not None:
        told.append(f"The {INPUT} matches this grammar ({tool.format.syntax or 'lark'}):\n{tool.format.definition}")
    schema = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return {"name": tool.name, "description": "\n\n".join(told), "parameters": schema}


def _chosen(tools: list[Message], choice: dict[str, Any]) -> tuple[list[Message], Any]:
    """Return the tools that a choice leaves, and OpenAI's choice for chats. Raises InvalidRequest."""
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return tools, {"type": "function", "function": {"name": choice.get("name")}}
    if kind != "allowed_tools":
        raise InvalidRequest(
            "tool_choice.type must be 'function', 'custom' or 'allowed_tools'",
            param="tool_choice.type",
            code="invalid_value",
        )
    allowed = convert(choice, _Allowed, "tool_choice")
    names = {tool.get("name") for tool in allowed.tools if isinstance(tool.get("name"), str)}
    return [tool for tool in tools if tool["function"]["name"] in names], allowed.mode
