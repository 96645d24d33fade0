"""Plans, which dialects make of requests that generate, and renderers, which write the replies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_tandem.errors import TandemError
from mlx_tandem.generation.adapters.model_names import Selection
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
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.training.live.recorder import Collect, Outcome


class Renderer(ABC):
    """A writer of one reply of a dialect, as a stream of events or as one JSON body.

    A stream begins with the bytes of `open`, before the prompt is read. It continues with the bytes of one method for
    each event, with `keepalive` between them while there is no event, and ends with `close` or, after a failure, with
    `error`. A dialect that does not stream needs only `whole`.
    """

    id: str
    """The reply's id, which the log names as well."""
    wants_details = True
    """Whether the reply shows tokens, logprobs or versions."""
    media = b"text/event-stream; charset=utf-8"
    """The content type of a stream."""
    keepalive = b""
    """The bytes of a stream that mean nothing to clients; empty where a dialect has none."""
    times = (0.0, 0.0)
    """The seconds until the engine reported the first token, and from there to the last. They are set at the end."""

    @abstractmethod
    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body. `outcomes` has what learning reports of each choice; it is empty without learning."""

    def open(self) -> bytes:
        """Return the beginning of the stream, before the prompt is read."""
        return b""

    def read(self, event: PromptRead) -> bytes:
        """Return the bytes for the event that a prompt has been read."""
        return b""

    def text(self, event: TextDelta) -> bytes:
        """Return the bytes for a piece of text."""
        raise NotImplementedError

    def reasoning(self, event: ReasoningDelta) -> bytes:
        """Return the bytes for a piece of reasoning."""
        raise NotImplementedError

    def call(self, event: ToolCallStart) -> bytes:
        """Return the bytes for the beginning of a tool call."""
        raise NotImplementedError

    def arguments(self, event: ToolCallArguments) -> bytes:
        """Return the bytes for a piece of a tool call's arguments."""
        raise NotImplementedError

    def finish(self, event: Finish) -> bytes:
        """Return the bytes for the end of a choice."""
        raise NotImplementedError

    def usage(self, event: Usage) -> bytes:
        """Return the bytes for the token counts so far, or keep the counts for the next events."""
        return b""

    def close(self, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the end of a stream in which all choices have ended."""
        return b""

    def error(self, error: TandemError) -> bytes:
        """Return the end of a stream that failed with `error`."""
        raise NotImplementedError

    def methods(self) -> Mapping[type, Callable[[Any], bytes]]:
        """Return the method that writes each type of event."""
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
    """A checked request that generates, with the renderer of its reply."""

    prompted: Prompted
    model: Selection
    renderer: Renderer
    stream: bool = False
    collect: Collect | None = None  # the request's task for learning; None: it has none
    keep_alive: float | None = None  # seconds for which the engine is kept after it; None: as before
    skipped: tuple[str, ...] = ()  # fields of what was left out of the request, which a header of the reply names
