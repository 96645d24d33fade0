"""Typed events of a request's choices, which every dialect, the Python API and learning share.

An event carries the details of its tokens: their ids, their logprobs if the request asked for them, and the adapter
versions that made them if the request asked for those. Each of the three has one entry for each token or none at all.
Every streamed token makes an event, so events are plain structs that the garbage collector does not track.
"""

from __future__ import annotations

from msgspec import Struct

from mlx_tandem.types import FinishReason, TokenLogprob


class PromptRead(Struct, frozen=True, gc=False):
    """The event that a prompt has been computed, which is the first event of its choices.

    The first `cached` tokens did not have to be computed for this request. `logprobs` belong to the prompt's tokens
    from the second on, if the request asked for them. `embedding` has the prompt's pooled hidden states as float32
    numbers if the request asked for those.
    """

    prompt: int
    cached: int
    logprobs: tuple[TokenLogprob, ...] = ()
    embedding: bytes = b""


class TextDelta(Struct, frozen=True, gc=False):
    """A piece of a choice's text. It is empty if its tokens do not complete any text yet."""

    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    versions: tuple[int, ...] = ()


class ReasoningDelta(Struct, frozen=True, gc=False):
    """A piece of a choice's reasoning before its answer."""

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
    """The last event of a choice.

    `stop` is the stop string that ended the choice, if one did. `tokens` are those that no earlier event carried, such
    as the token that ends a text.
    """

    choice: int
    reason: FinishReason
    stop: str | None = None
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    versions: tuple[int, ...] = ()


class Usage(Struct, frozen=True, gc=False):
    """The token counts of a request so far.

    `cached` counts the prompts' tokens that did not have to be computed. `completion` includes `reasoning`. `accepted`
    and `rejected` count the drafts that were copied from the request's prediction.
    """

    prompt: int
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    accepted: int = 0
    rejected: int = 0


Said = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments
"""The events that a parser makes of a choice's text."""

Event = PromptRead | Said | Finish | Usage
