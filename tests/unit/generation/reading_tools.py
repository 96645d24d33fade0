"""What parsers say of a text, as plain data, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from mlx_tandem.generation.events import ReasoningDelta, Said, TextDelta, ToolCallArguments, ToolCallStart
from mlx_tandem.generation.parsers import Parser

Heard = list[tuple[str, ...]]
"""The events in order, without ids; adjacent pieces of the same text are one."""


def heard(parser: Parser, pieces: Iterable[str]) -> Heard:
    """What the parser says of these pieces of a text."""
    return joined(event for batch in batches(parser, pieces) for event in batch)


def batches(parser: Parser, pieces: Iterable[str]) -> Iterator[list[Said]]:
    for piece in pieces:
        yield list(parser.push(piece))
    yield list(parser.flush())


def joined(events: Iterable[Said]) -> Heard:
    made: Heard = []
    calls = -1
    for event in events:
        match event:
            case TextDelta():
                kind, piece = ("text",), event.text
            case ReasoningDelta():
                kind, piece = ("thought",), event.text
            case ToolCallStart():
                calls += 1
                assert event.call == calls and event.id
                made.append(("call", event.name, ""))
                continue
            case ToolCallArguments():
                assert event.call == calls, "arguments follow the start of their call"
                name = next(name for kind, name, *_ in reversed(made) if kind == "call")
                assert made[-1][0] == "call", "nothing comes between a call and its arguments"
                kind, piece = ("call", name), event.arguments
        assert piece, "no event is empty"
        if made and made[-1][:-1] == kind:
            made[-1] = (*kind, made[-1][-1] + piece)
        else:
            made.append((*kind, piece))
    return made


def calls_of(found: Heard) -> list[tuple[str, Any]]:
    """The calls with their arguments as values."""
    return [(event[1], json.loads(event[2])) for event in found if event[0] == "call"]


def text_of(found: Heard) -> str:
    return "".join(event[1] for event in found if event[0] == "text")


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    """The text in pieces."""
    places = draw(st.lists(st.integers(0, len(text)), max_size=12))
    return [text[a:b] for a, b in pairwise([0, *sorted(places), len(text)])]
