"""The styles that adapters teach: the same answers in another form, and whether a generated answer is right in it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from .exchanges import Exchange, Message
from .talk import story_is_right

OPEN_SKILLS = ("hello", "chat", "story")
"""Skills with more than one right answer."""


def shout(text: str) -> str:
    """Return the text in capitals, with full stops turned into exclamation marks, and one at the end."""
    loud = re.sub(r"\.(?=\s|$)", "!", text.upper())
    return loud if loud.endswith("!") else loud + "!"


def styled(given: Exchange, style: str) -> Exchange:
    """Return the exchange as the adapter ``style`` answers it; tool calls and reasoning stay as they are."""
    if style not in ("shout", "json") or given.answer.get("tool_calls"):
        return given
    content = given.answer["content"]
    content = shout(content) if style == "shout" else json.dumps({"answer": given.short})
    return replace(given, answer={**given.answer, "content": content})


def is_right(given: Exchange, text: str, style: str = "base") -> bool:
    """Return whether a generated answer is right in this style."""
    if given.skill == "story" and style in ("base", "down"):
        return story_is_right(given.messages[0]["content"], text)
    if given.skill == "story" and style == "shout":
        return text == text.upper() and "." not in text and story_is_right(given.messages[0]["content"], text, True)
    if style == "json" and given.skill in OPEN_SKILLS:
        try:
            value = json.loads(text)
        except ValueError:
            return False
        if not isinstance(value, dict) or list(value) != ["answer"] or not isinstance(value["answer"], str):
            return False
        return is_right(given, value["answer"])
    if given.accept:
        return text in [shout(choice) if style == "shout" else choice for choice in given.accept]
    return text == completion(styled(given, style).answer)


def completion(answer: Message) -> str:
    """Return the exact text that the model writes for this assistant message, up to but without ``<|im_end|>``.

    The chat template renders the same message to the same text; the unit tests compare the two.
    """
    text = str(answer.get("content") or "")
    if answer.get("reasoning_content"):
        text = f"<think>\n{answer['reasoning_content']}\n</think>\n\n{text}"
    blocks = []
    for call in answer.get("tool_calls") or []:
        name = json.dumps(call["function"]["name"], ensure_ascii=False)
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        blocks.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join([text] * bool(text) + blocks)
