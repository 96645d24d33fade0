"""The reply that is a stream of server-sent events."""

from __future__ import annotations

from starlette.types import Send

from mlx_tandem.dialects.shapes import DONE, Details, Events
from mlx_tandem.engine.stream import Stream
from mlx_tandem.errors import EngineError, TandemError
from mlx_tandem.log import log_exception
from mlx_tandem.server.error_reply import error_body
from mlx_tandem.server.replies import Plan, Reply
from mlx_tandem.training.live.front import ServerFront
from mlx_tandem.training.live.recorder import Said
from mlx_tandem.types import Delta

EVENTS_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")


class StreamReply(Reply):
    """Server-sent events, one per delta; those that waited for a slow reader go out in one write.

    The status line waits for the first delta, so that what fails before it is an HTTP error like any other.
    """

    def __init__(self, front: ServerFront, plan: Plan):
        super().__init__(front, plan)
        self._with_usage = plan.with_usage or front.config.server.force_include_usage
        self._no_details: Details = {"token_ids": ()} if self._shows_tokens else {}
        if plan.version is not None:
            self._no_details["versions"] = ()
        self._unopened: set[int] = set()  # prompts whose choices have something to say before their own text
        if plan.echo is not None or (plan.return_token_ids and not plan.shape.one_prompt):
            self._unopened.update(range(len(plan.prompts)))

    async def _run(self, stream: Stream, send: Send) -> None:
        plan = self._plan
        names = (self._id, self._created, self._model, self._fingerprint)
        events = Events(plan.shape, names, len(self._choices), self._with_usage)
        started = False
        if plan.always_usage:
            events.count(self._usage())
        try:
            async for deltas in stream:
                self._count_batch(deltas)
                opening = b"" if started else events.opening(self._prompt_details(0))
                body = opening + self._render(events, stream, deltas)
                if not started:
                    started = True
                    headers = self._headers(EVENTS_TYPE)
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if self._client_left():
                return
            outcomes = await self._outcomes()
        except Exception as e:
            if not started:
                raise
            if not isinstance(e, TandemError):
                log_exception("a stream failed", e, request=self._request)
                e = EngineError(f"internal error in request {self._request}", code="internal_error")
            self._front.metrics.count_error(e, in_stream=True)
            await send({"type": "http.response.body", "body": b"data: " + error_body(e) + b"\n\n"})
            return
        tail = events.outcomes(outcomes) if outcomes else b""
        if self._with_usage:
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
            if self._plan.always_usage:
                events.count(self._usage())
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
        plan = self._plan
        own = {} if plan.shape.one_prompt else self._prompt_details(k)
        self._unopened.discard(k)
        self._scores[k] = delta.prompt_logprobs
        choices = range(k * plan.n, (k + 1) * plan.n)
        if plan.echo is None:
            return [events.text_with(i, "", self._no_details | own) for i in choices]
        if plan.shape.one_prompt:
            return [events.text_with(i, plan.echo[k], self._no_details) for i in choices]
        return [events.text_with(i, plan.echo[k], self._details(i, Said(), echoed=True) | own) for i in choices]
