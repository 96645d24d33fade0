"""Running a submission for an HTTP client: whole replies and event streams.

Both are ASGI responses that loop over the engine's deltas themselves. A client that goes away is noticed while
nothing is being sent, too, and its request is cancelled in the engine at once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs
from starlette.types import Receive, Scope, Send

from mlx_tandem.engine.stream import Stream
from mlx_tandem.errors import EngineError, TandemError, Timeout
from mlx_tandem.server.collecting import Collect, Outcome, Recorder, Said
from mlx_tandem.server.dialects.shapes import (
    DONE,
    Details,
    Events,
    LogprobShape,
    Shape,
    dumps,
    prompt_scores,
    usage,
)
from mlx_tandem.server.error_reply import JSON_TYPE, error_body
from mlx_tandem.server.front import Front
from mlx_tandem.server.log import log_exception
from mlx_tandem.server.models import Selection
from mlx_tandem.text.output import ChoiceText, TextOptions
from mlx_tandem.types import Delta, Request, SamplingParams, TokenLogprob

EVENTS_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")

MANY_LOGPROBS = 20_000
"""Entries from which on a reply is put together on another thread, so that streams do not wait for it."""


@dataclass(frozen=True)
class Plan:
    """A checked request of a dialect."""

    shape: Shape
    model: Selection
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    n: int
    text: TextOptions
    stream: bool
    with_usage: bool
    priority: int = 0
    echo: tuple[str, ...] | None = None  # the prompts as text, which each reply begins with
    prompt_logprobs: int | None = None  # alternatives to report; None: not asked for
    return_token_ids: bool = False
    collect: Collect | None = None  # what is to become of the choices beside their reply
    version: int | None = None  # of the model, to be named for each token; None: not asked for
    follow: bool = False  # go on under newer versions of the model as they come


class Reply:
    """The common half: admission, submission, text, metrics, cancellation."""

    def __init__(self, front: Front, plan: Plan):
        self._front = front
        self._plan = plan
        self._id = plan.shape.id_prefix + secrets.token_hex(12)
        self._created = int(time.time())
        self._model = front.models.label(plan.model.ref)
        self._prompt_tokens = sum(map(len, plan.prompts))
        self._cached = [0] * len(plan.prompts)  # tokens of each that did not have to be computed
        count = len(plan.prompts) * plan.n
        eos = front.client.check_ready().eos_token_ids
        self._choices = plan.text.choices(count, front.tokenizer, plan.params, eos)
        self._scores: list[tuple[TokenLogprob, ...]] = [()] * len(plan.prompts)
        self._unopened: set[int] = set()  # prompts whose choices have something to say before their own text
        self._recorder: Recorder | None = None
        if plan.collect is not None and front.learning is not None:
            self._recorder = Recorder(front.learning, plan.collect, plan.prompts, plan.n)
        self._shows_tokens = plan.return_token_ids or plan.version is not None
        self._no_details: Details = {"token_ids": ()} if self._shows_tokens else {}
        if plan.version is not None:
            self._no_details["versions"] = ()
        self._has_details = plan.params.logprobs is not None or self._shows_tokens
        self._logprobs: list[LogprobShape] | None = None
        if plan.params.logprobs is not None:
            self._logprobs = [plan.shape.logprobs(front.tokenizer) for _ in range(count)]
        self._began = time.monotonic()
        self._last = 0.0
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front, plan = self._front, self._plan
        with front.admission.admitted(len(self._choices)):
            ids = front.client.next_ids(len(plan.prompts))
            params = plan.params
            if plan.collect is not None and params.logprobs is None:
                params = structs.replace(params, logprobs=0)
            requests = [
                Request(i, tuple(p), params, plan.model.ref, plan.n, plan.priority, plan.follow)
                for i, p in zip(ids, plan.prompts, strict=True)
            ]
            async with front.client.submit(*requests) as stream:
                self._count_start()
                watcher = asyncio.create_task(self._watch(receive, stream))
                self._set_deadlines(stream)
                try:
                    await self._run(stream, send)
                finally:
                    watcher.cancel()
                    for deadline in self._deadlines.values():
                        deadline.cancel()
                    self._count_end()

    async def _run(self, stream: Stream, send: Send) -> None:
        raise NotImplementedError

    async def _watch(self, receive: Receive, stream: Stream) -> None:
        """Cancels the submission when the client leaves, or is cut off because it takes nothing."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        stream.cancel()

    def _set_deadlines(self, stream: Stream) -> None:
        server, loop = self._front.config.server, asyncio.get_running_loop()
        for code, seconds, what in (
            ("first_token_timeout", server.first_token_timeout_s, "its first token"),
            ("request_timeout", server.request_timeout_s, "its end"),
        ):
            if seconds:
                error = Timeout(f"the request did not come to {what} within {seconds:g} s", code=code)
                self._deadlines[code] = loop.call_later(seconds, stream.fail, error)

    def _client_left(self) -> bool:
        return self._gone

    def _push(self, choice: ChoiceText, index: int, delta: Delta) -> str:
        """The new text of a choice."""
        self._cached[index // self._plan.n] = delta.cached
        text = choice.push(delta)
        if self._recorder is not None:
            self._recorder.take(index, text, choice, self._version(delta))
        return text

    def _version(self, delta: Delta) -> int:
        return delta.version or self._plan.version or 0

    async def _outcomes(self) -> list[Outcome]:
        """What becomes of the choices, which have all ended: nothing to say, or something of each."""
        if self._recorder is None or any(c.finish is None for c in self._choices):
            return []
        return await self._recorder.close()

    def _details(self, index: int, said: Said, *, echoed: bool = False) -> Details:
        """What was asked for of these tokens beside their text; `echoed`: the prompt's logprobs come before theirs."""
        details: Details = {}
        if self._logprobs is not None:
            before, known = self._echoed(index // self._plan.n) if echoed else ([], [])
            details["logprobs"] = self._logprobs[index].take([*before, *said.tokens], [*known, *said.logprobs])
        if self._shows_tokens:
            details["token_ids"] = said.tokens
        if self._plan.version is not None:
            details["versions"] = said.versions
        return details

    def _prompt_details(self, k: int) -> Details:
        """What was asked for of prompt k."""
        plan = self._plan
        details: Details = {}
        if plan.return_token_ids:
            details["prompt_token_ids"] = plan.prompts[k]
        if plan.prompt_logprobs is not None:
            scores = prompt_scores(self._front.tokenizer, plan.prompts[k], self._scores[k], plan.prompt_logprobs)
            details["prompt_logprobs"] = scores
        return details

    def _echoed(self, k: int) -> tuple[Sequence[int], list[TokenLogprob | None]]:
        """Prompt k and its logprobs as a reply that repeats it shows them."""
        most = self._plan.params.logprobs or 0
        return self._plan.prompts[k], [None, *(structs.replace(lp, top=lp.top[:most]) for lp in self._scores[k])]

    def _usage(self) -> dict[str, Any]:
        return usage(self._prompt_tokens, self._completion_tokens(), sum(self._cached))

    def _headers(self, kind: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        return [kind, (b"x-request-id", self._id.encode()), (b"cache-control", b"no-cache")]

    def _completion_tokens(self) -> int:
        return sum(c.count for c in self._choices)

    # -- metrics ------------------------------------------------------------------------------------------------

    def _count_start(self) -> None:
        self._front.metrics.prompt_tokens[self._name()] += self._prompt_tokens
        for counters in self._plan.model.counters:
            counters.requests += 1
            counters.open += 1
            counters.prompt_tokens += self._prompt_tokens

    def _count_batch(self, deltas: list[Delta]) -> None:
        now = time.monotonic()
        metrics = self._front.metrics
        if self._last:
            # Several choices advance in one step: the time between their tokens is that between steps.
            metrics.inter_token.observe((now - self._last) * len(self._choices) / len(deltas), len(deltas))
        else:
            metrics.time_to_first_token.observe(now - self._began)
            if deadline := self._deadlines.pop("first_token_timeout", None):
                deadline.cancel()
        self._last = now

    def _count_end(self) -> None:
        metrics, name = self._front.metrics, self._name()
        tokens, seconds = self._completion_tokens(), time.monotonic() - self._began
        metrics.generation_tokens[name] += tokens
        metrics.end_to_end.observe(seconds)
        for choice in self._choices:
            metrics.finished[name, choice.finish or ("abort" if self._gone else "error")] += 1
        for counters in self._plan.model.counters:
            counters.open -= 1
            counters.generated_tokens += tokens
            counters.seconds += seconds
            counters.errors += not self._gone and any(c.finish is None for c in self._choices)

    def _name(self) -> str:
        entry = self._plan.model.entry
        return self._front.models.id if entry is None else entry.name


class WholeReply(Reply):
    """One JSON body when everything is there."""

    async def _run(self, stream: Stream, send: Send) -> None:
        n = self._plan.n
        texts: list[list[str]] = [[] for _ in self._choices]
        said = [Said() for _ in self._choices]
        async for deltas in stream:
            self._count_batch(deltas)
            for delta in deltas:
                index = stream.index(delta)
                choice = self._choices[index]
                if delta.prompt_logprobs:
                    self._scores[index // n] = delta.prompt_logprobs
                if choice.ended():
                    continue
                texts[index].append(self._push(choice, index, delta))
                if self._has_details:
                    said[index].add(choice, self._version(delta))
                if choice.stopped:
                    stream.cancel(index)
        if self._client_left():
            return
        outcomes = await self._outcomes()
        if sum(map(len, self._scores)) * (1 + (self._plan.params.prompt_logprobs or 0)) < MANY_LOGPROBS:
            body = self._body(texts, said, outcomes)
        else:
            body = await asyncio.to_thread(self._body, texts, said, outcomes)
        headers = [*self._headers(JSON_TYPE), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _body(self, texts: list[list[str]], said: list[Said], outcomes: list[Outcome]) -> bytes:
        plan, shape = self._plan, self._plan.shape
        details = [self._prompt_details(k) for k in range(len(plan.prompts))]
        choices: list[dict[str, Any]] = []
        for i, choice in enumerate(self._choices):
            if choice.finish is None:
                raise EngineError("the engine ended a choice without a reason")
            k, text = i // plan.n, "".join(texts[i])
            if plan.echo is not None:
                text = plan.echo[k] + text
            own = self._details(i, said[i], echoed=plan.echo is not None)
            if outcomes:
                own |= outcomes[i]
            whole = shape.whole(i, text, choice.finish) | own
            choices.append(whole if shape.one_prompt else whole | details[k])
        body = {
            "id": self._id,
            "object": shape.object,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": self._usage(),
        }
        return dumps(body | details[0] if shape.one_prompt else body)


class StreamReply(Reply):
    """Server-sent events, one per delta; those that waited for a slow reader go out in one write.

    The status line waits for the first delta, so that what fails before it is an HTTP error like any other.
    """

    async def _run(self, stream: Stream, send: Send) -> None:
        plan = self._plan
        events = Events(plan.shape, self._id, self._created, self._model, len(self._choices), plan.with_usage)
        if not plan.shape.one_prompt and (plan.echo is not None or plan.return_token_ids):
            self._unopened = set(range(len(plan.prompts)))
        started = False
        try:
            async for deltas in stream:
                self._count_batch(deltas)
                body = self._render(events, stream, deltas)
                if not started:
                    started = True
                    headers = self._headers(EVENTS_TYPE)
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    body = events.opening(self._prompt_details(0)) + body
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if self._client_left():
                return
            outcomes = await self._outcomes()
        except Exception as e:
            if not started:
                raise
            if not isinstance(e, TandemError):
                log_exception("a stream failed", e, request=self._id)
                e = EngineError(f"internal error in request {self._id}", code="internal_error")
            self._front.metrics.errors[str(e.code)] += 1
            await send({"type": "http.response.body", "body": b"data: " + error_body(e) + b"\n\n"})
            return
        tail = events.outcomes(outcomes) if outcomes else b""
        if plan.with_usage:
            tail += events.usage(self._usage())
        await send({"type": "http.response.body", "body": tail + DONE})

    def _render(self, events: Events, stream: Stream, deltas: list[Delta]) -> bytes:
        parts: list[bytes] = []
        for delta in deltas:
            index = stream.index(delta)
            choice = self._choices[index]
            if self._unopened:
                parts += self._open(events, index // self._plan.n, delta)
            if choice.ended():
                continue
            text = self._push(choice, index, delta)
            details = self._no_details
            if self._has_details:
                said = Said()
                said.add(choice, self._version(delta))
                details = self._details(index, said)
            if text or not choice.ended():
                if details:
                    parts.append(events.text_with(index, text, details))
                    details = self._no_details
                else:
                    parts.append(events.text(index, text))
            if choice.ended():
                parts.append(events.finish(index, choice, details))
                if choice.stopped:
                    stream.cancel(index)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _open(self, events: Events, k: int, delta: Delta) -> list[bytes]:
        """What the choices of prompt k say before their own text; `delta` is of one of them."""
        if k not in self._unopened:
            return []
        plan, own = self._plan, self._prompt_details(k)
        self._unopened.discard(k)
        self._scores[k] = delta.prompt_logprobs
        choices = range(k * plan.n, (k + 1) * plan.n)
        if plan.echo is None:
            return [events.text_with(i, "", self._no_details | own) for i in choices]
        return [events.text_with(i, plan.echo[k], self._details(i, Said(), echoed=True) | own) for i in choices]
