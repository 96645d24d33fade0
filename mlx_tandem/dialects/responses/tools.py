"""Reading the tools of responses: functions, and namespaces, which are groups of functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.dialects.flat_tools import flat_tools
from mlx_tandem.dialects.turns import Message
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.tools.offer import Tools, tools_of
from mlx_tandem.strict_json import convert


class _Function(Struct):
    """A function of the client's own."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Allowed(Struct):
    """A choice that allows some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class _Namespace(Struct):
    """A group of functions. The model sees the functions alone, so no two of a request have the same name."""

    name: str
    tools: list[Any]
    description: str | None = None


class _Place(NamedTuple):
    """A function of a request: where it is, and the namespace that it is in; "" for none."""

    where: str
    given: Any
    namespace: str


def function_tools(given: Sequence[Any] | None, choice: Any, parallel: bool | None) -> Tools | None:
    """Return the tools of a request; None if it offers none to the model. Raises InvalidRequest naming the tool."""
    places = list(_places(given or (), "tools", nested=True))
    tools = [_described(place) for place in places]
    if isinstance(choice, dict):
        tools, choice = _chosen(tools, choice)
    try:
        with flat_tools():
            return tools_of(tools, choice, parallel)
    except InvalidRequest as e:
        found = re.match(r"tools\[(\d+)\]", e.param or "")
        if found is not None and len(tools) == len(places):
            where = places[int(found[1])].where
            e.message = e.message.replace(found[0], where, 1)
            e.param = where + (e.param or "")[found.end() :]
        raise


def namespaces(given: Sequence[Any] | None) -> Mapping[str, str]:
    """Return the namespace of each function that is in one. The tools have been read without an error."""
    places = _places(given or (), "tools", nested=True)
    return {place.given["name"]: place.namespace for place in places if place.namespace}


def _places(tools: Sequence[Any], param: str, *, nested: bool) -> Iterator[_Place]:
    """Yield the functions of `tools`, and with `nested` those in its namespaces. Raises InvalidRequest."""
    if len(tools) > limits.MAX_TOOLS:
        raise InvalidRequest(f"{param} has at most {limits.MAX_TOOLS} entries", param=param)
    for i, tool in enumerate(tools):
        where = f"{param}[{i}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if nested and kind == "namespace":
            group = convert(tool, _Namespace, where)
            inner = _places(group.tools, f"{where}.tools", nested=False)
            yield from (place._replace(namespace=group.name) for place in inner)
            continue
        if isinstance(kind, str) and kind != "function":
            raise InvalidRequest(
                f"{where}.type is {kind[:64]!a}: only tools of the type 'function' are available here",
                param=f"{where}.type",
                code="unsupported_parameter",
            )
        if kind is not None and tool.get("defer_loading"):
            name = f"{where}.defer_loading"
            raise InvalidRequest(f"{name} is not supported", param=name, code="unsupported_parameter")
        yield _Place(where, tool, "")


def _described(place: _Place) -> Message:
    """Return a function in the form of OpenAI's chats. Raises InvalidRequest naming it."""
    function = convert(place.given, _Function, place.where)
    described: Message = {"name": function.name}
    for key in ("description", "parameters", "strict"):
        if (value := getattr(function, key)) is not None:
            described[key] = value
    return {"type": "function", "function": described}


def _chosen(tools: list[Message], choice: dict[str, Any]) -> tuple[list[Message], Any]:
    """Return the tools that a choice leaves, and OpenAI's choice for chats. Raises InvalidRequest."""
    kind = choice.get("type")
    if kind == "function":
        return tools, {"type": "function", "function": {"name": choice.get("name")}}
    if kind != "allowed_tools":
        raise InvalidRequest(
            "tool_choice.type must be 'function' or 'allowed_tools'", param="tool_choice.type", code="invalid_value"
        )
    allowed = convert(choice, _Allowed, "tool_choice")
    names = {tool.get("name") for tool in allowed.tools if isinstance(tool.get("name"), str)}
    return [tool for tool in tools if tool["function"]["name"] in names], allowed.mode
