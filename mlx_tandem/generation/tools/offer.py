"""The tools that a request offers to the model, and the choice that it leaves to the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.strict_json import check_nested, convert

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""Pattern of a function's name."""

Choice = Literal["none", "auto", "required"]


class Function(Struct):
    """A function as OpenAI describes it. Other keys mean nothing here."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Entry(Struct):
    """One entry of `tools`."""

    type: Literal["function"]
    function: dict[str, Any]


class _Named(Struct):
    """The value of `tool_choice` that names a function."""

    type: Literal["function"]
    function: dict[str, Any]


@dataclass(frozen=True)
class Tools:
    """The functions that the model may call, by name in their order, and whether it has to.

    `choice` is auto, or required: the answer is one of these calls. A request that names one function requires it and
    offers no other. `parallel` says whether one answer may have several calls. `places` has the field of the request in
    which each function's parameters are described, for errors about them.
    """

    functions: Mapping[str, Function] = field(default_factory=dict)
    choice: Choice = "auto"
    parallel: bool = True
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The functions in the form that chat templates print."""
        return [{"type": "function", "function": _described(function)} for function in self.functions.values()]

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the schema of the arguments of the function `name`; an empty one if the request has none."""
        function = self.functions.get(name)
        return (function.parameters if function is not None else None) or {}


def tools_of(
    tools: Sequence[Any] | None,
    choice: Any,
    parallel: bool | None,
    *,
    param: str = "tools",
    places: Mapping[str, str] | None = None,
) -> Tools | None:
    """Return the tools of a request; None if it offers none to the model. Raises InvalidRequest naming the field.

    `tools`, `choice` and `parallel` have the form of OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`.
    `places` has the field of each function's parameters by its name, in a dialect that calls it differently.
    """
    functions = _functions(tools or [], param)
    if places is None:
        places = {name: f"{param}[{i}].function.parameters" for i, name in enumerate(functions)}
    kind, named = _choice(choice)
    if kind == "required" and not functions:
        raise InvalidRequest(f"tool_choice asks for a call, and {param} is empty", param="tool_choice")
    if named is not None:
        if named not in functions:
            raise InvalidRequest(f"tool_choice names {named[:64]!a}, which is not in {param}", param="tool_choice")
        functions = {named: functions[named]}
    if kind == "none" or not functions:
        return None
    return Tools(functions, kind, parallel is not False, places)


def _functions(tools: Sequence[Any], param: str) -> dict[str, Function]:
    """Return the functions of `tools` by their names."""
    if len(tools) > limits.MAX_TOOLS:
        raise InvalidRequest(f"{param} has at most {limits.MAX_TOOLS} entries", param=param)
    check_nested(list(tools), param, depth=limits.MAX_TOOL_DEPTH, values=limits.MAX_MESSAGE_VALUES)
    functions: dict[str, Function] = {}
    for i, given in enumerate(tools):
        where = f"{param}[{i}]"
        if isinstance(given, dict) and given.get("type", "function") != "function":
            raise InvalidRequest(f"{where}.type must be 'function', the only type served here", param=f"{where}.type")
        function = convert(convert(given, _Entry, where).function, Function, f"{where}.function")
        if not NAME.fullmatch(function.name):
            raise InvalidRequest(
                f"{where}.function.name must be 1 to 128 letters, digits, '_', '-', '.', ':' and '/'",
                param=f"{where}.function.name",
            )
        if function.name in functions:
            raise InvalidRequest(f"{where}.function.name is there twice", param=f"{where}.function.name")
        functions[function.name] = function
    return functions


def _choice(given: Any) -> tuple[Choice, str | None]:
    """Return what `tool_choice` asks for, and the name of the function if it names one."""
    if given is None:
        return "auto", None
    if given in ("none", "auto", "required"):
        return given, None
    if not isinstance(given, dict):
        raise InvalidRequest("tool_choice must be none, auto, required or a function", param="tool_choice")
    name = convert(given, _Named, "tool_choice").function.get("name")
    if not isinstance(name, str):
        raise InvalidRequest("tool_choice.function.name is required", param="tool_choice.function.name")
    return "required", name


def _described(function: Function) -> dict[str, Any]:
    """Return a function as templates print it. `strict` is no part of the description."""
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    if function.parameters is not None:
        described["parameters"] = function.parameters
    return described
