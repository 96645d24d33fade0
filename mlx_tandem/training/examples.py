"""Examples as people write them (a conversation, a prompt and its completion, a text) become data of the trainers.

What the model would have to say itself is taught, up to the token that ends it; everything else has weight 0. In a
conversation that is what its assistant says, in a completion all of it, in a plain text everything after its first
token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from mlx_tandem.engine.learning import Datum
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.explain import explain
from mlx_tandem.training.messages import Message, for_template, tools_for_template

Turns = Sequence[Mapping[str, Any]]
S = TypeVar("S", bound=Struct)


class Codec(Protocol):
    """A model's way of writing text as token ids."""

    chats: bool  # the model has a chat template of its own
    end: int  # what ends a text
    ends: frozenset[int]  # what ends an answer

    def text(self, text: str, *, begins: bool) -> list[int]:
        """Return the ids of a text. `begins`: with what the model expects in front of a text."""
        ...

    def chat(self, messages: Turns, *, asks: bool, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the ids of a conversation with tools on offer. `asks`: up to where the assistant speaks."""
        ...


class Chat(Struct):
    """An example that is a conversation, of which the assistant's messages are taught."""

    messages: list[Message]
    tools: list[Any] = []  # that are offered in it

    def datum(self, codec: Codec) -> Datum:
        """Return the example as data for a trainer. Raises InvalidRequest."""
        return conversation(codec, self.messages, self.tools)


class Pair(Struct):
    """An example that is a prompt and its completion, which is taught."""

    prompt: str
    completion: str

    def datum(self, codec: Codec) -> Datum:
        """Return the example as data for a trainer. Raises InvalidRequest."""
        return continuation(codec, codec.text(self.prompt, begins=True), codec.text(self.completion, begins=False))

    def chat(self) -> Chat:
        """Return the pair as a question and its answer."""
        return Chat([Message("user", self.prompt), Message("assistant", self.completion)])


class Plain(Struct):
    """An example that is a text, all of which is taught."""

    text: str

    def datum(self, codec: Codec) -> Datum:
        """Return the example as data for a trainer. Raises InvalidRequest."""
        ids = codec.text(self.text, begins=True)
        return continuation(codec, ids[:1], ids[1:])


Example = Chat | Pair | Plain
FORMS: dict[tuple[str, ...], type[Example]] = {("messages",): Chat, ("prompt", "completion"): Pair, ("text",): Plain}
UNSUPPORTED = ("functions", "function_call")
"""Older names of tools, in a form of their own."""


def parse(value: Mapping[str, Any]) -> Example:
    """Return one example from plain data. Other keys are left alone. Raises InvalidRequest naming the field."""
    for key in UNSUPPORTED:
        if value.get(key):
            raise InvalidRequest(f"{key} is not supported; give tools", param=key, code="unsupported_parameter")
    found = [keys for keys in FORMS if any(key in value for key in keys)]
    if len(found) != 1:
        what = " beside ".join(keys[0] for keys in found) if found else "none of them"
        raise InvalidRequest(f"an example has messages, prompt and completion, or text; here is {what}")
    form = FORMS[found[0]]
    if value.get("tools") and form is not Chat:
        raise InvalidRequest("tools belong to messages", param="tools")
    keys = (*found[0], "tools") if form is Chat and value.get("tools") is not None else found[0]
    return decode({key: value[key] for key in keys if key in value}, form)


def decode(value: Any, kind: type[S]) -> S:
    """Return `value` as `kind`. Raises InvalidRequest naming the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        raise explain(e, kind) from e


def continuation(codec: Codec, prompt: Sequence[int], completion: Sequence[int]) -> Datum:
    """Return a datum that teaches all of a completion, with the end that it leaves out."""
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    taught = [*completion]
    if not taught or taught[-1] not in codec.ends:
        taught.append(codec.end)
    return Datum((*prompt, *taught), len(prompt), (1.0,) * len(taught))


def conversation(codec: Codec, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Datum:
    """Return a datum that teaches what the assistant says, its calls of tools among it, and not what they return.

    Not taught are the first message of all, messages of weight 0, and earlier ones that the template writes differently
    once the conversation has gone on. Raises InvalidRequest when nothing is left to teach, or when the template hides
    where the last answer begins.
    """
    turns = for_template(messages)
    taught = [i for i, m in enumerate(messages) if i and m.role == "assistant" and m.weight]
    if not taught:
        raise InvalidRequest("no answer of the assistant is to be learned", param="messages")
    turns = turns[: taught[-1] + 1]
    offered = tools_for_template(tools)

    def written_up_to(count: int, *, asks: bool) -> list[int]:
        return codec.chat(turns[:count], asks=asks, tools=offered)

    ids = written_up_to(len(turns), asks=False)
    _check_written(codec, turns, offered, ids)
    weights = [0.0] * len(ids)
    for i in taught:
        written = ids if i == taught[-1] else written_up_to(i + 1, asks=False)
        before = written_up_to(i, asks=False)
        start = _common(written_up_to(i, asks=True), ids)
        if _common(written, ids) < len(written) or start < max(len(before) - 1, 1):  # the border may be one token
            continue
        stop = len(written)
        last = max((at for at in range(start, stop) if ids[at] in codec.ends), default=stop - 1)
        weights[start : last + 1] = [1.0] * (last + 1 - start)
    if not any(weights[_common(written_up_to(len(turns) - 1, asks=True), ids) :]):
        raise InvalidRequest("the model's chat template does not show where the last answer begins", param="messages")
    first, last = weights.index(1.0), len(weights) - weights[::-1].index(1.0)
    return Datum(tuple(ids[:last]), first, tuple(weights[first:last]))


def _check_written(codec: Codec, turns: Turns, tools: Sequence[Mapping[str, Any]], ids: Sequence[int]) -> None:
    """Raise InvalidRequest where the template leaves out tools or calls, which would then be taught without a word."""
    if tools and codec.chat(turns, asks=False) == ids:
        raise InvalidRequest("this model's chat template has no place for tools", param="tools")
    place = next((i for i, turn in enumerate(turns) if turn.get("tool_calls")), None)
    silent = [{key: value for key, value in turn.items() if key != "tool_calls"} for turn in turns]
    if place is None:
        return
    try:
        written = codec.chat(silent, asks=False, tools=tools)
    except InvalidRequest:
        return  # The template refuses a message that says nothing, so it looks at the calls.
    if written == ids:
        where = f"messages[{place}].tool_calls"
        raise InvalidRequest("this model's chat template has no place for tool calls", param=where)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many ids are the same from the beginning on."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def cut(datum: Datum, length: int) -> Datum | None:
    """Return the first `length` tokens of a datum; None when nothing that is taught is among them."""
    if len(datum.tokens) <= length:
        return datum
    kept = max(length - datum.prompt_length, 0)
    if not any(datum.weights[:kept]):
        return None
    return Datum(
        datum.tokens[:length],
        datum.prompt_length,
        datum.weights[:kept],
        datum.logprobs and datum.logprobs[:kept],
        datum.temperature,
    )
