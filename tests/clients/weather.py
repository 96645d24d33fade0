"""A question that needs a tool, its tool's result, and what the right answer to it is."""

from __future__ import annotations

RESULT = "sunny, 21 degrees"
CITIES = ("Oslo", "Paris", "Rome", "Tokyo")
MODELS = ("base", "shout", "down", "base")
MANY = [(city, model) for city in CITIES for model in MODELS]
"""Sixteen conversations: some with the base and some with adapters."""


def question(city: str) -> str:
    return f"What is the weather in {city}?"


def is_answer(text: str, city: str) -> bool:
    return text.lower().rstrip(".!") == f"the weather for {city.lower()} is {RESULT}"
