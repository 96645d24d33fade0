"""Random answers of one choice as events, for properties of the dialects' renderers."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hypothesis import strategies as st

from mlx_tandem.dialects.plan import Renderer
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.events import (
    Event,
    Finish,
    PromptRead,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from mlx_tandem.types import TokenLogprob

NAMES = ("add", "get_weather")
PIECES = st.lists(st.text(max_size=6), max_size=4)
ARGUMENTS = st.dictionaries(
    st.text(max_size=4), st.one_of(st.integers(-9, 9), st.text(max_size=5), st.none()), max_size=3
)


@dataclass(frozen=True)
class Said:
    """An answer: its events, and the counts of its tokens."""

    events: list[Event]
    usage: Usage

    @property
    def answers(self) -> Answers:
        answers = Answers(1, 1)
        answers.add(self.events)
        return answers

    def stream(self, renderer: Renderer) -> bytes:
        """The bytes that a renderer writes for the answer."""
        methods = renderer.methods()
        pieces = [renderer.open(), *(methods[type(event)](event) for event in self.events)]
        return b"".join([*pieces, renderer.close(self.usage, [])])

    def whole(self, renderer: Renderer) -> bytes:
        return renderer.whole(self.answers, self.usage, [])


def cut(text: str, at: list[int]) -> list[str]:
    """The text in pieces that end at these places."""
    ends = sorted({min(a, len(text)) for a in at} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@st.composite
def said(draw: st.DrawFn, stops: tuple[str | None, ...] = (None, "STOP"), tokens: int = 0) -> Said:
    """Text, reasoning and calls in any order and in any pieces; the last call may have been cut off.

    Pieces of text have up to `tokens` tokens, whose ids are below 5, with their logprobs."""
    events: list[Event] = [PromptRead(0, cached=draw(st.integers(0, 5)))]
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=6)):
        if kind == "call":
            events.append(ToolCallStart(0, calls, f"call_{calls}", draw(st.sampled_from(NAMES))))
            arguments = json.dumps(draw(ARGUMENTS), ensure_ascii=draw(st.booleans()))
            pieces = cut(arguments, draw(st.lists(st.integers(0, 30), max_size=3)))
            events += [ToolCallArguments(0, calls, piece) for piece in pieces]
            calls += 1
        else:
            for piece in draw(PIECES):
                if kind == "reasoning":
                    events.append(ReasoningDelta(0, piece))
                    continue
                ids = draw(st.lists(st.integers(0, 4), max_size=tokens))
                logprobs = tuple(TokenLogprob(-i, -i) for i in range(len(events), len(events) + len(ids)))
                events.append(TextDelta(0, piece, tuple(ids), logprobs))
    if isinstance(events[-1], ToolCallArguments) and draw(st.booleans()):
        events[-1] = ToolCallArguments(0, calls - 1, events[-1].arguments[:-1])
    reason = draw(st.sampled_from(["stop", "length"]))
    events.append(Finish(0, reason, draw(st.sampled_from(stops)) if reason == "stop" else None))
    completion = draw(st.integers(0, 50))
    usage = Usage(7, events[0].cached, completion, draw(st.integers(0, completion)))  # type: ignore[union-attr]
    return Said(events, usage)
