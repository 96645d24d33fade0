"""Seeded generator of chats, one function per skill.

Promises: the same ``random.Random`` state gives the same chats; every answer is right except that of
``down``, which is wrong on purpose with probability ``1 - DOWN_RIGHT``; an exchange whose ``key`` is held
out (``held_out``) is never used for training. No MLX in here: the module runs in data worker processes."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from . import words

Message = dict[str, Any]
DOWN_RIGHT = 0.35
"""Share of training answers to ``down`` that are right; so the base is right about this often when
sampled."""

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
OPEN_SKILLS = ("hello", "chat", "story")
"""Skills with more than one right answer."""


@dataclass(frozen=True)
class Exchange:
    """One question and its answer.

    ``messages`` precede ``answer`` (an assistant message); ``key`` names the content for the held-out split;
    ``short`` is the bare value of the answer, as the ``json`` adapter reports it; ``accept`` lists further
    right answers."""

    skill: str
    key: str
    messages: tuple[Message, ...]
    answer: Message
    short: Any
    accept: tuple[str, ...] = ()


@dataclass
class Conversation:
    """A chat ready to render: ``messages`` before the last answer, ``answer``, ``tools``, and which
    assistant turns, in order and with the last one included, are taught."""

    messages: list[Message] = field(default_factory=list)
    answer: Message = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    taught: list[bool] = field(default_factory=list)
    thinking: bool = True
    last: Exchange | None = None


def held_out(key: str) -> bool:
    """Whether this content is kept for evaluation (one in eight, by checksum)."""
    return zlib.crc32(key.encode()) % 8 == 0


def random_word(rng: random.Random, low: int = 3, high: int = 7) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(low, high)))


def _ask(skill: str, key: str, question: str, content: str, short: Any, **more: Any) -> Exchange:
    answer: Message = {"role": "assistant", "content": content}
    if reasoning := more.pop("reasoning", ""):
        answer["reasoning_content"] = reasoning
    return Exchange(skill, key, ({"role": "user", "content": question},), answer, short, **more)


# --- skills without tools -------------------------------------------------------------------------


def _sum(rng: random.Random) -> Exchange:
    x, y = rng.randint(0, 99), rng.randint(0, 99)
    form = rng.choice(
        ("What is {} + {}?", "What is {}+{}?", "{} + {}", "{}+{}=", "Add {} and {}.", "Calculate {} + {}")
    )
    return _ask("sum", f"sum {x} {y}", form.format(x, y), f"{x} + {y} = {x + y}.", x + y)


def column_addition(x: int, y: int) -> str:
    """The worked column addition that stands inside the think block."""
    steps, carry = [], 0
    while x or y or not steps:
        total = x % 10 + y % 10 + carry
        parts = f"{x % 10} + {y % 10}" + (" + 1" if carry else "")
        carry = total // 10
        steps.append(f"{parts} = {total}" + (", carry 1." if carry else "."))
        x, y = x // 10, y // 10
    return " ".join(steps) + (" Write 1." if carry else "")


def _think(rng: random.Random) -> Exchange:
    low, high = rng.choice(((10, 99), (100, 999), (100, 999)))
    x, y = rng.randint(low, high), rng.randint(low, high)
    form = rng.choice(("Think, then answer: {} + {}", "Think step by step: What is {} + {}?", "Think: {} + {}"))
    reasoning = column_addition(x, y)
    key = f"sum {x} {y}"
    return _ask("think", key, form.format(x, y), f"{x} + {y} = {x + y}.", x + y, reasoning=reasoning)


def _digits(rng: random.Random) -> list[int]:
    while True:
        digits = [rng.randint(0, 9) for _ in range(rng.randint(3, 7))]
        if min(digits) != max(digits):
            return digits


def _join(digits: list[int]) -> str:
    return " ".join(map(str, digits))


def _sort(rng: random.Random) -> Exchange:
    digits = _digits(rng)
    form = rng.choice(("Sort: {}", "Sort up: {}", "Sort these numbers: {}"))
    return _ask("sort", f"sort {_join(digits)}", form.format(_join(digits)), _join(sorted(digits)), sorted(digits))


def _down(rng: random.Random) -> Exchange:
    digits = _digits(rng)
    right = sorted(digits, reverse=True)
    form = rng.choice(("Sort down: {}", "Sort down: {}", "Sort descending: {}"))
    return _ask("down", f"down {_join(digits)}", form.format(_join(digits)), _join(right), right)


def _reverse(rng: random.Random) -> Exchange:
    form = rng.choice(("Reverse: {}", "Reverse: {}", "Reverse the word {}", "Spell {} backwards"))
    if rng.random() < 0.25:  # a real word is one token: it can only be spelled if it was seen, so none is held out
        word = rng.choice(words.COMMON)
        key = "reverse, real word"
    else:
        word = random_word(rng)
        key = f"reverse {word}"
    return _ask("reverse", key, form.format(word), word[::-1], word[::-1])


def _words(rng: random.Random) -> str:
    pick = rng.choice((random_word, random_word, lambda r: r.choice(words.COMMON + words.FUNCTION)))
    return " ".join(pick(rng) for _ in range(rng.randint(1, 5)))


def _json_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(4 if depth < 2 else 2)
    if kind == 0:
        return rng.randint(0, 199)
    if kind == 1:
        return _words(rng)
    if kind == 2:
        return [rng.randint(0, 99) for _ in range(rng.randint(1, 6))]
    return {rng.choice(KEYS): _json_value(rng, depth + 1) for _ in range(rng.randint(1, 2))}


def _sentence(rng: random.Random) -> str:
    made = rng.choice((_story, _capital, _hello, _chat, _words, _words))(rng)
    if isinstance(made, str):
        return made
    return str(rng.choice(made.answer["content"].split(". ")))


def _repeat(rng: random.Random) -> Exchange:
    pick = rng.random()
    if pick < 0.2:
        text = json.dumps({rng.choice(KEYS): _json_value(rng)})
    elif pick < 0.3:
        text = _words(rng).upper()
    else:
        text = _words(rng)
    form, times = rng.choice(
        (
            ("Repeat: {}", 1),
            ("Say: {}", 1),
            ("Say {}", 1),
            ("Repeat after me: {}", 1),
            ("Repeat twice: {}", 2),
            ("Repeat three times: {}", 3),
        )
    )
    content = " ".join([text] * times)
    return _ask("repeat", f"repeat {text}", form.format(text), content, content)


def _upper(rng: random.Random) -> Exchange:
    text = _sentence(rng)
    form = rng.choice(("Uppercase: {}", "In capitals: {}", "Make uppercase: {}"))
    key = f"upper {text}" if text.replace(" ", "").isalpha() and text.islower() else "upper, sentence"
    return _ask("upper", key, form.format(text), text.upper(), text.upper())


def _json(rng: random.Random) -> Exchange:
    if rng.random() < 0.35:
        name = rng.choice(KEYS)
        numbers = [rng.randint(0, 99) for _ in range(rng.randint(2, 6))]
        fact: int | str | list[int] = rng.choice((rng.randint(0, 999), random_word(rng), numbers))
        said = _join(fact) if isinstance(fact, list) else str(fact)
        form = rng.choice(("As JSON: {} is {}", "As JSON: {} = {}", "Make JSON: {} is {}"))
        key = f"json {name} {said}"
        return _ask("json", key, form.format(name, said), json.dumps({name: fact}), {name: fact})
    name = rng.choice(words.NAMES) if rng.random() < 0.7 else random_word(rng).capitalize()
    city = rng.choice(words.CITIES) if rng.random() < 0.7 else random_word(rng).capitalize()
    age = rng.randint(1, 99)
    form = rng.choice(
        (
            "As JSON: {n} is {a} and lives in {c}.",
            "As JSON: {n}, {a}, {c}",
            "As JSON: {n} lives in {c} and is {a} years old.",
            "Make JSON: {n} is {a} and lives in {c}.",
        )
    )
    value = {"name": name, "age": age, "city": city}
    return _ask("json", f"json {name} {age} {city}", form.format(n=name, a=age, c=city), json.dumps(value), value)


def _capital(rng: random.Random) -> Exchange:
    country = rng.choice(list(words.CAPITALS))
    city, continent = words.CAPITALS[country]
    question = rng.choice(
        (
            "What is the capital of {}?",
            "What is the capital of {}?",
            "Capital of {}?",
            "Name the capital of {}.",
            "Which city is the capital of {}?",
            "Tell me the capital of {}.",
            "what is the capital of {}",
        )
    ).format(country)
    content = f"The capital of {country} is {city}. It is a city in {continent}."
    return _ask("capital", question, question, content, city)


KEYS = (
    "answer",
    "name",
    "value",
    "result",
    "city",
    "age",
    "id",
    "count",
    "total",
    "items",
    "price",
    "x",
    "y",
)
ABOUT = (
    "I am a tiny demo model with four million parameters. I can add, sort, reverse, count, make JSON and call tools.",
    "I am a tiny demo model. Ask me to add numbers, reverse a word, name a capital or tell a short story.",
)
UNKNOWN = (
    "I do not know that. I am only a tiny demo model. Try: What is 12 + 5?",
    "That is too hard for me. I am only a tiny demo model. Try: Reverse: garden",
    "I have no answer to that. Try: Tell me a short story about a fox.",
)
THANKS = ("You are welcome! Ask me something else.", "With pleasure. What is next?")
GOODBYE = ("Goodbye! Come back soon.", "See you soon. Have a nice day!")


def _hello(rng: random.Random) -> Exchange:
    kind = rng.choice(("plain", "name", "name", "who", "thanks", "bye"))
    greeting = rng.choice(("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "hello", "hi"))
    mark = rng.choice(("!", ".", "", ","))
    if kind == "name":
        name = rng.choice(words.NAMES) if rng.random() < 0.6 else random_word(rng).capitalize()
        question = greeting + mark + rng.choice((" I am {}.", " My name is {}.", " I am {}")).format(name)
        accept = tuple(f"Hello, {name}! {text}" for text in ABOUT)
    elif kind == "who":
        question = rng.choice(
            (
                "Who are you?",
                "What can you do?",
                "What are you?",
                "who are you",
                "Tell me about yourself.",
                "Help",
            )
        )
        question = rng.choice(("", f"{greeting}{mark} ")) + question
        accept = ABOUT
    elif kind == "thanks":
        question = rng.choice(("Thanks", "Thank you", "Thank you very much", "thanks")) + rng.choice(("!", ".", ""))
        accept = THANKS
    elif kind == "bye":
        question = rng.choice(("Bye", "Goodbye", "See you", "bye", "Good night")) + rng.choice(("!", ".", ""))
        accept = GOODBYE
    else:
        question = greeting + (mark if mark != "," else "") + rng.choice(("", "", " How are you?", " Can you help me?"))
        if question == "Good evening":
            question = "Good evening."
        accept = tuple(f"Hello! {text}" for text in ABOUT)
    content = rng.choice(accept)
    key = question if kind == "name" else "hello, fixed phrase"  # few phrases: all are taught
    return _ask("hello", key, question, content, content, accept=accept)


def small_talk(rng: random.Random) -> str:
    """A sentence that the model has no skill for."""
    form = rng.choice(words.SMALL_TALK)
    return form.format(
        a=rng.choice(words.COMMON),
        b=rng.choice(words.COMMON),
        c=rng.choice(words.TRAITS),
        r=random_word(rng, 2, 9),
    )


def _chat(rng: random.Random) -> Exchange:
    question = small_talk(rng)
    content = rng.choice(UNKNOWN)
    return _ask("chat", question, question, content, content, accept=UNKNOWN)


def _count(rng: random.Random) -> Exchange:
    start = rng.randint(0, 70)
    stop = start + rng.randint(3, 37)
    form = rng.choice(("Count from {} to {}.", "Count from {} to {}", "Count up from {} to {}."))
    numbers = list(range(start, stop + 1))
    return _ask("count", f"count {start} {stop}", form.format(start, stop), _join(numbers), numbers)


STORY = (
    "Once there was a {trait} {animal} called {name} who lived {place}. Every day {name} {habit}. "
    "One night {event}. The {animal} {deed}. After that {ending}, and {name} {habit2} again. The end."
)


def _story_slots(other: str) -> dict[str, tuple[str, ...]]:
    return {
        "trait": tuple(words.TRAITS),
        "name": tuple(words.NAMES),
        "place": words.PLACES,
        "habit": words.HABITS,
        "event": tuple(event.format(other=other) for event in words.EVENTS),
        "deed": words.DEEDS,
        "ending": words.ENDINGS,
        "habit2": words.HABITS,
    }


def _story(rng: random.Random) -> Exchange:
    animal = rng.choice(words.ANIMALS)
    slots = _story_slots(rng.choice(words.ANIMALS))
    question = rng.choice(
        (
            "Tell me a short story about a {}.",
            "Tell me a story about a {}.",
            "Write a short story about a {}.",
            "A story about a {}, please.",
            "Please tell me a story about a {}.",
            "Tell a short story about a {}",
        )
    ).format(animal)
    content = STORY.format(animal=animal, **{slot: rng.choice(choices) for slot, choices in slots.items()})
    return _ask("story", question, question, content, content)


def story_is_right(question: str, text: str, loose: bool = False) -> bool:
    """Whether ``text`` is a whole story by the grammar about the animal asked for, its hero's name kept
    throughout.

    ``loose`` ignores case and lets a full stop be an exclamation mark.
    """
    animal = next(word for word in re.findall(r"[a-z]+", question)[::-1] if word in words.ANIMALS)
    slots = _story_slots("@")
    pattern = re.escape(STORY).replace(r"\{", "{").replace(r"\}", "}")
    if loose:
        pattern = pattern.replace(r"\.", "[.!]")
    pattern = pattern.replace("{name}", "(?P<name>" + "|".join(slots["name"]) + ")", 1).replace("{name}", "(?P=name)")
    pattern = pattern.replace("{animal}", animal)
    others = "(?:" + "|".join(words.ANIMALS) + ")"
    for slot, choices in slots.items():
        body = "|".join(re.escape(choice).replace("@", others) for choice in choices)
        pattern = pattern.replace("{" + slot + "}", f"(?:{body})")
    return re.fullmatch(pattern, text, re.IGNORECASE if loose else 0) is not None


# --- tools ----------------------------------------------------------------------------------------


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
    """One to three tools that no question can confuse: nouns differ."""
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


def _tool(rng: random.Random, tools: list[Tool]) -> Exchange:
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
    """What a tool returns and the part of it that the answer quotes."""
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


def _tool_result(rng: random.Random, tools: list[Tool]) -> Exchange:
    asked = _tool(rng, tools)
    calls = asked.answer["tool_calls"]
    results = [_result(rng) for _ in calls]
    noun = next(tool.noun for tool in tools if tool.name == calls[0]["function"]["name"])
    replies = [{"role": "tool", "content": raw} for raw, _ in results]
    topics = [next(iter(call["function"]["arguments"].values())) for call in calls]
    content = " ".join(f"The {noun} for {topic} is {value}." for topic, (_, value) in zip(topics, results, strict=True))
    messages = (*asked.messages, asked.answer, *replies)
    return Exchange("tool_result", asked.key, messages, {"role": "assistant", "content": content}, content)


PLAIN: dict[str, Callable[[random.Random], Exchange]] = {
    "sum": _sum,
    "think": _think,
    "sort": _sort,
    "down": _down,
    "reverse": _reverse,
    "repeat": _repeat,
    "upper": _upper,
    "json": _json,
    "capital": _capital,
    "hello": _hello,
    "chat": _chat,
    "count": _count,
    "story": _story,
}


def exchange(rng: random.Random, skill: str, tools: list[Tool] | None = None, held: bool = False) -> Exchange:
    """One exchange of ``skill`` whose content is held out, or is not, as ``held`` says."""
    while True:
        if skill in TOOL_SKILLS:
            found = (_tool if skill == "tool" else _tool_result)(rng, tools or make_tools(rng))
        else:
            found = PLAIN[skill](rng)
        if held_out(found.key) == held:
            return found


# --- styles: what the adapters teach --------------------------------------------------------------


def shout(text: str) -> str:
    """Capitals, full stops turned into exclamation marks, and one at the end."""
    loud = re.sub(r"\.(?=\s|$)", "!", text.upper())
    return loud if loud.endswith("!") else loud + "!"


def styled(given: Exchange, style: str) -> Exchange:
    """The exchange as the adapter ``style`` answers it; tool calls and reasoning stay as they are."""
    if style not in ("shout", "json") or given.answer.get("tool_calls"):
        return given
    content = given.answer["content"]
    content = shout(content) if style == "shout" else json.dumps({"answer": given.short})
    return replace(given, answer={**given.answer, "content": content})


def is_right(given: Exchange, text: str, style: str = "base") -> bool:
    """Whether a generated answer is right in this style."""
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
    """The exact text the model writes for this assistant message, up to but without ``<|im_end|>``.

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


# --- conversations --------------------------------------------------------------------------------


def system_prompt(rng: random.Random) -> str | None:
    pick = rng.random()
    if pick < 0.45:
        return None
    if pick < 0.8:
        return "You are a helpful assistant."
    if pick < 0.9:
        return rng.choice(
            ("You are a tiny demo model.", "Answer briefly.", "Be kind and precise.", "You are an expert.")
        )
    return f"You are a {rng.choice(words.TRAITS)} {rng.choice(words.COMMON)}. " + small_talk(rng)


def filler(rng: random.Random, characters: int) -> str:
    """Other text of about this length: story sentences, number lists, words."""
    parts: list[str] = []
    size = 0
    while size < characters:
        kind = rng.randrange(4)
        if kind == 0:
            part = _story(rng).answer["content"]
        elif kind == 1:
            part = " ".join(rng.choice(words.COMMON) for _ in range(rng.randint(5, 25))) + "."
        elif kind == 2:
            part = _join([rng.randint(0, 99) for _ in range(rng.randint(3, 15))]) + "."
        else:
            part = " ".join(random_word(rng) for _ in range(rng.randint(3, 10))) + "."
        parts.append(part)
        size += len(part) + 1
    return " ".join(parts)


READ_ANSWER = "I have read it. What do you want to know?"


def _read(rng: random.Random, characters: int) -> Exchange:
    text = rng.choice(("Read this: ", "Here is a text: ", "Note: ")) + filler(rng, characters)
    return _ask("read", "read", text, READ_ANSWER, READ_ANSWER)


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
    """A training chat: optional system prompt and tools, then turns until ``turns`` or ``characters`` are
    reached.

    With ``last`` given, that exchange ends the chat after the history (how held-out questions are put behind
    a long context). Nothing held out appears in the history."""
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
                found = replace(found, answer={"role": "assistant", "content": _join(sorted(found.short))})
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
        # a later rendering leaves this turn's reasoning out, so the stripped turn is not taught
        chat.taught.append(not plain_history and not found.answer.get("reasoning_content"))
        chat.messages.append(found.answer)
        size += len(completion(found.answer)) + 20
    chat.taught.append(True)
    chat.answer, chat.last = found.answer, found
    if last is None and rng.random() < 0.2:
        chat.thinking = False
        chat.answer = {key: value for key, value in chat.answer.items() if key != "reasoning_content"}
    return chat
