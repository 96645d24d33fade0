"""What is collected of an answer: all of it, and in the order in which it was said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis.strategies import booleans

from mlx_tandem.generation.answers import Answers, Spoken, ToolCall
from mlx_tandem.generation.events import (
    PromptRead,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from tests.answers import Said, said


@example_settings(max_examples=100)
@given(said())
def test_the_parts_of_an_answer_are_its_events_in_their_order(answer: Said) -> None:
    (found,) = answer.answers.choices
    expected: list[list[str]] = []
    for event in answer.events:
        match event:
            case TextDelta() | ReasoningDelta() if event.text:
                kind = "text" if isinstance(event, TextDelta) else "reasoning"
                if not expected or expected[-1][0] != kind:
                    expected.append([kind, ""])
                expected[-1][1] += event.text
            case ToolCallStart():
                expected.append([event.id, ""])
            case ToolCallArguments():
                expected[-1][1] += event.arguments
    parts = [[p.kind, p.text] if isinstance(p, Spoken) else [p.id, "".join(p.pieces)] for p in found.parts]
    assert parts == expected
    assert found.text == "".join(text for kind, text in expected if kind == "text")
    assert found.reasoning == "".join(text for kind, text in expected if kind == "reasoning")
    assert [part for part in found.parts if isinstance(part, ToolCall)] == found.calls


@example_settings(max_examples=100)
@given(said(tokens=2), booleans())
def test_the_tokens_of_an_answer_and_of_its_parts(answer: Said, details: bool) -> None:
    """Those that are not kept have no places either."""
    answers = Answers(1, 1, details=details)
    answers.add(answer.events)
    (found,) = answers.choices
    carrying = [event for event in answer.events if not isinstance(event, PromptRead | Usage)]
    tokens = [token for event in carrying for token in event.tokens]
    assert found.tokens == (tokens if details else [])
    assert found.logprobs == ([lp for event in carrying for lp in event.logprobs] if details else [])
    texts = [part for part in found.parts if isinstance(part, Spoken) and part.kind == "text"]
    places = [place for part in texts for place in part.tokens]
    assert places == sorted(set(places))
    assert set(places) <= set(range(len(found.tokens)))
    if not any(isinstance(event, ReasoningDelta | ToolCallStart) for event in answer.events) and found.text:
        assert places == list(range(len(found.tokens))), "all of them, where there is nothing else"
    assert [prompt.cached for prompt in answers.prompts] == [answer.usage.cached]
