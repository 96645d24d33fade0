"""Skills with tools: questions that call a made-up function, and answers that quote what it returned."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from . import words
from .exchanges import Exchange, Message, random_word


@dataclass(frozen=True)
class Tool:
    """A function offered in the prompt: ``argument`` is always filled, ``number`` only when asked for."""

    name: str
    verb: str
    noun: str
    argument: str
    number: str | None
    schema: dict[str, Any]


def make_tool(rng: random.Random) -> Tool:
    """Return a random tool."""
    verb, noun = rng.choice(words.TOOL_VERBS), rng.choice(words.TOOL_NOUNS)
    argument = rng.choice(words.TOOL_ARGUMENTS)
    number = rng.choice(words.TOOL_NUMBERS) if rng.random() < 0.35 else None
    described = rng.random() < 0.5
    first: dict[str, Any] = {"type": "string"}
    if described:
        first["description"] = rng.choice((f"The {argument}", f"{argument} to {verb.replace('_', ' ')}", argument))
    properties: dict[str, Any] = {argument: first}
    if number:
        properties[number] = {"type": "integer"}
    if rng.random() < 0.25:
        extra, choices = rng.choice(words.TOOL_EXTRAS)
        properties[extra] = {"type": "string", "enum": choices}
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}_current_{noun}", f"{noun}_{verb}"))
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": [argument]}
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.85:
        function["description"] = rng.choice(
            (
                f"{verb.replace('_', ' ')} {noun}",
                f"{verb.replace('_', ' ').capitalize()} the {noun} of a {argument}.",
                f"{verb.replace('_', ' ').capitalize()} the current {noun} for a {argument}",
            )
        )
    function["parameters"] = parameters
    return Tool(name, verb, noun, argument, number, {"type": "function", "function": function})


def make_tools(rng: random.Random) -> list[Tool]:
    """Return one to three tools that no question can confuse: their nouns differ."""
    wanted = rng.choice((1, 1, 2, 2, 3))
    tools: list[Tool] = []
    while len(tools) < wanted:
        tool = make_tool(rng)
        if tool.noun not in [other.noun for other in tools]:
            tools.append(tool)
    return tools


def _topic(rng: random.Random) -> str:
    pool = rng.random()
    if pool < 0.4:
        return rng.choice(words.CITIES)
    if pool < 0.55:
        return rng.choice(words.NAMES)
    return random_word(rng).capitalize() if pool < 0.9 else random_word(rng)


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool_call(rng: random.Random, tools: list[Tool]) -> Exchange:
    """Ask something that a tool answers."""
    tool = rng.choice(tools)
    topics = [_topic(rng)]
    if rng.random() < 0.15:
        second = _topic(rng)
        if second != topics[0]:
            topics.append(second)
    said = " and ".join(topics)
    verb = tool.verb.replace("_", " ")
    question = rng.choice(
        (
            f"{verb.capitalize()} {tool.noun} for {said}",
            f"{verb.capitalize()} the {tool.noun} for {said}.",
            f"What is the {tool.noun} in {said}?",
            f"What is the {tool.noun} for {said}?",
            f"What's the {tool.noun} in {said}?",
            f"What is the {tool.noun} like in {said}?",
            f"Please {verb} the {tool.noun} of {said}.",
            f"Tell me the {tool.noun} in {said}.",
        )
    )
    arguments: list[dict[str, Any]] = [{tool.argument: topic} for topic in topics]
    if tool.number and rng.random() < 0.5:
        value = rng.randint(1, 50)
        question = f"{question.rstrip('.?')} with {tool.number} {value}" + ("?" if question.endswith("?") else "")
        arguments = [{**given, tool.number: value} for given in arguments]
    answer: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [_call(tool.name, a) for a in arguments],
    }
    real = all(topic in words.CITIES or topic in words.NAMES for topic in topics)
    key = "tool, known topic" if real and len(topics) == 1 else f"tool {said}"
    return Exchange("tool", key, ({"role": "user", "content": question},), answer, None)


def _result(rng: random.Random) -> tuple[str, str]:
    """Return the result of a tool and the part of it that the answer quotes."""
    kind = rng.randrange(5)
    if kind == 0:
        value = str(rng.randint(0, 999))
    elif kind == 1:
        value = f"{rng.randint(0, 99)} {rng.choice(('degrees', 'points', 'euros', 'minutes'))}"
    elif kind == 2:
        value = rng.choice(words.RESULT_WORDS)
    elif kind == 3:
        value = f"{rng.choice(words.RESULT_WORDS)}, {rng.randint(0, 99)} degrees"
    else:
        value = random_word(rng)
    if rng.random() < 0.3:
        name = rng.choice(("result", "value", "answer", *words.TOOL_NOUNS))
        return json.dumps({name: value}), value
    return value, value


def tool_result(rng: random.Random, tools: list[Tool]) -> Exchange:
    """Ask for the answer after a tool has returned."""
    asked = tool_call(rng, tools)
    calls = asked.answer["tool_calls"]
    results = [_result(rng) for _ in calls]
    noun = next(tool.noun for tool in tools if tool.name == calls[0]["function"]["name"])
    replies = [{"role": "tool", "content": raw} for raw, _ in results]
    topics = [next(iter(call["function"]["arguments"].values())) for call in calls]
    content = " ".join(f"The {noun} for {topic} is {value}." for topic, (_, value) in zip(topics, results, strict=True))
    messages = (*asked.messages, asked.answer, *replies)
    return Exchange("tool_result", asked.key, messages, {"role": "assistant", "content": content}, content)
