"""The form in which a chat template reads the tool calls of earlier answers, which is found by rendering one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mlx_tandem.generation.parts import Part

_ARGUMENTS = {"tandem_key": "tandem_value"}
FUNCTION = {
    "name": "tandem_function",
    "description": "A function.",
    "parameters": {"type": "object", "properties": {"tandem_key": {"type": "string", "description": "A key."}}},
}
"""The function of the conversations that are rendered to find forms."""
TOOLS = [{"type": "function", "function": FUNCTION}]
"""The tools of these conversations."""


def call_of(id: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of the function. Mistral's templates want ids of nine letters and digits."""
    return {"id": id, "type": "function", "function": {"name": FUNCTION["name"], "arguments": arguments}}


CONVERSATION: Sequence[dict[str, Any]] = (
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "", "tool_calls": [call_of("call00001", _ARGUMENTS)]},
    {"role": "tool", "name": FUNCTION["name"], "tool_call_id": "call00001", "content": "done"},
)
"""The conversation that is rendered to find the form: a question, a call and its result."""


class CallForm(NamedTuple):
    """The form of a message with tool calls.

    `as_text` stands for arguments that are JSON text instead of an object. `no_content` stands for null in place of an
    empty content.
    """

    as_text: bool = False
    no_content: bool = False

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the conversation, whose arguments are objects, in this form.

        The content of the last message stays a text, which the answer may continue.
        """
        if self == CallForm():
            return messages
        last = len(messages) - 1
        return [self._message(m, i == last) if m.get("tool_calls") else m for i, m in enumerate(messages)]

    def _message(self, message: Mapping[str, Any], is_last: bool) -> Mapping[str, Any]:
        """Return one message with calls in this form."""
        made = dict(message)
        if self.no_content and not is_last:
            made["content"] = made["content"] or None
        if self.as_text:
            made["tool_calls"] = [_with_text(call) for call in made["tool_calls"]]
        return made


FORMS = (CallForm(), CallForm(no_content=True), CallForm(as_text=True), CallForm(as_text=True, no_content=True))
"""All forms, the usual one first."""


def prints_call(parts: Sequence[Part]) -> bool:
    """Return whether this rendering of CONVERSATION shows the call's arguments, and not as Python would write them."""
    text = "".join(text for text, _ in parts)
    return _ARGUMENTS["tandem_key"] in text and str(_ARGUMENTS) not in text


def _with_text(call: Any) -> Any:
    """Return a call whose arguments are JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
