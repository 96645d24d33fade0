"""What the answer to a chat must match: the request's own constraint, the calls that it requires, after a thought."""

from __future__ import annotations

from msgspec import structs

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.chats import Chat
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.grammar.constraint import Call, Calls, Constraint, Schema
from mlx_tandem.generation.tools.calls import CallForm
from mlx_tandem.generation.tools.offer import Function, Tools
from mlx_tandem.strict_json import dumps


def chat_constraint(front: Front, chat: Chat, given: Constraint | None) -> Constraint | None:
    """Return what the answers must match; None for any text. `given` is the request's own constraint.

    Calls are constrained where they are required, where a function is strict, and beside `given`, which they may
    replace. Raises InvalidRequest for what cannot be enforced.
    """
    made, tools, form = given, chat.tools, front.reading.call_form
    if tools is not None and tools.choice == "required":
        if given is not None:
            raise InvalidRequest(f"{given.param} cannot be combined with a call that is required", param=given.param)
        made = Constraint(_calls(tools, form, "tool_choice"), "tools")
    elif tools is not None and given is not None:
        made = structs.replace(given, calls=_calls(tools, form, given.param))
    elif tools is not None and any(function.strict for function in tools.functions.values()):
        calls, trigger = _calls(tools, form, "tools"), front.reading.call_opener
        if not trigger:
            raise InvalidRequest("strict tools cannot be enforced in the form of this model's calls", param="tools")
        made = Constraint(structs.replace(calls, trigger=trigger), "tools")
    return None if made is None else structs.replace(made, thought=chat.thought)


def _calls(tools: Tools, form: CallForm | None, param: str) -> Calls:
    """Return the form of the calls. Raises InvalidRequest naming `param` if calls of this family cannot be enforced."""
    if form is None:
        raise InvalidRequest("the form of this model's tool calls cannot be enforced", param=param)
    calls = tuple(
        Call(form.before + function.name + form.middle, _arguments(tools, function), form.after)
        for function in tools.functions.values()
    )
    return Calls(calls, separator=form.between if tools.parallel else None)


def _arguments(tools: Tools, function: Function) -> Schema:
    """Return the schema of a function's arguments. Unless it is strict, what cannot be enforced is left out."""
    schema = {"type": "object"} | (function.parameters or {})
    return Schema(dumps(schema), tools.places[function.name], is_lenient=not function.strict)
