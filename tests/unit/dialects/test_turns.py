"""Turns that are put together from pieces, beside a simple way to do it."""

from __future__ import annotations

import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.dialects.turns import Turns
from mlx_tandem.generation.messages import ImageSource

ROLES = st.sampled_from(["system", "user", "assistant"])
TEXTS = st.sampled_from(["", "a", "b\n", "cd"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("text"), ROLES, TEXTS),
        st.tuples(st.just("image"), st.just("user"), TEXTS),
        st.tuples(st.just("thought"), st.just("assistant"), TEXTS),
        st.tuples(st.just("result"), st.just("tool"), TEXTS),
        st.tuples(st.just("look"), ROLES, TEXTS),
    ),
    max_size=20,
)


def simply(steps: list[tuple[str, str, str]], joined: frozenset[str]) -> list[dict[str, Any]]:
    """The turns, each piece added to the text before it at once."""
    turns: list[dict[str, Any]] = []
    for what, role, text in steps:
        if what == "look":
            continue
        if what == "result":
            turns.append({"role": "tool", "tool_call_id": "c", "content": text})
            continue
        if not turns or turns[-1]["role"] != role or role not in joined:
            turns.append({"role": role, "content": ""})
        turn = turns[-1]
        content = turn["content"]
        if what == "thought":
            if text:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        elif what == "image":
            if isinstance(content, str):
                turn["content"] = content = [{"type": "text", "text": content}] if content else []
            content.append({"type": "image_url", "image_url": {"url": text}})
        elif isinstance(content, str):
            turn["content"] += ("\n" if content and role != "assistant" else "") + text
        elif content[-1]["type"] == "text":
            content[-1]["text"] += ("\n" if content[-1]["text"] else "") + text
        else:
            content.append({"type": "text", "text": text})
    return turns


@given(STEPS, st.frozensets(ROLES))
def test_pieces_become_the_turns_that_a_simple_way_makes(
    steps: list[tuple[str, str, str]], joined: frozenset[str]
) -> None:
    turns = Turns(joined)
    for what, role, text in steps:
        match what:
            case "text":
                turns.text(role, text)
            case "image":
                turns.content(role, [ImageSource(text, "field")])
            case "thought":
                turns.thought(text)
            case "result":
                turns.result("c", [text])
            case "look":
                assert isinstance(turns.messages, list)
    assert turns.messages == simply(steps, joined)


def test_a_turn_of_many_pieces_is_joined_once() -> None:
    """The lines that run do not hold a text that grows with each piece."""
    turns = Turns(("user",))
    longest = 0

    def watch(frame: Any, event: str, _: object) -> Any:
        nonlocal longest
        texts = [v for v in frame.f_locals.values() if isinstance(v, str)]
        longest = max(longest, *map(len, texts), 0)
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        for _ in range(100):
            turns.text("user", "x" * 10)
    finally:
        sys.settrace(before)
    assert longest < 20
    assert len(turns.messages[0]["content"]) == 1099
