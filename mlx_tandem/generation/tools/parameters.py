"""Arguments that are parameters with raw values, converted to JSON by the schema of their function."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from mlx_tandem.generation.events import Said
from mlx_tandem.generation.scanner import Malformed, Markers, Routine
from mlx_tandem.generation.tools.calls import CallParser
from mlx_tandem.generation.tools.json_writer import JsonWriter
from mlx_tandem.generation.tools.schema_types import properties_of, types_of
from mlx_tandem.generation.tools.values import as_json, beginning_of, quoted, text_of

WRAPPERS = ("arguments", "input", "parameters")
"""Parameters in which models of DeepSeek write all arguments as one object."""
_NULLS = ("null", "none")
_BOOLEANS = {"true": "true", "false": "false"}
_CODE = re.compile(r"[-+]?0[0-9]")
"""Pattern of a leading zero, which makes digits a code such as 007 rather than a number."""
_WHOLE = re.compile(r"-?[0-9]+\.0+")
_FIRST_OF_JSON = frozenset("{[(\"'-+.0123456789tTfFnNI")
"""The first characters of values that are not strings."""


class Parameters:
    """The arguments of one call as an object that is written parameter by parameter.

    A string is written while it arrives. A value of another type is kept until it is complete. A value whose type the
    request does not describe is JSON if it can be read as JSON; otherwise it is a string.
    """

    def __init__(self, parser: CallParser, name: str):
        """Write the parameters of the function `name`, whose call has begun."""
        self._parser = parser
        self._schema = parser.tools.schema(name)
        self._properties = properties_of(self._schema)
        self._out = JsonWriter(parser.arguments, spaced=True)
        self._has_begun = False
        self._seen: set[str] = set()
        self._wrapped: _Wrapped | None = None
        parser.checkpoint()

    def may_follow(self, key: str) -> bool:
        """Return whether a parameter `key` may follow one whose own end is missing."""
        return key not in self._seen and (key in self._properties or not self._properties)

    def close(self) -> Sequence[Said]:
        """Return the event for the end of the object; none where something else than the model has ended the text."""
        wrapped = self._unwrap(True)
        if wrapped and not self._has_begun:
            return wrapped
        said = () if self._has_begun or self._parser.is_cut else self._begin()
        return (*wrapped, *said, *self._parser.complete(self._out))

    def value(
        self,
        key: str,
        closers: Markers,
        ends: Callable[[str], Routine[bool]],
        *,
        is_text: bool = False,
        is_framed: bool = False,
    ) -> Routine[str]:
        """Read the value of `key` and the closer behind it; return the closer, an empty string at the text's end.

        `ends` tells whether a closer that was read ends the value. With `is_text` the value is a string, unless the
        schema forbids strings. If the value `is_framed`, a line break at its end is not its own.
        """
        parser, out = self._parser, self._out
        types = types_of(self._schema_of(key), self._schema)
        if is_text and ("string" in types or not types):
            types = {"string"}
        parser.scan.release()
        is_first = not self._seen
        self._seen.add(key)
        yield from self._unwrap(False)
        if is_first and key in WRAPPERS and self._properties and key not in self._properties:
            value: _Value | _Wrapped
            value = self._wrapped = _Wrapped(key)
        else:
            if not self._has_begun:
                yield from self._begin()
            out.key(quoted(key))
            value = _Value(out, types)
        while True:
            closer = yield from parser.upto(closers, value.push)
            if closer is None:
                break
            if (yield from ends(closer)):
                if closer[0] == "\n" and not is_framed:
                    yield from value.push("\n")
                break
            yield from value.push(closer)
        yield from value.close(is_cut=parser.is_cut and closer is None)
        parser.checkpoint()
        if closer is None:
            raise Malformed
        return closer.lstrip("\n")

    def _unwrap(self, is_all: bool) -> Sequence[Said]:
        """Return the events of the parameter that may hold all arguments, if one waits.

        If it `is_all` of the call and holds an object, the object becomes the arguments. Otherwise it is written like
        any other parameter.
        """
        wrapped, self._wrapped = self._wrapped, None
        if wrapped is None:
            return ()
        made = as_json(wrapped.text)
        if is_all and made is not None and made[0] == "{":
            return self._parser.arguments(made)
        begun = self._begin()
        self._out.key(quoted(wrapped.key))
        return (*begun, *self._out.atom(json_of(wrapped.text, set())))

    def _begin(self) -> Sequence[Said]:
        """Return the event for the beginning of the object."""
        self._has_begun = True
        return self._out.begin("{")

    def _schema_of(self, key: str) -> Any:
        """Return a parameter's schema, or `additionalProperties` if the parameter has none."""
        return self._properties.get(key, self._schema.get("additionalProperties"))


class _Wrapped:
    """The value of a parameter that the function does not have, and that may hold all of the arguments."""

    def __init__(self, key: str):
        self.key = key
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The value so far."""
        return "".join(self._pieces)

    def push(self, piece: str) -> Sequence[Said]:
        """Keep the next piece of the value."""
        self._pieces.append(piece)
        return ()

    def close(self, *, is_cut: bool) -> Sequence[Said]:
        """Return no event, because it is not known yet how the value is written."""
        return ()


class _Value:
    """A raw value that is written as JSON: a text while it arrives, anything else when it is complete."""

    def __init__(self, out: JsonWriter, types: set[str]):
        self._out = out
        self._types = types
        self._is_text = bool(types) and types <= {"string", "null"}
        self._kept: list[str] = []
        self._first = ""
        self._is_open = False

    def push(self, piece: str) -> Sequence[Said]:
        """Return the event for the next piece of the value."""
        if self._is_open:
            return self._out.text(quoted(piece)[1:-1])
        self._kept.append(piece)
        if not self._decides_for_text(piece):
            return ()
        self._is_open = True
        text = "".join(self._kept)
        self._kept.clear()
        return (*self._out.text_begin(), *self._out.text(quoted(text)[1:-1]))

    def close(self, *, is_cut: bool) -> Sequence[Said]:
        """Return the event for the end of the value. A text that something else has cut stays open."""
        if self._is_open:
            return () if is_cut else self._out.text_end()
        text = "".join(self._kept)
        if is_cut and text.lstrip()[:1] in ("", "{", "["):
            return self._out.atom(beginning) if (beginning := beginning_of(text.strip())) else ()
        if self._is_text:
            return self._out.atom("null" if text == "null" and "null" in self._types else quoted(text))
        return self._out.atom(json_of(text, self._types))

    def _decides_for_text(self, piece: str) -> bool:
        """Return whether it is known that the value is a text, when `piece` was added to what is kept."""
        if self._is_text:
            return "null" not in self._types or not "null".startswith("".join(self._kept))
        if self._types:
            return False
        self._first = self._first or piece.lstrip()[:1]
        return bool(self._first) and self._first not in _FIRST_OF_JSON


def json_of(text: str, types: set[str]) -> str:
    """Return a raw value as JSON of one of these types, or of any type if there are none.

    A value that fits none of the types becomes a string.
    """
    value = text.strip()
    lowered = value.lower()
    if lowered in _NULLS and (not types or "null" in types or "string" not in types):
        return "null"
    if lowered in _BOOLEANS and (not types or "boolean" in types):
        return _BOOLEANS[lowered]
    may_be_text = not types or "string" in types
    if may_be_text and _CODE.match(value):
        return quoted(text)
    made = as_json(value, strict=may_be_text)
    if made is not None and made[0] == '"':
        if value[0] not in "\"'":
            made = None
        elif not may_be_text:
            return json_of(text_of(made), types)
    if made is not None and (not types or _fits(made, types)):
        return made.partition(".")[0] if types and _WHOLE.fullmatch(made) else made
    return quoted(text)


def _fits(value: str, types: set[str]) -> bool:
    """Return whether JSON text has one of these types, judged by its first character."""
    kind = {"{": "object", "[": "array", '"': "string"}.get(value[0])
    return kind in types if kind else bool(types & {"integer", "number"}) and value[0] in "-0123456789"
