"""Replies that are streams of server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Send

from mlx_tandem.engine.client.stream import Stream
from mlx_tandem.errors import EngineError, TandemError
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.assembler import Assembler
from mlx_tandem.log import log_exception
from mlx_tandem.server.replies import Reply

T = TypeVar("T")

_UNBUFFERED = (b"x-accel-buffering", b"no")
"""The header that asks nginx to pass each event on at once."""


class StreamReply(Reply):
    """A stream with at least one event for each delta. Events that waited for a slow reader are written together.

    The status line and the dialect's first events are sent when the engine has accepted the request, before its prompt
    is read. So a refusal is an ordinary HTTP error, and a later failure is the last event of the stream. While there is
    nothing to send, the stream carries the dialect's bytes that mean nothing, at least every `stream_keepalive_s`
    seconds. If the engine does not accept the request within this time, for example because it is reading the adapter,
    the stream begins anyway.
    """

    _sent = 0.0  # when something was sent last, in seconds of the monotonic clock

    async def _run(self, stream: Stream, assembler: Assembler, send: Send) -> None:
        prompted, renderer = self._plan.prompted, self._plan.renderer
        methods, count, push, recorder = renderer.methods(), self._count_batch, assembler.push, self._recorder
        answers = Answers(len(prompted.prompts), prompted.choices)  # for the recorder
        self._keep_alive(stream)
        await stream.accepted()
        if self._client_left():
            return
        headers = self._headers((b"content-type", renderer.media), _UNBUFFERED)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await send({"type": "http.response.body", "body": renderer.open(), "more_body": True})
            async for deltas in stream:
                if not deltas:
                    await self._fill(send)
                    continue
                count(deltas)
                events = push(deltas)
                if recorder is not None:
                    answers.add(events)
                if len(events) == 1:  # Fast path of almost every token.
                    body = methods[type(events[0])](events[0])
                else:
                    body = b"".join([methods[type(event)](event) for event in events])
                if body:
                    self._sent = self._last
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            if self._gone:
                return
            outcomes = [] if recorder is None else await self._filling(self._outcomes(answers), send)
            renderer.times = self._times(stream)
            self._remember(assembler)
        except Exception as e:
            if not isinstance(e, TandemError):
                log_exception("a stream failed", e, request=self._request_id)
                e = EngineError(f"internal error in request {self._request_id}", code="internal_error")
            self._front.metrics.count_error(e, in_stream=True)
            await send({"type": "http.response.body", "body": renderer.error(e)})
            return
        await send({"type": "http.response.body", "body": renderer.close(assembler.usage(), outcomes)})

    def _keep_alive(self, stream: Stream) -> None:
        """Start the timer that nudges the reader of `stream` whenever nothing has been sent for too long."""
        seconds, loop = self._front.config.server.stream_keepalive_s, asyncio.get_running_loop()

        def look() -> None:
            left = self._sent + seconds - time.monotonic()
            if left <= 0:
                stream.nudge()
                left = seconds
            self._timers["keepalive"] = loop.call_later(left, look)

        self._sent = time.monotonic()
        if seconds:
            look()

    async def _fill(self, send: Send) -> None:
        """Send the bytes that mean nothing, if the dialect has any."""
        self._sent = time.monotonic()
        if body := self._plan.renderer.keepalive:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _filling(self, result: Coroutine[Any, Any, T], send: Send) -> T:
        """Return the result of a coroutine, and send bytes that mean nothing while it takes long."""
        seconds = self._front.config.server.stream_keepalive_s or None
        task = asyncio.create_task(result)
        try:
            while not (await asyncio.wait({task}, timeout=seconds))[0]:
                await self._fill(send)
            return task.result()
        finally:
            task.cancel()
