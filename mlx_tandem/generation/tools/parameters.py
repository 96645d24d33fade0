"""Arguments that are parameters with raw values, converted to JSON by the schema of their function."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from mlx_tandem.generation.events import Said
from mlx_tandem.generation.json_text import JsonText
from mlx_tandem.generation.scanner import Malformed, Markers, Routine
from mlx_tandem.generation.tools.calls import CallParser

_MOST_DEPTH = 8
"""Levels of anyOf, oneOf and allOf in which types are looked for."""

_NULLS = ("null", "none")
_BOOLEANS = {"true": "true", "false": "false"}


class Parameters:
    """The arguments of one call as an object that is written parameter by parameter.

    A text is written while it arrives. A value of another type is kept until it is complete. With `guesses`, a value
    whose type the request does not describe is JSON if it can be; otherwise it is a text.
    """

    def __init__(self, parser: CallParser, name: str, *, guesses: bool = False):
        """Write the parameters of the function `name`, whose call has begun."""
        self._parser = parser
        self._schemas = parser.tools.parameters(name)
        self._guesses = guesses
        self._opener = "{"
        self._is_cut = False  # whether the text has ended inside of a value
        parser.end()

    def close(self) -> Sequence[Said]:
        """Return the event for the end of the object. An object whose last value is not complete gets no end."""
        return () if self._is_cut else self._parser.arguments("{}" if self._opener == "{" else "}")

    def value(self, key: str, closers: Markers, is_text: bool | None = None) -> Routine[str]:
        """Read the value of `key` and the closer behind it; return the closer.

        `is_text` is given where the form of the call says so. Raises Malformed when the text ends before.
        """
        parser = self._parser
        types = types_of(self._schemas.get(key)) if is_text is None else {"string"} if is_text else set()
        parser.scan.release()
        yield from parser.arguments(f"{self._opener}{_quoted(key)}: ")
        self._opener = ", "
        self._is_cut = True
        is_guess = is_text is False or (not types and self._guesses)
        if types <= {"string", "null"} and not is_guess:
            text = _Text(parser.arguments, "null" in types)
            closer = yield from parser.upto(closers, text.push)
            if closer is None:
                raise Malformed
            yield from text.close()
        else:
            pieces: list[str] = []

            def keep(piece: str) -> Sequence[Said]:
                pieces.append(piece)
                return ()

            closer = yield from parser.upto(closers, keep)
            if closer is None:
                raise Malformed
            yield from parser.arguments(json_of("".join(pieces), types))
        self._is_cut = False
        parser.end()
        return closer


class _Text:
    """A text that is written as a JSON string while it arrives. If it `may_be_null`, the word null is no text."""

    def __init__(self, arguments: Callable[[str], Sequence[Said]], may_be_null: bool):
        self._arguments = arguments
        self._kept: str | None = "" if may_be_null else None  # as long as it may be the word null
        self._is_open = False

    def push(self, text: str) -> Sequence[Said]:
        """Return the event for the next piece of the text."""
        if self._kept is not None:
            text = self._kept + text
            if "null".startswith(text):
                self._kept = text
                return ()
            self._kept = None
        opening = "" if self._is_open else '"'
        self._is_open = True
        return self._arguments(opening + _quoted(text)[1:-1])

    def close(self) -> Sequence[Said]:
        """Return the event for the end of the text."""
        if self._kept is not None:
            return self._arguments("null" if self._kept == "null" else _quoted(self._kept))
        return self._arguments('"' if self._is_open else '""')


def types_of(schema: Any, depth: int = _MOST_DEPTH) -> set[str]:
    """Return the types that a schema allows, as far as it says so in words that are common."""
    if not isinstance(schema, dict) or not depth:
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else {t for t in given if isinstance(t, str)} if given else set()
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not types and isinstance(values, list):
        types = {_type_of(value) for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        for inner in schema.get(key) or ():
            types |= types_of(inner, depth - 1)
    return types


def json_of(text: str, types: set[str]) -> str:
    """Return a raw value as JSON of one of these types; of any type for none. What is of none of them is a string."""
    value = text.strip()
    lowered = value.lower()
    if lowered in _NULLS and (not types or "null" in types or "string" not in types):
        return "null"
    if lowered in _BOOLEANS and (not types or "boolean" in types):
        return _BOOLEANS[lowered]
    made = _as_json(value)
    if made is not None and (not types or _fits(made, types)):
        return made
    return _quoted(text)


def _fits(value: str, types: set[str]) -> bool:
    """Return whether JSON text has one of these types, judged by its first character."""
    kind = {"{": "object", "[": "array", '"': "string"}.get(value[0])
    return kind in types if kind else bool(types & {"integer", "number"}) and value[0] in "-0123456789"


def _as_json(text: str) -> str | None:
    """Return the text if it is JSON, else None."""
    reader = JsonText()
    end, made = reader.read(text + " ", 0)
    return made if reader.state == "done" and end == len(text) else None


def _type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
