"""What a dialect makes of a request that generates: a plan, and a renderer that writes the reply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_tandem.errors import TandemError
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.events import (
    Finish,
    PromptRead,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from mlx_tandem.generation.model_names import Selection
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.training.live.recorder import Collect, Outcome


class Renderer(ABC):
    """Writes one reply of a dialect, as a stream of events or as one JSON body.

    A stream begins with `open`, has the bytes of one method for each event, and ends with `close` or, where it fails,
    with `error`. A dialect that does not stream needs `whole` only.
    """

    id: str
    """The reply's id, which the log names, too."""
    wants_details = True
    """Whether the reply shows tokens, logprobs or versions."""

    @abstractmethod
    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body. `outcomes`: what learning says of the choices; empty: nothing."""

    def open(self) -> bytes:
        """Return what comes before any event."""
        return b""

    def read(self, event: PromptRead) -> bytes:
        """Return what is said of a prompt when it has been read."""
        return b""

    def text(self, event: TextDelta) -> bytes:
        """Return a piece of text."""
        raise NotImplementedError

    def reasoning(self, event: ReasoningDelta) -> bytes:
        """Return a piece of reasoning."""
        raise NotImplementedError

    def call(self, event: ToolCallStart) -> bytes:
        """Return the beginning of a tool call."""
        raise NotImplementedError

    def arguments(self, event: ToolCallArguments) -> bytes:
        """Return a piece of a tool call's arguments."""
        raise NotImplementedError

    def finish(self, event: Finish) -> bytes:
        """Return the end of a choice."""
        raise NotImplementedError

    def usage(self, event: Usage) -> bytes:
        """Return, or remember for the next events, what has been taken so far."""
        return b""

    def close(self, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the end of a stream whose choices have all ended."""
        return b""

    def error(self, error: TandemError) -> bytes:
        """Return the end of a stream that has failed."""
        raise NotImplementedError

    def methods(self) -> Mapping[type, Callable[[Any], bytes]]:
        """Return the method for each type of event."""
        return {
            PromptRead: self.read,
            TextDelta: self.text,
            ReasoningDelta: self.reasoning,
            ToolCallStart: self.call,
            ToolCallArguments: self.arguments,
            Finish: self.finish,
            Usage: self.usage,
        }


@dataclass(frozen=True)
class Plan:
    """A checked request that generates."""

    prompted: Prompted
    model: Selection
    renderer: Renderer
    stream: bool = False
    collect: Collect | None = None  # what learning is to do with the choices
