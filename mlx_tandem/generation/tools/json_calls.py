"""Reading calls that are JSON objects: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_tandem.generation.events import Said
from mlx_tandem.generation.scanner import Malformed, Routine, nothing
from mlx_tandem.generation.tools.calls import CallParser

ARGUMENTS = ("arguments", "parameters")
"""The keys under which models write the arguments."""


def read_call(parser: CallParser, *, id_key: str = "", offered_only: bool = False) -> Routine[None]:
    """Read the object of one call, whose keys have any order. Keys that mean nothing here are skipped.

    Arguments before the name are kept until the name is known. `id_key` is the key of the call's own id, if it has one.
    With `offered_only`, a name that the request does not offer makes no call. Raises Malformed.
    """
    name, id, begun = "", "", False
    kept: list[str] = []

    def keep(text: str) -> Sequence[Said]:
        kept.append(text)
        return ()

    yield from parser.expect("{")
    following = yield from parser.gap()
    while following != "}":
        key = yield from parser.quoted()
        yield from parser.gap()
        yield from parser.expect(":")
        first = yield from parser.gap()
        if key == "name" and not name and first == '"':
            name = yield from parser.quoted()
            if offered_only and name not in parser.tools.functions:
                raise Malformed
        elif key == id_key and first == '"':
            id = yield from parser.quoted()
        elif key in ARGUMENTS and not (begun or kept):
            if first != "{":
                raise Malformed
            if name:
                begun = True
                yield from parser.begin(name, id)
            yield from parser.json(parser.arguments if name else keep)
            if name:
                parser.end()
        else:
            yield from parser.json(nothing)
        following = yield from parser.gap()
        if following != "}":
            yield from parser.expect(",")
            following = yield from parser.gap()
    yield from parser.expect("}")
    if not begun:
        yield from parser.begin(name, id)
        yield from parser.arguments("".join(kept) or "{}")
        parser.end()


def read_calls(parser: CallParser, *, id_key: str = "", offered_only: bool = False) -> Routine[None]:
    """Read a list of calls, each of which is an object. Raises Malformed."""
    yield from parser.expect("[")
    following = ","
    while following == ",":
        yield from parser.gap()
        yield from read_call(parser, id_key=id_key, offered_only=offered_only)
        yield from parser.gap()
        following = yield from parser.choose(",", "]")
        parser.end()
