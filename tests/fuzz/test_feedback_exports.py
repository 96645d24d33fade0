"""Whatever an export holds is read, or refused by its entry: nothing else comes out of the readers."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.feedback.exports import MOST_SIBLINGS, Told, Unusable, entries, told

KEYS = (
    "id object data meta snapshot chat history messages parentId childrenIds role content originalContent rating "
    "message_id model_id params system files choices message metadata score thumb q a "
    "<details </details> 1 chat.completion"
).split()
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(allow_nan=False), st.sampled_from(KEYS))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)),
    max_leaves=30,
)


def whole() -> list[dict[str, Any]]:
    """An entry of each program, which is read."""
    messages = {
        "q": {"id": "q", "parentId": None, "childrenIds": ["a", "b"], "role": "user", "content": "hi"},
        "a": {"id": "a", "parentId": "q", "role": "assistant", "content": "<details>x</details>yes", "model": "m"},
        "b": {"id": "b", "parentId": "q", "role": "assistant", "content": "no"},
    }
    chat = {"chat": {"chat": {"history": {"messages": messages}}}}
    choice = {"message": {"role": "assistant", "content": "yes"}}
    return [
        {"id": "1", "data": {"rating": 1}, "meta": {"message_id": "a"}, "snapshot": chat},
        {"id": "c", "object": "chat.completion", "choices": [choice], "metadata": {"score": "1"}},
    ]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every object and list with a key or index in it."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [(value, key) for key, _ in pairs] + [place for _, inner in pairs for place in places(inner)]


def test_the_entries_are_read() -> None:
    first, second = map(told, whole())
    assert (first.answers, first.preferred, second.score) == (("yes", "no"), 0, 1.0)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_entries_with_anything_in_any_place(data: st.DataObject) -> None:
    entry = data.draw(st.sampled_from(whole()))
    for _ in range(data.draw(st.integers(1, 3))):
        found = places(entry)
        if found:
            holder, key = data.draw(st.sampled_from(found))
            holder[key] = data.draw(VALUES)
    with contextlib.suppress(Unusable):
        assert isinstance(told(entry), Told)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=200), VALUES.map(lambda value: json.dumps(value).encode())))
def test_bodies_of_any_kind(body: bytes) -> None:
    with contextlib.suppress(InvalidRequest, Unusable):
        for entry in entries(body):
            told(entry)


def test_a_conversation_in_a_circle_and_many_siblings_end() -> None:
    entry, _ = whole()
    messages = entry["snapshot"]["chat"]["chat"]["history"]["messages"]
    for name in map(str, range(1000)):
        messages[name] = {"role": "assistant", "content": f"no {name}"}
        messages["q"]["childrenIds"].append(name)
    assert len(told(entry).answers) == 1 + MOST_SIBLINGS
    messages["q"]["parentId"] = "q"
    with pytest.raises(Unusable, match="a loop"):
        told(entry)


def test_details_without_an_end_are_read_in_time() -> None:
    entry = whole()[0]
    entry["snapshot"]["chat"]["chat"]["history"]["messages"]["a"]["content"] = "<details " * 500_000
    assert told(entry).answers[0].startswith("<details ")
