"""Tool calls of earlier answers and their results, as clients send them back, made right for chat templates."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.strict_json import check_nested

Message = Mapping[str, Any]
"""One message of a conversation."""

NO_RESULT = "No result."
"""The text in place of a result that is missing before the result of a later call of the same message."""

UNKNOWN = "unknown"
"""The name of the function whose result has neither a name nor a call."""

_SHORT = 9
"""Characters of an id in the form of Mistral's templates."""

_MARK = re.compile(
    r"""[{}\[\],] | "(?:
        [^"\\] | \\[^u] | \\u(?![dD][89abAB])[0-9a-fA-F]{4} | \\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}
    )*+("?)""",
    re.DOTALL | re.VERBOSE,
)
"""A character by which JSON is nested, or a string. A string may have no end, and then has whole escapes only."""

_LONGEST_HALF_ESCAPE = 11
"""Most characters of an escaped character that is not whole, which may take two escapes."""

_HALF_MEMBER = re.compile(r',?\s*(?:"(?:[^"\\]|\\.)*+(?:\\|"\s*(?::\s*)?)?)?[-+.\w]*\s*', re.DOTALL)
"""A key, with or without the beginning of a number or a word behind it, or such a beginning alone."""


def arguments_object(given: Any) -> dict[str, Any]:
    """Return the arguments of an earlier call as an object, which is the form that every chat template can take.

    Empty text and null become an empty object. JSON text of an object becomes that object. Truncated JSON of an object
    becomes the part that arrived. Any other value is stored under `arguments`.
    """
    value = _read(given) if isinstance(given, str) else given
    if isinstance(value, str):  # Some clients make JSON of JSON.
        inner = _read(value)
        value = inner if inner is None or isinstance(inner, dict) else value
    if isinstance(value, dict):
        return value
    return {} if value is None else {"arguments": value}


def _read(text: str) -> Any:
    """Return the value of JSON text.

    Empty text becomes None. Truncated JSON of an object becomes the part that arrived. Any other text stays text.
    """
    if not text.strip():
        return None
    for attempt in _attempts(text):
        try:
            value = _DECODER.decode(attempt)
            check_nested(value, "", depth=limits.MAX_MESSAGE_DEPTH, values=limits.MAX_MESSAGE_VALUES)
        except (ValueError, RecursionError, InvalidRequest):
            continue
        return value
    return text


def _attempts(text: str) -> Iterator[str]:
    """Yield the text, and then ways to complete it if it is truncated JSON of an object.

    The first way adds the ends that are missing. The second one also removes the last member.
    """
    yield text
    if not text.lstrip().startswith("{"):
        return
    open_ends: list[str] = []
    whole = 0  # the end of what is whole without the last member
    last: re.Match[str] | None = None
    for last in _MARK.finditer(text):
        character = last.group()[0]
        if character in "{[":
            open_ends.append("}" if character == "{" else "]")
            whole = last.end()
        elif character == ",":
            whole = last.start()
        elif character in "}]" and open_ends:
            open_ends.pop()
    if last is None or not open_ends:
        return
    ends = "".join(reversed(open_ends))
    if last.group()[0] != '"' or last[1]:
        yield text + ends
    elif len(text) - last.end() <= _LONGEST_HALF_ESCAPE:
        yield text[: last.end()] + '"' + ends
    if _HALF_MEMBER.fullmatch(text, whole):
        yield text[:whole] + ends


def _whole(digits: str) -> int | str:
    """Return an integer, or its digits if it has more than 64 bits."""
    number = int(digits) if len(digits) <= 20 else 2**63
    return number if -(2**63) <= number < 2**63 else digits


def _finite(digits: str) -> float | str:
    """Return a number, or its digits if it is too large."""
    return number if math.isfinite(number := float(digits)) else digits


_DECODER = json.JSONDecoder(strict=False, parse_int=_whole, parse_float=_finite, parse_constant=str)


def pairs(calls: Sequence[Any], results: Sequence[Any]) -> list[int | None]:
    """Return for each result the number of its call among the calls of one message; None for a surplus result.

    A result belongs to the first call with its id that has no result yet; a result without an id, to the first such
    call of the same function. Results that match no call belong to the remaining calls, in their order. A result whose
    id is that of a call that has its result already is surplus.
    """
    by_id, by_name = (_places(calls, key) for key in (_id, _name))
    taken: set[int] = set()

    def first(places: deque[int] | None) -> int | None:
        while places:
            if (place := places.popleft()) not in taken:
                taken.add(place)
                return place
        return None

    found = [first(by_id.get(_text(result, "tool_call_id"))) for result in results]
    for i, result in enumerate(results):
        if found[i] is None and _text(result, "tool_call_id") is None:
            found[i] = first(by_name.get(_text(result, "name")))
    left = deque(range(len(calls)))
    for i, result in enumerate(results):
        if found[i] is None and _text(result, "tool_call_id") not in by_id:
            found[i] = first(left)
    return found


def _places(calls: Sequence[Any], key: Callable[[Any], str | None]) -> dict[str | None, deque[int]]:
    """Return the numbers of the calls with each id or name. Calls without one are not among them."""
    places: dict[str | None, deque[int]] = {}
    for i, call in enumerate(calls):
        if (found := key(call)) is not None:
            places.setdefault(found, deque()).append(i)
    return places


def in_call_order(messages: Sequence[Any]) -> list[int]:
    """Return the indices of the messages so that the results of a message's calls follow it, in the order of the calls.

    Many templates print no ids, and their models take the first result for that of the first call. A result that stands
    behind other messages is moved if it has the id of a call since the assistant's last message.
    """
    order: list[int] = []
    at = 0
    while at < len(messages):
        end = at + 1
        order.append(at)
        if calls := calls_of(messages[at]):
            while end < len(messages) and messages[end].get("role") != "assistant":
                end += 1
            results = _results_between(messages, at + 1, end, {_id(call) for call in calls} - {None})
            places = pairs(calls, [messages[i] for i in results])
            ranks = {i: len(calls) if place is None else place for i, place in zip(results, places, strict=True)}
            order += sorted(results, key=ranks.__getitem__)
            order += [i for i in range(at + 1, end) if i not in ranks]
        at = end
    return order


def _results_between(messages: Sequence[Any], start: int, end: int, ids: Collection[str | None]) -> list[int]:
    """Return the indices of results in a range: those at its beginning, and others that have one of the ids."""
    found: list[int] = []
    for i in range(start, end):
        is_result = messages[i].get("role") in ("tool", "function")
        if is_result and (i == start + len(found) or _text(messages[i], "tool_call_id") in ids):
            found.append(i)
    return found


def name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Give each result the name of the function that was called, which some templates need.

    The messages are in call order. A result that is not behind its call is recognised by its id, and one without a call
    has the name UNKNOWN.
    """
    names: dict[str, str] = {}
    for at, message in enumerate(messages):
        for call, result in zip(calls_of(message), _results_of(messages, at)[0], strict=True):
            if (name := _name(call)) is not None:
                if isinstance(result, dict):
                    result.setdefault("name", name)
                if (id := _id(call)) is not None:
                    names[id] = name
        if message["role"] == "tool":
            message.setdefault("name", names.get(message.get("tool_call_id", ""), UNKNOWN))


def with_missing_results(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation in call order with a result for each call that has none although a later one has.

    Without it the result of the later call would be read as that of the earlier one.
    """
    made: list[Message] = []
    for message, own, surplus in with_results(messages):
        calls = calls_of(message)
        last = max((k for k, result in enumerate(own) if result is not None), default=-1)
        made += [message, *(own[k] or _missing(calls[k]) for k in range(last + 1)), *surplus]
    return made


def with_ids(messages: Sequence[Message], *, short: bool) -> list[Message]:
    """Return a conversation in call order in which every call and its result have an id.

    With `short` every id has nine letters and digits; others are replaced. A call keeps its id from turn to turn.
    """
    made: list[Message] = []
    count = 0  # calls and lost results so far

    def id_of(given: str | None) -> str:
        nonlocal count
        count += 1
        if given is None:
            return f"call{count:05}"
        if not short or (len(given) == _SHORT and given.isascii() and given.isalnum()):
            return given
        return hashlib.blake2b(given.encode(), digest_size=_SHORT).hexdigest()[:_SHORT]

    for message, own, surplus in with_results(messages):
        calls = calls_of(message)
        ids = [id_of(_id(call)) for call in calls]
        if message["role"] == "tool":
            message = {**message, "tool_call_id": id_of(_text(message, "tool_call_id"))}
        elif calls:
            message = {**message, "tool_calls": [{**call, "id": id} for call, id in zip(calls, ids, strict=True)]}
        made.append(message)
        made += [{**result, "tool_call_id": id} for result, id in zip(own, ids, strict=True) if result is not None]
        made += [{**result, "tool_call_id": id_of(_text(result, "tool_call_id"))} for result in surplus]
    return made


def with_results(messages: Sequence[Message]) -> Iterator[tuple[Message, list[Message | None], list[Message]]]:
    """Yield each message of a conversation in call order, with the results of its calls and the surplus ones.

    These results are not yielded as messages.
    """
    at = 0
    while at < len(messages):
        own, surplus = _results_of(messages, at)
        yield messages[at], own, surplus
        at += 1 + len(own) - own.count(None) + len(surplus)


def _results_of(messages: Sequence[Message], at: int) -> tuple[list[Message | None], list[Message]]:
    """Return the results that follow the message with the index `at`: that of each call, and the surplus ones."""
    calls = calls_of(messages[at])
    own: list[Message | None] = [None] * len(calls)
    end = at + 1
    while calls and end < len(messages) and messages[end]["role"] == "tool":
        end += 1
    results = messages[at + 1 : end]
    places = pairs(calls, results)
    for place, result in zip(places, results, strict=True):
        if place is not None:
            own[place] = result
    return own, [result for place, result in zip(places, results, strict=True) if place is None]


def calls_of(message: Any) -> Sequence[Any]:
    """Return the tool calls of a message."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else ()


def _missing(call: Any) -> dict[str, Any]:
    """Return the message in place of the result of a call."""
    made = {"role": "tool", "tool_call_id": _id(call), "name": _name(call), "content": NO_RESULT}
    return {key: value for key, value in made.items() if value is not None}


def _id(call: Any) -> str | None:
    """Return the id of a call."""
    return _text(call, "id")


def _name(call: Any) -> str | None:
    """Return the name of the function that is called."""
    return _text(call.get("function"), "name") if isinstance(call, Mapping) else None


def _text(value: Any, key: str) -> str | None:
    """Return the text under a key of an object, if there is one."""
    found = value.get(key) if isinstance(value, Mapping) else None
    return found if isinstance(found, str) else None
