"""Reading calls that are JSON objects: {"name": ..., "arguments": {...}}, one of them, several, or a list."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_tandem.generation.scanner import Malformed, Routine
from mlx_tandem.generation.tools.calls import LONGEST_KEPT, CallParser
from mlx_tandem.generation.tools.json_writer import JsonWriter
from mlx_tandem.generation.tools.values import QUOTES, Kept, ValueReader, as_json, quoted, text_of

NAMES = ("name", "function", "tool_name")
ARGUMENTS = ("arguments", "parameters", "args")
"""The keys under which models write the name and the arguments."""
IDS = ("id", "tool_call_id", "call_id")
_OTHERS = ("type", "index")
"""Keys beside them that say nothing."""

_LONGEST_NAME_TEXT = 1024
"""Most characters of a name in JSON, where a character may be an escape."""

_MOST_OPEN = 2
"""Most brackets that are open where the object with the name and the arguments begins: a list's and one object's."""

FENCES = ("```json", "```python", "```tool_call", "```")


@dataclass
class _Parts:
    """The parts of a call that are known before its object has ended."""

    name: str = ""
    id: str = ""
    arguments: str | None = None
    """The arguments, as long as they wait for the name."""
    surplus: list[str] = field(default_factory=list)
    """The other pairs of the object, each a key with its value. They become text after the call."""
    begun: bool = False
    in_pair: bool = False
    """Whether a key or a value was not read to its end."""


def read_calls(parser: CallParser, *, offered_only: bool = False) -> Routine[None]:
    """Read the calls that come next: objects behind each other, or lists of them, perhaps in a block of code.

    With `offered_only`, a name that the request does not offer makes no call, nor does an object with other keys than
    those of a call. Raises Malformed where no call is.
    """
    fence = yield from parser.accept(*FENCES)
    in_list = bool((yield from parser.accept("[")))
    while True:
        reader = parser.values()
        if in_list:
            reader.open.append(("]", "values"))
        if (yield from parser.gap()) != "{":
            raise Malformed
        yield from _read_object(parser, reader, _Parts(), offered_only=offered_only)
        parser.checkpoint()
        yield from _skip_surplus(parser, "}")
        if in_list and (yield from parser.accept("]")):
            in_list = False
            parser.checkpoint()
            yield from _skip_surplus(parser, "]")
        if in_list and (yield from _ends_with_comma(parser)):
            in_list = False
        if not (yield from _another(parser)):
            break
    if fence and (yield from parser.accept("```")):
        parser.checkpoint()


def _another(parser: CallParser) -> Routine[bool]:
    """Read what divides two objects; return whether another one comes."""
    divider, at = yield from parser.ahead((",", ";", "{"))
    if divider == "{":
        return True
    if not divider or (yield from parser.ahead(("{",), at + 1))[0] != "{":
        return False
    yield from parser.accept(divider)
    return True


def _ends_with_comma(parser: CallParser) -> Routine[bool]:
    """Read a comma and the end of the list behind it, if both come next; return whether they did."""
    comma, at = yield from parser.ahead((",",))
    if not comma or (yield from parser.ahead(("]",), at + 1))[0] != "]":
        return False
    yield from parser.accept(",")
    yield from parser.accept("]")
    parser.checkpoint()
    return True


def _skip_surplus(parser: CallParser, closer: str) -> Routine[None]:
    """Read closing brackets that are too many, where nothing but a closer, an opener, or the end comes behind them."""
    ends = (*parser.openers.texts, *parser.closers, "```", ";", ",", "]", closer)
    while True:
        found, at = yield from parser.ahead((closer,))
        if not found or (yield from parser.ahead(ends, at + 1))[0] is None:
            return
        yield from parser.accept(closer)
        parser.checkpoint()


def _read_object(parser: CallParser, reader: ValueReader, parts: _Parts, *, offered_only: bool) -> Routine[None]:
    """Read the object of a call, whose keys have any order, and say the call."""
    try:
        yield from _read_pairs(parser, reader, parts, offered_only=offered_only)
    except Malformed:
        known = parts.arguments is not None or parts.name in parser.tools.functions
        if parts.begun:
            yield from parser.text(", ".join(parts.surplus))
        if parts.begun or parts.in_pair or not known or not parser.is_at_end:
            raise
    if parts.begun:
        yield from parser.text(", ".join(parts.surplus))
        return
    if not parts.name or (parts.arguments is None and (parts.surplus or offered_only)):
        raise Malformed
    yield from parser.begin(parts.name, parts.id)
    yield from parser.arguments(parts.arguments or ("" if parser.is_cut else "{}"))
    parser.checkpoint()
    yield from parser.text(", ".join(parts.surplus))


def _read_pairs(parser: CallParser, reader: ValueReader, parts: _Parts, *, offered_only: bool) -> Routine[None]:
    """Read the pairs of the object that comes next up to its end, as far as they come."""
    yield from parser.expect("{")
    reader.open.append(("}", "pairs"))
    while True:
        following = yield from parser.gap()
        if following in ("}", ","):
            parser.scan.skip()
            if following == "}":
                reader.open.pop()
                return
            continue
        if parts.begun and following not in QUOTES:
            return
        parts.in_pair = True
        key = yield from reader.key()
        first = yield from parser.gap()
        if key in NAMES and first == "{" and len(reader.open) <= _MOST_OPEN:
            yield from _read_pairs(parser, reader, parts, offered_only=offered_only)
        elif key in NAMES and not parts.name:
            parts.name = text_of((yield from _kept(reader, most=_LONGEST_NAME_TEXT)))
            if offered_only and parts.name not in parser.tools.functions:
                raise Malformed
        elif key in IDS and first in QUOTES:
            id = text_of((yield from _kept(reader)))
            parts.id = id if parser.keeps_ids else ""
        elif key in ARGUMENTS and not parts.begun and parts.arguments is None:
            yield from _read_arguments(parser, reader, parts, first, offered_only=offered_only)
        elif offered_only and key not in _OTHERS and key not in IDS:
            raise Malformed
        else:
            value = yield from _kept(reader)
            if key not in _OTHERS and key not in IDS:
                parts.surplus.append(f"{quoted(key)}: {value}")
        parts.in_pair = False


def _read_arguments(
    parser: CallParser, reader: ValueReader, parts: _Parts, first: str, *, offered_only: bool
) -> Routine[None]:
    """Read the arguments: an object, the text of one, or null. They are said at once if the name is known."""
    if first == "{" and parts.name:
        yield from _begin(parser, reader, parts)
        return
    if offered_only and first != "{":
        raise Malformed
    made: str | None = yield from _kept(reader)
    if made and made[0] == '"':
        text = text_of(made).strip()
        made = as_json(text) if text else "{}"
    if made == "null":
        made = "{}"
    if made is None or made[:1] != "{":
        raise Malformed
    parts.arguments = made


def _begin(parser: CallParser, reader: ValueReader, parts: _Parts) -> Routine[None]:
    """Read the arguments of a call whose name is known, and say them while they come."""
    before = parser.call_count
    try:
        yield from parser.object(parts.name, parts.id, reader)
    finally:
        parts.begun = parser.call_count != before


def _kept(reader: ValueReader, *, most: int = LONGEST_KEPT) -> Routine[str]:
    """Read one value; return it as JSON. Raises Malformed for one of more than `most` characters."""
    kept = Kept(most)
    yield from reader.value(JsonWriter(kept.push))
    return kept.text.strip()
