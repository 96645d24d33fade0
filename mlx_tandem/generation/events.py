"""What the choices of a request say, as typed events: the same for every dialect, the Python API and learning.

The tokens behind an event are its details: their ids, their logprobs (where the engine was asked for them) and the
adapter versions that made them (where somebody asked for those), one for each token or none at all. One event is made
for every token that is streamed, so events are plain structs that the garbage collector does not follow.
"""

from __future__ import annotations

from msgspec import Struct

from mlx_tandem.types import FinishReason, TokenLogprob


class PromptRead(Struct, frozen=True, gc=False):
    """The first event of a prompt's choices: the prompt has been computed, all but its `cached` first tokens for this
    request. `logprobs` are those of its tokens from the second on, where they were asked for."""

    prompt: int
    cached: int
    logprobs: tuple[TokenLogprob, ...] = ()


class TextDelta(Struct, frozen=True, gc=False):
    """A piece of a choice's text. It is empty where a token has not become text yet."""

    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    versions: tuple[int, ...] = ()


class ReasoningDelta(Struct, frozen=True, gc=False):
    """A piece of what a choice thinks before it answers."""

    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    versions: tuple[int, ...] = ()


class ToolCallStart(Struct, frozen=True, gc=False):
    """The beginning of a choice's tool call number `call`."""

    choice: int
    call: int
    id: str
    name: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    versions: tuple[int, ...] = ()


class ToolCallArguments(Struct, frozen=True, gc=False):
    """A piece of the arguments of a tool call that has begun."""

    choice: int
    call: int
    arguments: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    versions: tuple[int, ...] = ()


class Finish(Struct, frozen=True, gc=False):
    """The last event of a choice. `stop` is the stop string that ended it. Its tokens are those that no event before it
    has shown, such as the one that ends a text."""

    choice: int
    reason: FinishReason
    stop: str | None = None
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    versions: tuple[int, ...] = ()


class Usage(Struct, frozen=True, gc=False):
    """How many tokens the request has taken so far. `cached` ones of the prompts did not have to be computed;
    `reasoning` ones are part of the `completion`; `accepted` and `rejected` are tokens of drafts."""

    prompt: int
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    accepted: int = 0
    rejected: int = 0


Said = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments
"""What a parser makes of a choice's text."""

Event = PromptRead | Said | Finish | Usage
