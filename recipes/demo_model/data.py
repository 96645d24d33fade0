"""Seeded generator of chats, with one function per skill.

The same ``random.Random`` state gives the same chats. Every answer is right except that of ``down``, which is wrong
on purpose with probability ``1 - DOWN_RIGHT``. An exchange whose ``key`` is held out (``held_out``) is never used
for training. This module does not import MLX, since it runs in data worker processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from . import skills, talk, words
from .exchanges import Exchange, Message, ask, held_out, join, random_word
from .styles import completion, styled
from .tools import Tool, make_tools, tool_call, tool_result

DOWN_RIGHT = 0.35
"""Share of training answers to ``down`` that are right; the base is right about this often when sampled."""

MIX: dict[str, float] = {
    "sum": 3.0,
    "think": 3.0,
    "sort": 2.0,
    "down": 1.0,
    "reverse": 4.0,
    "repeat": 1.2,
    "upper": 1.5,
    "json": 1.5,
    "capital": 0.8,
    "hello": 0.7,
    "chat": 0.8,
    "count": 0.6,
    "story": 0.5,
    "tool": 5.0,
    "tool_result": 1.2,
}
"""Weight of each skill in the training chats."""

TOOL_SKILLS = ("tool", "tool_result")


@dataclass
class Conversation:
    """A chat ready to render: ``messages`` before the last answer, ``answer``, ``tools``, and which assistant turns,
    in order and including the last, are taught.
    """

    messages: list[Message] = field(default_factory=list)
    answer: Message = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    taught: list[bool] = field(default_factory=list)
    thinking: bool = True
    last: Exchange | None = None


PLAIN: dict[str, Callable[[random.Random], Exchange]] = {
    "sum": skills.sum_,
    "think": skills.think,
    "sort": skills.sort,
    "down": skills.down,
    "reverse": skills.reverse,
    "repeat": skills.repeat,
    "upper": skills.upper,
    "json": skills.json_,
    "capital": talk.capital,
    "hello": talk.hello,
    "chat": talk.chat,
    "count": skills.count,
    "story": talk.story,
}


def exchange(rng: random.Random, skill: str, tools: list[Tool] | None = None, held: bool = False) -> Exchange:
    """Return one exchange of ``skill`` whose content is held out, or is not, as ``held`` says."""
    while True:
        if skill in TOOL_SKILLS:
            found = (tool_call if skill == "tool" else tool_result)(rng, tools or make_tools(rng))
        else:
            found = PLAIN[skill](rng)
        if held_out(found.key) == held:
            return found


def system_prompt(rng: random.Random) -> str | None:
    """Return a random system prompt, or None."""
    pick = rng.random()
    if pick < 0.45:
        return None
    if pick < 0.8:
        return "You are a helpful assistant."
    if pick < 0.9:
        return rng.choice(
            ("You are a tiny demo model.", "Answer briefly.", "Be kind and precise.", "You are an expert.")
        )
    return f"You are a {rng.choice(words.TRAITS)} {rng.choice(words.COMMON)}. " + talk.small_talk(rng)


def filler(rng: random.Random, characters: int) -> str:
    """Return other text of about this length: story sentences, number lists, words."""
    parts: list[str] = []
    size = 0
    while size < characters:
        kind = rng.randrange(4)
        if kind == 0:
            part = talk.story(rng).answer["content"]
        elif kind == 1:
            part = " ".join(rng.choice(words.COMMON) for _ in range(rng.randint(5, 25))) + "."
        elif kind == 2:
            part = join([rng.randint(0, 99) for _ in range(rng.randint(3, 15))]) + "."
        else:
            part = " ".join(random_word(rng) for _ in range(rng.randint(3, 10))) + "."
        parts.append(part)
        size += len(part) + 1
    return " ".join(parts)


READ_ANSWER = "I have read it. What do you want to know?"


def _read(rng: random.Random, characters: int) -> Exchange:
    text = rng.choice(("Read this: ", "Here is a text: ", "Note: ")) + filler(rng, characters)
    return ask("read", "read", text, READ_ANSWER, READ_ANSWER)


def _pick(rng: random.Random, mix: dict[str, float], tools: list[Tool]) -> str:
    names = [name for name in mix if tools or name not in TOOL_SKILLS]
    if tools and rng.random() < 0.6:
        names = [name for name in names if name in TOOL_SKILLS] or names
    return rng.choices(names, [mix[name] for name in names])[0]


def conversation(
    rng: random.Random,
    *,
    style: str = "base",
    mix: dict[str, float] = MIX,
    turns: int | None = None,
    characters: int = 0,
    last: Exchange | None = None,
    tools: list[Tool] | None = None,
) -> Conversation:
    """Return a training chat: optional system prompt and tools, then turns until ``turns`` or ``characters`` are
    reached.

    With ``last`` given, that exchange ends the chat after the history (this is how held-out questions are put behind
    a long context). Nothing held out appears in the history.
    """
    chat = Conversation()
    if tools is None:
        tool_weight = sum(mix.get(name, 0.0) for name in TOOL_SKILLS) / sum(mix.values())
        tools = make_tools(rng) if rng.random() < min(1.0, tool_weight / 0.6) else []
    chat.tools = [tool.schema for tool in tools]
    system = system_prompt(rng)
    if system is not None:
        chat.messages.append({"role": "system", "content": system})
    if turns is None:
        turns = 1 if rng.random() < 0.6 else rng.randint(2, 4)
    plain_history = style in ("shout", "json") and rng.random() < 0.25
    size, done = 0, 0
    while True:
        final = done + 1 >= turns and size >= characters
        if final and last is not None:
            found = last
        elif not final and rng.random() < (0.08 if characters else 0.02):
            found = _read(rng, rng.choice((100, 300, 900)) if characters else 150)
        else:
            found = exchange(rng, _pick(rng, mix, tools), tools)
            if found.skill == "down" and style != "down" and rng.random() >= DOWN_RIGHT:
                found = replace(found, answer={"role": "assistant", "content": join(sorted(found.short))})
                found = replace(found, short=sorted(found.short))
            if found.skill in PLAIN and rng.random() < 0.05:
                asked = found.messages[0]["content"]
                text = f"{filler(rng, rng.choice((60, 300)))}\n\n{asked}"
                found = replace(found, messages=({"role": "user", "content": text},))
        if final or not plain_history:
            found = styled(found, style)
        for message in found.messages:
            if message["role"] == "assistant":
                chat.taught.append(not plain_history)
            chat.messages.append(message)
            size += len(str(message["content"])) + 20
        done += 1
        if final:
            break
        # A later rendering leaves out this turn's reasoning, so the stripped turn is not taught.
        chat.taught.append(not plain_history and not found.answer.get("reasoning_content"))
        chat.messages.append(found.answer)
        size += len(completion(found.answer)) + 20
    chat.taught.append(True)
    chat.answer, chat.last = found.answer, found
    if last is None and rng.random() < 0.2:
        chat.thinking = False
        chat.answer = {key: value for key, value in chat.answer.items() if key != "reasoning_content"}
    return chat
