"""OpenAI's chats and text completions without a server: whole replies by a plain account, and streams that add up to
them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.dialects.openai.bodies import CompletionBody, StreamOptions, streaming
from mlx_tandem.dialects.openai.renderer import ChatRenderer, OpenAIRenderer, Shown, TextRenderer
from mlx_tandem.errors import EngineDied, InvalidRequest
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
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.output import TextOptions
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.types import AdapterRef, SamplingParams, TokenLogprob

TEXTS = ["a", "bb", "", "é", "\n"]
"""The texts of the tokens."""

FRONT = cast(
    Front,
    SimpleNamespace(
        tokenizer=SimpleNamespace(token_text=TEXTS.__getitem__, token_bytes=lambda t: TEXTS[t].encode()),
        models=SimpleNamespace(label=lambda ref: "the-base" if ref is None else ref.label),
        fingerprints=SimpleNamespace(of=lambda ref: f"fp of {ref and ref.name}"),
    ),
)
PIECE = st.text("ab<é🦊\n", max_size=3)


@dataclass(frozen=True)
class Asked:
    """A request, and the events of its choices as the engine's steps mix them."""

    prompted: Prompted
    shown: Shown
    events: list[Event]
    usage: Usage
    outcomes: Sequence[dict[str, Any]]
    is_chat: bool

    def renderer(self) -> OpenAIRenderer:
        made = (ChatRenderer if self.is_chat else TextRenderer)(FRONT, self.prompted, self.shown)
        made.id = "the-id"
        made._names["created"] = 5
        made._begin_events()
        return made

    def whole(self) -> dict[str, Any]:
        answers = Answers(len(self.prompted.prompts), self.prompted.choices)
        answers.add(self.events)
        return cast("dict[str, Any]", json.loads(self.renderer().whole(answers, self.usage, self.outcomes)))

    def stream(self) -> bytes:
        made = self.renderer()
        methods = made.methods()
        pieces = [made.open(), *(methods[type(event)](event) for event in self.events)]
        return b"".join([*pieces, made.close(self.usage, self.outcomes)])

    def of(self, choice: int, kind: type | tuple[type, ...]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind) and getattr(event, "choice", -1) == choice]


LOGPROB = st.sampled_from([-0.5, -2.0, -math.inf])


@st.composite
def details(draw: st.DrawFn, asked: Shown) -> tuple[Any, Any, Any]:
    """Tokens of one event, their logprobs with as many alternatives as are asked for, and their versions."""
    tokens = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
    logprobs: tuple[TokenLogprob, ...] = ()
    if asked.logprobs is not None:
        most = asked.logprobs
        top = st.lists(st.tuples(st.integers(0, 4), LOGPROB), min_size=most, max_size=most).map(tuple)
        logprobs = tuple(TokenLogprob(draw(LOGPROB), -9.0, draw(top)) for _ in tokens)
    return tokens, logprobs, tuple(draw(st.integers(1, 3)) for _ in tokens) if asked.versions else ()


@st.composite
def said(draw: st.DrawFn, choice: int, shown: Shown, is_chat: bool) -> list[Event]:
    """The events of one choice."""
    events: list[Event] = []
    kinds = ["text", "reasoning", "call"] if is_chat else ["text"]
    calls = 0
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=4)):
        if kind == "text":
            events.append(TextDelta(choice, draw(PIECE), *draw(details(shown))))
        elif kind == "reasoning":
            events.append(ReasoningDelta(choice, draw(PIECE), *draw(details(shown))))
        elif not (shown.legacy and calls):
            events.append(ToolCallStart(choice, calls, f"call_{choice}_{calls}", "add", *draw(details(shown))))
            for piece in draw(st.lists(PIECE, max_size=2)):
                events.append(ToolCallArguments(choice, calls, piece, *draw(details(shown))))
            calls += 1
    return [*events, Finish(choice, draw(st.sampled_from(["stop", "length"])), None, *draw(details(shown)))]


@st.composite
def asked(draw: st.DrawFn, *, whole: bool) -> Asked:
    """A request for a whole reply or for a stream, which has no `prompt_logprobs`."""
    is_chat = draw(st.booleans())
    prompts = [draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)) for _ in range(1 if is_chat else 2)]
    n = draw(st.integers(1, 2))
    echo = draw(st.booleans())
    shown = Shown(
        usage=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, 0, 1])) if whole else None,
        token_ids=draw(st.booleans()),
        tokens_as_ids=draw(st.booleans()),
        versions=draw(st.booleans()),
        reasoning=not is_chat or draw(st.booleans()),
        legacy=is_chat and draw(st.booleans()),
        echo=tuple(f"echo{k}" for k in range(len(prompts))) if echo else None,
    )
    adapter = draw(st.sampled_from([None, AdapterRef("own", 3, "d")]))
    follow, running = draw(st.booleans()), shown.usage and draw(st.booleans())
    params = SamplingParams(max_tokens=9, logprobs=shown.logprobs)
    text = TextOptions(silent=draw(st.booleans()))
    prompted = Prompted(prompts, [adapter] * len(prompts), params, n, text, follow=follow, running_usage=running)
    waiting: list[list[Event]] = [
        [Finish(i, "length")] if text.silent else draw(said(i, shown, is_chat)) for i in range(prompted.choices)
    ]
    events: list[Event] = []
    unread = set(range(len(prompts)))
    has_scores = shown.prompt_logprobs is not None or (echo and shown.logprobs is not None)
    while any(waiting):
        choice = draw(st.sampled_from([i for i, rest in enumerate(waiting) if rest]))
        if choice // n in unread:
            unread.discard(choice // n)
            scores = [TokenLogprob(-1.5, -1.5, ((4, -0.5), (1, -0.75)), 3) for _ in prompts[choice // n][1:]]
            events.append(PromptRead(choice // n, 1, tuple(scores) if has_scores else ()))
        if running:
            events.append(Usage(9, 1, len(events), 0))
        events.append(waiting[choice].pop(0))
    usage = Usage(9, 2, 7, 4, 3, 1)
    outcomes = [{"reward": i / 2} for i in range(prompted.choices)] if draw(st.booleans()) else []
    return Asked(prompted, shown, events, usage, outcomes, is_chat)


# --- the plain account ---------------------------------------------------------------------------------------------

SAID = (TextDelta, ReasoningDelta, ToolCallStart, ToolCallArguments, Finish)
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 7,
    "total_tokens": 16,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {
        "reasoning_tokens": 4,
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 1,
    },
}


def finite(logprob: float) -> float:
    return max(logprob, -9999.0)


def chat_logprobs(a: Asked, tokens: list[int], scores: list[TokenLogprob | None]) -> Any:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        name = f"token_id:{token}" if a.shown.tokens_as_ids else TEXTS[token]
        return {"token": name, "logprob": finite(logprob), "bytes": list(TEXTS[token].encode())}

    pairs = [(token, lp) for token, lp in zip(tokens, scores, strict=True) if lp is not None]
    content = [entry(token, lp.model) | {"top_logprobs": [entry(*pair) for pair in lp.top]} for token, lp in pairs]
    return {"content": content, "refusal": None}


def text_logprobs(a: Asked, tokens: list[int], scores: list[TokenLogprob | None]) -> Any:
    def name(token: int) -> str:
        return f"token_id:{token}" if a.shown.tokens_as_ids else TEXTS[token]

    def first(pairs: list[tuple[int, float]]) -> dict[str, float]:
        return {name(token): finite(logprob) for token, logprob in reversed(pairs)}

    return {
        "text_offset": [sum(len(TEXTS[t]) for t in tokens[:i]) for i in range(len(tokens))],
        "token_logprobs": [None if lp is None else finite(lp.model) for lp in scores],
        "tokens": [name(t) for t in tokens],
        "top_logprobs": [
            None if lp is None else first([*lp.top, (t, lp.model)]) for t, lp in zip(tokens, scores, strict=True)
        ],
    }


def prompt_details(a: Asked, k: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    prompt = list(a.prompted.prompts[k])
    if a.shown.token_ids:
        made["prompt_token_ids"] = prompt
    if a.shown.prompt_logprobs is not None:
        top = [(4, -0.5), (1, -0.75)][: a.shown.prompt_logprobs]
        made["prompt_logprobs"] = [
            None,
            *(
                {str(t): {"logprob": p, "rank": i + 1, "decoded_token": TEXTS[t]} for i, (t, p) in enumerate(top)}
                | {str(token): {"logprob": -1.5, "rank": 3, "decoded_token": TEXTS[token]}}
                for token in prompt[1:]
            ),
        ]
    return made


def expected_choice(a: Asked, i: int) -> dict[str, Any]:
    k, shown = i // a.prompted.n, a.shown
    text = "".join(event.text for event in a.of(i, TextDelta))
    text = (shown.echo[k] if shown.echo is not None else "") + text
    (end,) = a.of(i, Finish)
    reason = end.reason
    calls = [
        {
            "id": start.id,
            "type": "function",
            "function": {
                "name": start.name,
                "arguments": "".join(e.arguments for e in a.of(i, ToolCallArguments) if e.call == start.call),
            },
        }
        for start in a.of(i, ToolCallStart)
    ]
    if calls and reason == "stop":
        reason = "function_call" if shown.legacy else "tool_calls"
    tokens = [token for event in a.of(i, SAID) for token in event.tokens]
    scores: list[TokenLogprob | None] = [lp for event in a.of(i, SAID) for lp in event.logprobs]
    if shown.echo is not None and not a.is_chat:
        tokens = [*a.prompted.prompts[k], *tokens]
        (read,) = [event for event in a.events if isinstance(event, PromptRead) and event.prompt == k]
        most = shown.logprobs or 0
        scores = [None, *(TokenLogprob(lp.model, lp.sampled, lp.top[:most]) for lp in read.logprobs), *scores]
    made: dict[str, Any] = {"index": i, "logprobs": None, "finish_reason": reason}
    if a.is_chat:
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        thoughts = a.of(i, ReasoningDelta)
        if thoughts and shown.reasoning:
            message |= dict.fromkeys(("reasoning", "reasoning_content"), "".join(e.text for e in thoughts))
        if calls:
            message |= {"function_call": calls[0]["function"]} if shown.legacy else {"tool_calls": calls}
        made["message"] = message
    else:
        made["text"] = text
        made |= prompt_details(a, k)
    if shown.logprobs is not None:
        made["logprobs"] = (chat_logprobs if a.is_chat else text_logprobs)(a, tokens, scores)
    if shown.token_ids or shown.versions:
        made["token_ids"] = [token for event in a.of(i, SAID) for token in event.tokens]
    if shown.versions:
        made["versions"] = [version for event in a.of(i, SAID) for version in event.versions]
    return made | (a.outcomes[i] if a.outcomes else {})


def head(a: Asked, object: str) -> dict[str, Any]:
    adapter = a.prompted.adapters[0]
    return {
        "id": "the-id",
        "object": object,
        "created": 5,
        "model": "the-base" if adapter is None else "own@3",
        "system_fingerprint": None if a.prompted.follow else f"fp of {adapter and adapter.name}",
    }


@settings(max_examples=150)
@given(asked(whole=True))
def test_a_whole_reply(a: Asked) -> None:
    made = head(a, "chat.completion" if a.is_chat else "text_completion")
    made |= {"choices": [expected_choice(a, i) for i in range(a.prompted.choices)], "usage": USAGE}
    assert a.whole() == made | (prompt_details(a, 0) if a.is_chat else {})


# --- streams -------------------------------------------------------------------------------------------------------


def joined(kept: Any, more: Any, path: str = "") -> Any:
    """What a client that adds up the pieces has: texts and lists grow, everything else is what was said last."""
    if kept is None or more is None:
        return more if kept is None else kept
    if isinstance(more, dict):
        return kept | {key: joined(kept.get(key), value, f"{path}.{key}") for key, value in more.items()}
    if isinstance(more, list) and path.endswith("tool_calls"):
        calls = {call["index"]: call for call in kept}
        for call in more:
            calls[call["index"]] = joined(calls.get(call["index"]), call)
        return list(calls.values())
    is_growing = path.rpartition(".")[2] in ("content", "text", "reasoning", "reasoning_content", "arguments")
    return kept + more if is_growing or (isinstance(more, list) and "prompt" not in path) else more


def added_up(a: Asked, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream in the form of a whole reply."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            i = choice["index"]
            assert choices.get(i, {}).get("finish_reason") is None or a.outcomes, "nothing follows the end of a choice"
            choices[i] = joined(choices.get(i), choice)
    for choice in choices.values():
        if a.is_chat:
            message = {"refusal": None} | choice.pop("delta")
            for call in message.get("tool_calls", ()):
                del call["index"]
            has_calls = "tool_calls" in message or "function_call" in message
            choice["message"] = message | {"content": message["content"] or (None if has_calls else "")}
            if not a.shown.reasoning:
                assert "reasoning" not in message
    return [choices[i] for i in sorted(choices)]


@settings(max_examples=150)
@given(asked(whole=False))
def test_a_stream_adds_up_to_the_whole_reply(a: Asked) -> None:
    *lines, done, end = a.stream().decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if not line.startswith(":")]
    named = head(a, "chat.completion.chunk" if a.is_chat else "text_completion")
    if a.shown.usage:
        last = chunks.pop()
        assert last == named | {"choices": [], "usage": USAGE}
    usages = [chunk.pop("usage") for chunk in chunks] if a.shown.usage else []
    if a.prompted.running_usage:
        told = [usage["completion_tokens"] for usage in usages]
        assert None not in told
        assert told == sorted(told)
        assert set(told) <= {0, *(event.completion for event in a.events if isinstance(event, Usage))}
    else:
        assert set(usages) <= {None}
    of_prompt = [{key: value for key, value in chunk.items() if key.startswith("prompt_")} for chunk in chunks]
    for chunk in chunks:
        assert chunk.items() >= named.items()
    made = [expected_choice(a, i) for i in range(a.prompted.choices)]
    own = prompt_details(a, 0) if a.is_chat else {}
    assert [found for found in of_prompt if found] == ([own] * a.prompted.choices if own else [])
    if a.prompted.text.silent and a.shown.logprobs is not None:
        ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"] is not None]
        assert all(choice["logprobs"] is not None for choice in ends), "they are there, and empty"
    found = added_up(a, chunks)
    for choice in (*made, *found):
        if not any((choice["logprobs"] or {}).values()):
            choice["logprobs"] = None  # no event had tokens
    assert found == made


def test_a_stream_that_fails_ends_with_the_error() -> None:
    prompted = Prompted([[1]], [None], SamplingParams(max_tokens=1))
    made: Callable[..., OpenAIRenderer]
    for made in (ChatRenderer, TextRenderer):
        line = made(FRONT, prompted, Shown()).error(EngineDied("it died")).decode()
        said = {"message": "it died", "type": "server_error", "param": None, "code": "engine_died"}
        assert json.loads(line.removeprefix("data: ")) == {"error": said}
        assert line.endswith("\n\n")


@pytest.mark.parametrize(
    ("stream", "options", "made"),
    [
        (None, None, (False, False, False)),
        (False, None, (False, False, False)),
        (True, None, (True, False, False)),
        (True, {}, (True, False, False)),
        (True, {"include_usage": True}, (True, True, False)),
        (True, {"include_usage": False}, (True, False, False)),
        (True, {"continuous_usage_stats": True}, (True, True, True)),
        (True, {"continuous_usage_stats": True, "include_usage": False}, (True, False, True)),
        (True, {"continuous_usage_stats": False, "include_usage": True}, (True, True, False)),
        (True, {"include_obfuscation": True}, (True, False, False)),
        (None, {}, None),
        (False, {"include_usage": True}, None),
    ],
)
def test_what_a_stream_says_of_its_usage(stream: bool | None, options: dict[str, bool] | None, made: Any) -> None:
    body = CompletionBody(
        prompt="x", stream=stream, stream_options=None if options is None else StreamOptions(**options)
    )
    if made is None:
        with pytest.raises(InvalidRequest) as refused:
            streaming(body)
        assert refused.value.param == "stream_options"
    else:
        assert streaming(body) == made
