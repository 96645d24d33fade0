"""Whole answers, collected from events for callers that do not stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from mlx_tandem.engine.client.stream import Stream
from mlx_tandem.errors import EngineError
from mlx_tandem.generation.assembler import Assembler
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
from mlx_tandem.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Spoken:
    """A stretch of a choice's text or reasoning, which is never empty.

    `tokens` are the places of a text's tokens among those of the choice, if they are kept.
    """

    kind: Literal["text", "reasoning"]
    text: str
    tokens: tuple[int, ...] = ()


@dataclass(slots=True)
class ToolCall:
    """One tool call of a choice; its arguments are joined from `pieces`."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """The output of one choice so far. `tokens`, `logprobs` and `versions` cover all of its tokens, in order."""

    texts: list[str] = field(default_factory=list)
    places: list[range] = field(default_factory=list)  # of each piece of text, where its tokens are
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None
    marks: list[tuple[int, str | ToolCall]] = field(default_factory=list)
    """The thoughts and calls in their order, each with the number of pieces of text before it."""

    @property
    def parts(self) -> list[Spoken | ToolCall]:
        """The stretches of text and reasoning, and the calls, in the order in which the model wrote them."""
        pieces: list[tuple[str, str | ToolCall, range]] = []
        done = 0
        for before, mark in [*self.marks, (len(self.texts), "")]:
            texts = zip(self.texts[done:before], self.places[done:before], strict=True)
            pieces += [("text", text, place) for text, place in texts]
            pieces.append(("reasoning" if isinstance(mark, str) else "call", mark, range(0)))
            done = before
        parts: list[Spoken | ToolCall] = []
        for kind, group in groupby((piece for piece in pieces if piece[1] or piece[2]), key=itemgetter(0)):
            said: list[Any] = [*group]
            if kind == "call":
                parts += [call for _, call, _ in said]
            elif text := "".join(text for _, text, _ in said):
                tokens = tuple(i for _, _, place in said for i in place)
                if parts and isinstance(last := parts[-1], Spoken) and last.kind == kind:
                    # Two stretches of reasoning, between which are only tokens without text.
                    parts[-1] = Spoken(kind, last.text + text)
                else:
                    parts.append(Spoken(kind, text, tokens))
        return parts

    @property
    def text(self) -> str:
        """The choice's text."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """The text of the choice's reasoning."""
        return "".join(self.thoughts)

    @property
    def reason(self) -> FinishReason:
        """The reason why the choice has ended. Raises EngineError when it has not ended."""
        return self.end.reason

    @property
    def end(self) -> Finish:
        """The last event of the choice. Raises EngineError when it has not ended."""
        if self.finish is None:
            raise EngineError("the engine ended a choice without a reason")
        return self.finish


class Answers:
    """The collected events of one submission. `choices` and `prompts` are in the order of their numbers."""

    def __init__(self, prompts: int, choices: int, *, details: bool = True):
        """Begin without events. Without `details`, tokens, logprobs and versions are not kept."""
        self.prompts: list[PromptRead] = [PromptRead(k, 0) for k in range(prompts)]
        self.choices = [Answer() for _ in range(choices)]
        self._details = details

    def add(self, events: Iterable[Event]) -> None:
        """Add the next events."""
        for event in events:
            if isinstance(event, TextDelta):
                answer = self.choices[event.choice]
                answer.texts.append(event.text)
                begin = len(answer.tokens)
                answer.places.append(range(begin, begin + len(event.tokens) * self._details))
                if self._details:
                    answer.tokens += event.tokens
                    answer.logprobs += event.logprobs
                    answer.versions += event.versions
            elif isinstance(event, PromptRead):
                self.prompts[event.prompt] = event
            elif not isinstance(event, Usage):
                self._add_other(event)

    def _add_other(self, event: ReasoningDelta | ToolCallStart | ToolCallArguments | Finish) -> None:
        """Add an event of a choice that is not a piece of its text."""
        answer = self.choices[event.choice]
        match event:
            case ReasoningDelta():
                answer.thoughts.append(event.text)
                answer.marks.append((len(answer.texts), event.text))
            case ToolCallStart():
                call = ToolCall(event.id, event.name)
                answer.calls.append(call)
                answer.marks.append((len(answer.texts), call))
            case ToolCallArguments():
                answer.calls[event.call].pieces.append(event.arguments)
            case Finish():
                answer.finish = event
        if self._details:
            answer.tokens += event.tokens
            answer.logprobs += event.logprobs
            answer.versions += event.versions


async def collect(assembler: Assembler, stream: Stream, answers: Answers) -> Answers:
    """Read `stream` to its end and return `answers` with all its events."""
    async for deltas in stream:
        answers.add(assembler.push(deltas))
    return answers
