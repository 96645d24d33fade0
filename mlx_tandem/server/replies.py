"""Running a submission for an HTTP client: whole replies and event streams.

Both are ASGI responses that loop over the engine's deltas themselves. A client that goes away is noticed while
nothing is being sent, too, and its request is cancelled in the engine at once.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from mlx_tandem.adapters.registry import Entry
from mlx_tandem.engine.stream import Stream
from mlx_tandem.errors import EngineError, TandemError
from mlx_tandem.server.dialects.shapes import DONE, Events, LogprobShape, Shape, dumps, usage
from mlx_tandem.server.front import Front
from mlx_tandem.server.log import log, log_exception
from mlx_tandem.text.output import ChoiceText
from mlx_tandem.types import Delta, Request, SamplingParams

WRITE_SECONDS = 60.0
"""How long a client may take nothing of what is sent to it before its request is given up."""

JSON_TYPE = (b"content-type", b"application/json")
EVENTS_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")


@dataclass(frozen=True)
class Plan:
    """A checked request of a dialect."""

    shape: Shape
    adapter: Entry | None
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    n: int
    stops: tuple[str, ...]
    stream: bool
    with_usage: bool


class Reply:
    """The common half: admission, submission, text, metrics, cancellation."""

    def __init__(self, front: Front, plan: Plan):
        self._front = front
        self._plan = plan
        self._id = plan.shape.id_prefix + secrets.token_hex(12)
        self._created = int(time.time())
        self._model = front.label(plan.adapter.ref if plan.adapter else None)
        self._prompt_tokens = sum(map(len, plan.prompts))
        ends = self._ends()
        count = len(plan.prompts) * plan.n
        self._choices = [ChoiceText(front.tokenizer, plan.stops, ends) for _ in range(count)]
        self._logprobs: list[LogprobShape] | None = None
        if plan.params.logprobs is not None:
            self._logprobs = [plan.shape.logprobs(front.tokenizer) for _ in range(count)]
        self._began = time.monotonic()
        self._last = 0.0
        self._sending = 0.0  # since when a write has been waiting for the client
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front, plan = self._front, self._plan
        with front.admitted(len(self._choices)):
            ids = front.client.next_ids(len(plan.prompts))
            adapter = plan.adapter.ref if plan.adapter else None
            requests = [
                Request(i, tuple(p), plan.params, adapter, plan.n) for i, p in zip(ids, plan.prompts, strict=True)
            ]
            async with front.client.submit(*requests) as stream:
                self._count_start()
                watcher = asyncio.create_task(self._watch(receive, stream, asyncio.current_task()))
                try:
                    await self._run(stream, send)
                except asyncio.CancelledError:
                    if not self._client_left():
                        raise
                    log("client too slow", request=self._id)
                finally:
                    watcher.cancel()
                    self._count_end()

    async def _run(self, stream: Stream, send: Send) -> None:
        raise NotImplementedError

    async def _watch(self, receive: Receive, stream: Stream, reader: asyncio.Task[Any] | None) -> None:
        """Cancels the submission when the client leaves, or takes nothing for WRITE_SECONDS."""
        while True:
            try:
                async with asyncio.timeout(WRITE_SECONDS / 4):
                    message = await receive()
            except TimeoutError:
                if not self._sending or time.monotonic() - self._sending < WRITE_SECONDS:
                    continue
                assert reader is not None
                reader.cancel()  # it waits for the client
                break
            if message["type"] == "http.disconnect":
                break
        self._gone = True
        stream.cancel()

    def _client_left(self) -> bool:
        return self._gone

    def _ends(self) -> Collection[int]:
        params = self._plan.params
        model = () if params.ignore_eos else self._front.client.check_ready().eos_token_ids
        return frozenset((*model, *params.stop_token_ids))

    def _headers(self, kind: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        return [kind, (b"x-request-id", self._id.encode()), (b"cache-control", b"no-cache")]

    def _completion_tokens(self) -> int:
        return sum(c.count for c in self._choices)

    # -- metrics ------------------------------------------------------------------------------------------------

    def _count_start(self) -> None:
        entry = self._plan.adapter
        self._front.metrics.prompt_tokens[self._name()] += self._prompt_tokens
        if entry is not None:
            entry.counters.requests += 1
            entry.counters.prompt_tokens += self._prompt_tokens

    def _count_batch(self, deltas: list[Delta]) -> None:
        now = time.monotonic()
        metrics = self._front.metrics
        if self._last:
            # Several choices advance in one step: the time between their tokens is that between steps.
            metrics.inter_token.observe((now - self._last) * len(self._choices) / len(deltas), len(deltas))
        else:
            metrics.time_to_first_token.observe(now - self._began)
        self._last = now

    def _count_end(self) -> None:
        metrics, entry, name = self._front.metrics, self._plan.adapter, self._name()
        tokens = self._completion_tokens()
        metrics.generation_tokens[name] += tokens
        metrics.end_to_end.observe(time.monotonic() - self._began)
        for choice in self._choices:
            metrics.finished[name, choice.finish or ("abort" if self._gone else "error")] += 1
        if entry is not None:
            entry.counters.generated_tokens += tokens
            entry.counters.errors += not self._gone and any(c.finish is None for c in self._choices)

    def _name(self) -> str:
        return self._plan.adapter.name if self._plan.adapter else self._front.model_id


class WholeReply(Reply):
    """One JSON body when everything is there."""

    async def _run(self, stream: Stream, send: Send) -> None:
        texts: list[list[str]] = [[] for _ in self._choices]
        logprobs: list[tuple[list[int], list[Any]]] = [([], []) for _ in self._choices]
        async for deltas in stream:
            self._count_batch(deltas)
            for delta in deltas:
                index = stream.index(delta)
                choice = self._choices[index]
                if choice.ended():
                    continue
                texts[index].append(choice.push(delta))
                if self._logprobs is not None:
                    logprobs[index][0].extend(choice.last_tokens)
                    logprobs[index][1].extend(choice.last_logprobs)
                if choice.stopped:
                    stream.cancel(index)
        if self._client_left():
            return
        shape = self._plan.shape
        choices: list[dict[str, Any]] = []
        for i, choice in enumerate(self._choices):
            if choice.finish is None:
                raise EngineError("the engine ended a choice without a reason")
            taken = self._logprobs[i].take(*logprobs[i]) if self._logprobs is not None else None
            choices.append(shape.whole(i, "".join(texts[i]), taken, choice.finish))
        body = dumps(
            {
                "id": self._id,
                "object": shape.object,
                "created": self._created,
                "model": self._model,
                "choices": choices,
                "usage": usage(self._prompt_tokens, self._completion_tokens()),
            }
        )
        headers = [*self._headers(JSON_TYPE), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class StreamReply(Reply):
    """Server-sent events, one per delta; those that waited for a slow reader go out in one write.

    The status line waits for the first delta, so that what fails before it is an HTTP error like any other.
    """

    async def _run(self, stream: Stream, send: Send) -> None:
        plan = self._plan
        events = Events(plan.shape, self._id, self._created, self._model, len(self._choices), plan.with_usage)
        started = False
        try:
            async for deltas in stream:
                self._count_batch(deltas)
                body = self._render(events, stream, deltas)
                if not started:
                    started = True
                    headers = self._headers(EVENTS_TYPE)
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    body = events.opening() + body
                self._sending = self._last
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._sending = 0.0
        except Exception as e:
            if not started:
                raise
            if not isinstance(e, TandemError):
                log_exception("a stream failed", e, request=self._id)
                e = EngineError(f"internal error in request {self._id}", code="internal_error")
            self._front.metrics.errors[str(e.code)] += 1
            await send({"type": "http.response.body", "body": b"data: " + error_body(e) + b"\n\n"})
            return
        if self._client_left():
            return
        tail = events.usage(self._prompt_tokens, self._completion_tokens()) + DONE if plan.with_usage else DONE
        await send({"type": "http.response.body", "body": tail})

    def _render(self, events: Events, stream: Stream, deltas: list[Delta]) -> bytes:
        parts: list[bytes] = []
        for delta in deltas:
            index = stream.index(delta)
            choice = self._choices[index]
            if choice.ended():
                continue
            text = choice.push(delta)
            logprobs = None
            if self._logprobs is not None:
                logprobs = self._logprobs[index].take(choice.last_tokens, choice.last_logprobs)
            if text or not choice.ended():
                if logprobs is None:
                    parts.append(events.text(index, text))
                else:
                    parts.append(events.text_with_logprobs(index, text, logprobs))
                    logprobs = None
            if choice.ended():
                parts.append(events.finish(index, choice, logprobs))
                if choice.stopped:
                    stream.cancel(index)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def error_body(error: TandemError) -> bytes:
    """OpenAI's error object."""
    return dumps({"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}})


class ErrorReply:
    """An error as an HTTP response."""

    def __init__(self, error: TandemError, headers: Sequence[tuple[bytes, bytes]] = ()):
        self.status = error.status
        self._body = error_body(error)
        self._headers = [JSON_TYPE, (b"content-length", b"%d" % len(self._body)), *headers]
        if error.retry_after is not None:
            self._headers.append((b"retry-after", b"%d" % min(math.ceil(error.retry_after), 120)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body})
