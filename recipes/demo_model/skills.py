"""Skills with one right answer: sums, sorting, reversing, repeating, capitals, JSON and counting."""

from __future__ import annotations

import json
import random
from typing import Any

from . import talk, words
from .exchanges import Exchange, ask, join, random_word

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


def sum_(rng: random.Random) -> Exchange:
    """Ask for a sum."""
    x, y = rng.randint(0, 99), rng.randint(0, 99)
    form = rng.choice(
        ("What is {} + {}?", "What is {}+{}?", "{} + {}", "{}+{}=", "Add {} and {}.", "Calculate {} + {}")
    )
    return ask("sum", f"sum {x} {y}", form.format(x, y), f"{x} + {y} = {x + y}.", x + y)


def column_addition(x: int, y: int) -> str:
    """Return the worked column addition that stands inside the think block."""
    steps, carry = [], 0
    while x or y or not steps:
        total = x % 10 + y % 10 + carry
        parts = f"{x % 10} + {y % 10}" + (" + 1" if carry else "")
        carry = total // 10
        steps.append(f"{parts} = {total}" + (", carry 1." if carry else "."))
        x, y = x // 10, y // 10
    return " ".join(steps) + (" Write 1." if carry else "")


def think(rng: random.Random) -> Exchange:
    """Ask for a sum to be thought through."""
    low, high = rng.choice(((10, 99), (100, 999), (100, 999)))
    x, y = rng.randint(low, high), rng.randint(low, high)
    form = rng.choice(("Think, then answer: {} + {}", "Think step by step: What is {} + {}?", "Think: {} + {}"))
    reasoning = column_addition(x, y)
    key = f"sum {x} {y}"
    return ask("think", key, form.format(x, y), f"{x} + {y} = {x + y}.", x + y, reasoning=reasoning)


def _digits(rng: random.Random) -> list[int]:
    while True:
        digits = [rng.randint(0, 9) for _ in range(rng.randint(3, 7))]
        if min(digits) != max(digits):
            return digits


def sort(rng: random.Random) -> Exchange:
    """Ask for digits to be sorted."""
    digits = _digits(rng)
    form = rng.choice(("Sort: {}", "Sort up: {}", "Sort these numbers: {}"))
    return ask("sort", f"sort {join(digits)}", form.format(join(digits)), join(sorted(digits)), sorted(digits))


def down(rng: random.Random) -> Exchange:
    """Ask for digits to be sorted descending; the answer is often wrong on purpose."""
    digits = _digits(rng)
    right = sorted(digits, reverse=True)
    form = rng.choice(("Sort down: {}", "Sort down: {}", "Sort descending: {}"))
    return ask("down", f"down {join(digits)}", form.format(join(digits)), join(right), right)


def reverse(rng: random.Random) -> Exchange:
    """Ask for a word to be reversed."""
    form = rng.choice(("Reverse: {}", "Reverse: {}", "Reverse the word {}", "Spell {} backwards"))
    if rng.random() < 0.25:  # a real word is one token, which can only be spelled if it was seen: none is held out
        word = rng.choice(words.COMMON)
        key = "reverse, real word"
    else:
        word = random_word(rng)
        key = f"reverse {word}"
    return ask("reverse", key, form.format(word), word[::-1], word[::-1])


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
    made = rng.choice((talk.story, talk.capital, talk.hello, talk.chat, _words, _words))(rng)
    if isinstance(made, str):
        return made
    return str(rng.choice(made.answer["content"].split(". ")))


def repeat(rng: random.Random) -> Exchange:
    """Ask for a text to be repeated."""
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
    return ask("repeat", f"repeat {text}", form.format(text), content, content)


def upper(rng: random.Random) -> Exchange:
    """Ask for a text in capitals."""
    text = _sentence(rng)
    form = rng.choice(("Uppercase: {}", "In capitals: {}", "Make uppercase: {}"))
    key = f"upper {text}" if text.replace(" ", "").isalpha() and text.islower() else "upper, sentence"
    return ask("upper", key, form.format(text), text.upper(), text.upper())


def json_(rng: random.Random) -> Exchange:
    """Ask for JSON."""
    if rng.random() < 0.35:
        name = rng.choice(KEYS)
        numbers = [rng.randint(0, 99) for _ in range(rng.randint(2, 6))]
        fact: int | str | list[int] = rng.choice((rng.randint(0, 999), random_word(rng), numbers))
        said = join(fact) if isinstance(fact, list) else str(fact)
        form = rng.choice(("As JSON: {} is {}", "As JSON: {} = {}", "Make JSON: {} is {}"))
        key = f"json {name} {said}"
        return ask("json", key, form.format(name, said), json.dumps({name: fact}), {name: fact})
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
    return ask("json", f"json {name} {age} {city}", form.format(n=name, a=age, c=city), json.dumps(value), value)


def count(rng: random.Random) -> Exchange:
    """Ask for counting."""
    start = rng.randint(0, 70)
    stop = start + rng.randint(3, 37)
    form = rng.choice(("Count from {} to {}.", "Count from {} to {}", "Count up from {} to {}."))
    numbers = list(range(start, stop + 1))
    return ask("count", f"count {start} {stop}", form.format(start, stop), join(numbers), numbers)
