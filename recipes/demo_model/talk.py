"""Skills in prose, whose answers are sentences: capitals, greetings, small talk and stories."""

from __future__ import annotations

import random
import re

from . import words
from .exchanges import Exchange, ask, random_word

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


def capital(rng: random.Random) -> Exchange:
    """Ask for the capital of a country."""
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
    return ask("capital", question, question, content, city)


def hello(rng: random.Random) -> Exchange:
    """Greet."""
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
    key = question if kind == "name" else "hello, fixed phrase"  # there are few phrases, and all are taught
    return ask("hello", key, question, content, content, accept=accept)


def small_talk(rng: random.Random) -> str:
    """Return a sentence that the model has no skill for."""
    form = rng.choice(words.SMALL_TALK)
    return form.format(
        a=rng.choice(words.COMMON),
        b=rng.choice(words.COMMON),
        c=rng.choice(words.TRAITS),
        r=random_word(rng, 2, 9),
    )


def chat(rng: random.Random) -> Exchange:
    """Ask something that the model does not know."""
    question = small_talk(rng)
    content = rng.choice(UNKNOWN)
    return ask("chat", question, question, content, content, accept=UNKNOWN)


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


def story(rng: random.Random) -> Exchange:
    """Ask for a story."""
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
    return ask("story", question, question, content, content)


def story_is_right(question: str, text: str, loose: bool = False) -> bool:
    """Return whether ``text`` is a whole story by the grammar about the animal asked for, with one name for its
    hero.

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
