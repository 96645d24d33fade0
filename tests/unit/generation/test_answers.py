"""What is collected of an answer: all of it, and in the order in which it was said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings as example_settings

from mlx_tandem.generation.answers import Spoken, ToolCall
from mlx_tandem.generation.events import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
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
