"""Replies that are streams of server-sent events."""

from __future__ import annotations

from starlette.types import Send

from mlx_tandem.engine.client.stream import Stream
from mlx_tandem.errors import EngineError, TandemError
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.assembler import Assembler
from mlx_tandem.log import log_exception
from mlx_tandem.server.replies import Reply


class StreamReply(Reply):
    """A stream with at least one event for each delta. Events that waited for a slow reader are written together.

    The status line waits for the first delta, so that an earlier failure becomes an ordinary HTTP error.
    """

    async def _run(self, stream: Stream, assembler: Assembler, send: Send) -> None:
        prompted, renderer = self._plan.prompted, self._plan.renderer
        methods, count, push, recorder = renderer.methods(), self._count_batch, assembler.push, self._recorder
        answers = Answers(len(prompted.prompts), prompted.choices)  # for the recorder
        started = False
        try:
            async for deltas in stream:
                count(deltas)
                events = push(deltas)
                if recorder is not None:
                    answers.add(events)
                if started and len(events) == 1:  # Fast path of almost every token.
                    body = methods[type(events[0])](events[0])
                else:
                    opening = b"" if started else renderer.open()
                    body = opening + b"".join([methods[type(event)](event) for event in events])
                if not started:
                    started = True
                    headers = self._headers((b"content-type", renderer.media))
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if self._gone:
                return
            outcomes = await self._outcomes(answers)
            renderer.times = self._times(stream)
        except Exception as e:
            if not started:
                raise
            if not isinstance(e, TandemError):
                log_exception("a stream failed", e, request=self._request_id)
                e = EngineError(f"internal error in request {self._request_id}", code="internal_error")
            self._front.metrics.count_error(e, in_stream=True)
            await send({"type": "http.response.body", "body": renderer.error(e)})
            return
        await send({"type": "http.response.body", "body": renderer.close(assembler.usage(), outcomes)})
