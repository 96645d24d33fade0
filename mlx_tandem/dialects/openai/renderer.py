"""OpenAI's replies to chats and text completions, as whole bodies and as stream events.

An event's bytes consist of parts that are encoded once per request. Only the text is encoded for each token.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from mlx_tandem.dialects.openai.errors import error_body
from mlx_tandem.dialects.openai.logprobs import ChatLogprobs, LogprobShape, TextLogprobs, prompt_scores
from mlx_tandem.dialects.plan import Renderer
from mlx_tandem.dialects.sse import COMMENT
from mlx_tandem.errors import TandemError
from mlx_tandem.generation.answers import Answer, Answers
from mlx_tandem.generation.events import (
    Finish,
    PromptRead,
    ReasoningDelta,
    Said,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.strict_json import dumps
from mlx_tandem.training.live.recorder import Outcome
from mlx_tandem.types import TokenLogprob

Details = dict[str, Any]
"""The members of a choice besides its text."""

DONE = b"data: [DONE]\n\n"
"""The last bytes of a stream that did not fail."""


@dataclass(frozen=True)
class Shown:
    """The parts of a reply besides its text that the request asked for."""

    usage: bool = False  # a stream ends with the usage; a whole reply always has it
    logprobs: int | None = None  # number of alternatives for each token; None: no logprobs
    prompt_logprobs: int | None = None  # number of alternatives for each token of the prompt; None: no logprobs
    token_ids: bool = False  # the token ids of the answer and of the prompt
    tokens_as_ids: bool = False  # logprobs name tokens by their ids
    versions: bool = False  # the adapter version that made each token
    reasoning: bool = True  # the thoughts before the answer
    legacy: bool = False  # a tool call has OpenAI's older form, `function_call`
    echo: tuple[str, ...] | None = None  # for each prompt, the text that its replies begin with


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.rejected,
        },
    }


class OpenAIRenderer(Renderer):
    """The common base of the renderers of chats and text completions."""

    id_prefix: str
    object: str
    chunk_object: str
    text_open: bytes
    text_close: bytes
    empty: bytes
    opening: bytes | None  # sent before a choice's first text; None: only a comment is
    one_prompt: bool  # the prompt's details are members of the reply; otherwise, of each choice
    keepalive = COMMENT

    def __init__(self, front: Front, prompted: Prompted, shown: Shown):
        self._tokenizer = front.tokenizer
        self._prompted = prompted
        self._shown = shown
        self.id = self.id_prefix + secrets.token_hex(12)
        adapter = prompted.adapters[0]
        self._names: dict[str, Any] = {
            "created": int(time.time()),
            "model": front.models.label(adapter),
            # A request that follows newer versions depends on when these are published, so it has no fingerprint.
            "system_fingerprint": None if prompted.follow else front.fingerprints.of(adapter),
        }
        self._prompts = [PromptRead(k, 0) for k in range(len(prompted.prompts))]
        self._logprobs: list[LogprobShape] | None = None
        if shown.logprobs is not None:
            self._logprobs = [self.make_logprobs(self._tokenizer, shown.tokens_as_ids) for _ in range(prompted.choices)]
        self._shows_tokens = shown.token_ids or shown.versions
        self.wants_details = self._logprobs is not None or self._shows_tokens
        self._no_details: Details = {"token_ids": ()} if self._shows_tokens else {}
        if shown.versions:
            self._no_details["versions"] = ()
        self._begin_events()

    def _begin_events(self) -> None:
        """Encode the parts that all events of a stream have in common."""
        names, choices = self._names, range(self._prompted.choices)
        self._start = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"system_fingerprint":%b,"choices":[' % (
            dumps(self.id),
            dumps(self.chunk_object),
            names["created"],
            dumps(names["model"]),
            dumps(names["system_fingerprint"]),
        )
        self._index = [self._start + b'{"index":%d' % i for i in choices]
        self._heads = [i + self.text_open for i in self._index]
        self._end_with(b',"usage":null}\n\n' if self._shown.usage else b"}\n\n")
        if self._prompted.running_usage:
            self.usage(Usage(self._prompted.prompt_tokens))

    def _end_with(self, rest: bytes) -> None:
        """Set the bytes that follow the choices of an event."""
        self._rest = rest
        self._end = b"}]" + rest
        self._unfinished = b',"finish_reason":null' + self._end
        self._plain = self.text_close + b',"logprobs":null' + self._unfinished

    # -- differences between the routes -------------------------------------------------------------------------

    def make_logprobs(self, tokenizer: Tokenizer, as_ids: bool) -> LogprobShape:
        """Return a new writer of one choice's logprobs."""
        raise NotImplementedError

    def choice(self, index: int, text: str, answer: Answer) -> dict[str, Any]:
        """Return a choice of a whole reply, without details."""
        raise NotImplementedError

    # -- streams ------------------------------------------------------------------------------------------------

    def open(self) -> bytes:
        """Return the events before any text, which name the role of each choice in a chat; otherwise a comment."""
        if self.opening is None:
            return COMMENT
        end = b',"logprobs":null,"finish_reason":null}]' + _members(self._prompt_details(0)) + self._rest
        return b"".join(i + self.opening + end for i in self._index)

    def read(self, event: PromptRead) -> bytes:
        """Return the events in which the choices of a prompt repeat or describe the prompt before their own text."""
        shown, k, n = self._shown, event.prompt, self._prompted.n
        self._prompts[k] = event
        choices = range(k * n, (k + 1) * n)
        if shown.echo is None:
            if self.one_prompt or not shown.token_ids:
                return b""
            own = self._no_details | self._prompt_details(k)
            return b"".join([self._text_with(i, "", own) for i in choices])
        if self.one_prompt:
            return b"".join([self._text_with(i, shown.echo[k], self._no_details) for i in choices])
        own = self._prompt_details(k)
        return b"".join([self._text_with(i, shown.echo[k], self._echo_details(i) | own) for i in choices])

    def text(self, event: TextDelta) -> bytes:
        """Return the event for a piece of text."""
        if not self.wants_details:
            return self._heads[event.choice] + dumps(event.text) + self._plain
        return self._text_with(event.choice, event.text, self._event_details(event))

    def finish(self, event: Finish) -> bytes:
        """Return the event for the end of a choice, with the tokens that no earlier event has shown."""
        details = self._no_details
        if event.tokens or self._prompted.text.silent:
            details = self._event_details(event)
        own = {"logprobs": None} | details | {"finish_reason": self.finish_reason(event)}
        return self._index[event.choice] + self.empty + _members(own) + self._end

    def finish_reason(self, event: Finish) -> str:
        """Return the reason why a choice has ended, in OpenAI's words."""
        return event.reason

    def usage(self, event: Usage) -> bytes:
        """Add this usage to all later events; return no bytes."""
        self._end_with(b',"usage":%b}\n\n' % dumps(usage_object(event)))
        return b""

    def close(self, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return an event with the outcomes of learning, one with the usage, and the end of the stream.

        Each of the two events is left out if there is nothing to report in it.
        """
        tail = b""
        if outcomes:
            choices = [
                b'{"index":%d%b%b}' % (i, self.empty, _members({"logprobs": None, "finish_reason": None} | own))
                for i, own in enumerate(outcomes)
            ]
            tail = self._start + b",".join(choices) + b"]" + self._rest
        if self._shown.usage:
            tail += b'%b],"usage":%b}\n\n' % (self._start, dumps(usage_object(usage)))
        return tail + DONE

    def error(self, error: TandemError) -> bytes:
        """Return the event with the error object."""
        return b"data: " + error_body(error) + b"\n\n"

    def _text_with(self, index: int, text: str, details: Details) -> bytes:
        """Return the event for a piece of text with `details`. Its logprobs are null if `details` has none."""
        head = self._heads[index] + dumps(text) + self.text_close
        return head + _members({"logprobs": None} | details) + self._unfinished

    # -- whole replies ------------------------------------------------------------------------------------------

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body."""
        self._prompts = answers.prompts
        n, echo = self._prompted.n, self._shown.echo
        details = [self._prompt_details(k) for k in range(len(self._prompts))]
        choices: list[dict[str, Any]] = []
        for i, answer in enumerate(answers.choices):
            text = answer.text if echo is None else echo[i // n] + answer.text
            own = self._details(i, answer, *(self._echoed(i // n) if self._repeats_prompt else ((), ())))
            whole = self.choice(i, text, answer) | own | (outcomes[i] if outcomes else {})
            choices.append(whole if self.one_prompt else whole | details[i // n])
        body = {"id": self.id, "object": self.object} | self._names
        body |= {"choices": choices, "usage": usage_object(usage)}
        return dumps(body | details[0] if self.one_prompt else body)

    # -- details ------------------------------------------------------------------------------------------------

    @property
    def _repeats_prompt(self) -> bool:
        """Whether the details of each choice begin with those of the prompt's tokens."""
        return self._shown.echo is not None and not self.one_prompt

    def _event_details(self, event: Said | Finish) -> Details:
        """Return the requested details of an event's tokens."""
        return self._details(event.choice, event) if self.wants_details else {}

    def _echo_details(self, index: int) -> Details:
        """Return the requested details of the prompt's tokens, which a choice repeats."""
        return self._details(index, Answer(), *self._echoed(index // self._prompted.n))

    def _details(
        self,
        index: int,
        said: Said | Finish | Answer,
        before: Sequence[int] = (),
        known: Sequence[TokenLogprob | None] = (),
    ) -> Details:
        """Return the requested details of these tokens. Their logprobs follow those of the tokens `before`."""
        details: Details = {}
        if self._logprobs is not None:
            details["logprobs"] = self._logprobs[index].take([*before, *said.tokens], [*known, *said.logprobs])
        if self._shows_tokens:
            details["token_ids"] = said.tokens
        if self._shown.versions:
            details["versions"] = said.versions
        return details

    def _prompt_details(self, k: int) -> Details:
        """Return the requested details of prompt k."""
        shown, prompt = self._shown, self._prompted.prompts[k]
        details: Details = {}
        if shown.token_ids:
            details["prompt_token_ids"] = prompt
        if shown.prompt_logprobs is not None:
            scores = self._prompts[k].logprobs
            details["prompt_logprobs"] = prompt_scores(self._tokenizer, prompt, scores, shown.prompt_logprobs)
        return details

    def _echoed(self, k: int) -> tuple[Sequence[int], list[TokenLogprob | None]]:
        """Return the tokens and the logprobs of prompt k for a reply that repeats it."""
        most = self._shown.logprobs or 0
        scores = self._prompts[k].logprobs
        return self._prompted.prompts[k], [None, *(structs.replace(lp, top=lp.top[:most]) for lp in scores)]


class ChatRenderer(OpenAIRenderer):
    """A writer of replies to chats."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    text_open = b',"delta":{"content":'
    text_close = b"}"
    empty = b',"delta":{}'
    opening = b',"delta":{"role":"assistant","content":""}'
    one_prompt = True

    def __init__(self, front: Front, prompted: Prompted, shown: Shown):
        super().__init__(front, prompted, shown)
        self._called: set[int] = set()  # choices that have called a tool

    def make_logprobs(self, tokenizer: Tokenizer, as_ids: bool) -> LogprobShape:
        """Return a new writer of one choice's logprobs."""
        return ChatLogprobs(tokenizer, as_ids)

    def choice(self, index: int, text: str, answer: Answer) -> dict[str, Any]:
        """Return a choice of a whole reply, without details."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        reason: str = answer.reason
        if answer.thoughts and self._shown.reasoning:
            message |= _thought(answer.reasoning)
        if answer.calls:
            calls = [_call(call.id, call.name, "".join(call.pieces)) for call in answer.calls]
            message |= {"content": text or None, **self._calls(calls)}
            reason = self._called_reason(reason)
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def reasoning(self, event: ReasoningDelta) -> bytes:
        """Return the event for a piece of reasoning, without its text if the request wants no reasoning."""
        return self._delta(event, _thought(event.text) if self._shown.reasoning else {})

    def call(self, event: ToolCallStart) -> bytes:
        """Return the event for the beginning of a tool call."""
        self._called.add(event.choice)
        return self._delta(event, self._calls([{"index": event.call} | _call(event.id, event.name, "")]))

    def arguments(self, event: ToolCallArguments) -> bytes:
        """Return the event for a piece of a tool call's arguments."""
        return self._delta(event, self._calls([{"index": event.call, "function": {"arguments": event.arguments}}]))

    def finish_reason(self, event: Finish) -> str:
        """Return the reason why a choice has ended, in OpenAI's words."""
        return self._called_reason(event.reason) if event.choice in self._called else event.reason

    def _called_reason(self, reason: str) -> str:
        """Return the reason for the end of a choice that has called a tool."""
        if reason != "stop":
            return reason
        return "function_call" if self._shown.legacy else "tool_calls"

    def _calls(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the members of a message or a delta for these calls or pieces of calls."""
        return {"function_call": calls[0]["function"]} if self._shown.legacy else {"tool_calls": calls}

    def _delta(self, event: Said, delta: dict[str, Any]) -> bytes:
        """Return the event whose choice has this `delta`."""
        own = {"delta": delta, "logprobs": None} | self._event_details(event)
        return self._index[event.choice] + _members(own) + self._unfinished


class TextRenderer(OpenAIRenderer):
    """A writer of replies to text completions. No parser reads their text."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    text_open = b',"text":'
    text_close = b""
    empty = b',"text":""'
    opening = None
    one_prompt = False

    def make_logprobs(self, tokenizer: Tokenizer, as_ids: bool) -> LogprobShape:
        """Return a new writer of one choice's logprobs."""
        return TextLogprobs(tokenizer, as_ids)

    def choice(self, index: int, text: str, answer: Answer) -> dict[str, Any]:
        """Return a choice of a whole reply, without details."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": answer.reason}


def _thought(text: str) -> dict[str, Any]:
    """Return the members for reasoning, under the names that DeepSeek's clients and vLLM's clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return OpenAI's object for a tool call."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _members(details: Details) -> bytes:
    """Return the encoded members, with a leading comma so that they can follow others in a JSON object."""
    return b"," + dumps(details)[1:-1] if details else b""
