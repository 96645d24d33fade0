"""Running a submission for an HTTP client, which whole replies and event streams have in common.

Both are ASGI responses that loop over the engine's deltas. They notice a client that leaves even while nothing is being
sent, and then cancel its request in the engine at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.plan import Plan
from mlx_tandem.engine.client.stream import Stream
from mlx_tandem.engine.prompt_cost import prompt_seconds
from mlx_tandem.errors import Timeout
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.assembler import Assembler
from mlx_tandem.generation.caller import CALLER
from mlx_tandem.log import log_request, requests_are_logged
from mlx_tandem.server.request_id import request_id
from mlx_tandem.training.live.recorder import Outcome, Recorder
from mlx_tandem.types import Delta


class Reply:
    """The common base of replies, which does their admission, submission, metrics and cancellation."""

    def __init__(self, front: ServerFront, plan: Plan):
        """Prepare the reply; the request is admitted and submitted when the response is called."""
        self._front = front
        self._plan = plan
        self._reply_id = plan.renderer.id
        self._request_id = self._reply_id  # until the request's headers are known, which may have an id of the client
        self._choices = plan.prompted.choices
        self._caller = CALLER.get()
        self._recorder: Recorder | None = None
        self._judged = front.ab_tests.judged(plan.model)
        collecting = None if plan.collect is None else front.collector(plan.collect.adapter)
        if plan.collect is not None and collecting is not None:
            self._recorder = Recorder(
                collecting, plan.collect, plan.prompted.prompts, plan.prompted.n, self._count_scores
            )
        self._began = time.monotonic()
        self._observe = front.metrics.inter_token.observe
        # When the first and the last token were read from the stream, in seconds of the monotonic clock.
        self._first = self._last = 0.0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit and submit the request, send the reply, and count both."""
        front, prompted = self._front, self._plan.prompted
        self._request_id = request_id(scope, self._reply_id)
        most = prompted.prompt_tokens + self._choices * prompted.params.max_tokens
        with front.request_admission.admitted(self._choices, prompted.array_bytes), self._caller.tokens(most):
            async with front.client.submit(*prompted.requests(front.client)) as stream:
                front.idling.keep(self._plan.keep_alive)
                assembler = front.assembler(prompted, stream)
                self._count_start()
                watcher = asyncio.create_task(self._watch(receive, stream))
                self._set_deadlines(stream)
                try:
                    await self._run(stream, assembler, send)
                finally:
                    watcher.cancel()
                    for timer in self._timers.values():
                        timer.cancel()
                    self._count_end(stream, assembler)

    async def _run(self, stream: Stream, assembler: Assembler, send: Send) -> None:
        """Read the stream to its end and send the reply."""
        raise NotImplementedError

    async def _watch(self, receive: Receive, stream: Stream) -> None:
        """Cancel the submission when the client leaves, or is cut off because it receives nothing."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        stream.cancel()

    def _set_deadlines(self, stream: Stream) -> None:
        """Start the timers that fail the stream when its first token or its end takes too long."""
        server, loop = self._front.config.server, asyncio.get_running_loop()
        first = server.first_token_timeout_s and server.first_token_timeout_s + self._reading_seconds()
        for code, seconds, what in (
            ("first_token_timeout", first, "its first token"),
            ("request_timeout", server.request_timeout_s, "its end"),
        ):
            if seconds:
                self._timers[code] = loop.call_later(seconds, _fail_late, stream, code, what, seconds)

    def _reading_seconds(self) -> float:
        """Return the seconds that reading the prompts may take: twice the prediction, as others are read meanwhile."""
        info = self._front.client.check_ready()
        chunk = info.memory.chunk_tokens or len(self._plan.prompted.prompts[0])
        return 2 * sum(prompt_seconds(info.prompt_cost, len(prompt), chunk) for prompt in self._plan.prompted.prompts)

    def _client_left(self) -> bool:
        return self._gone

    async def _outcomes(self, answers: Answers) -> list[Outcome]:
        """Return the outcome of each choice for learning; [] if learning has nothing to do with the request."""
        if self._recorder is None or any(answer.finish is None for answer in answers.choices):
            return []
        return await self._recorder.record(answers.choices)

    def _remember(self, assembler: Assembler) -> None:
        """Remember the completion, which has ended, so that feedback on it can come."""
        prompted, completions = self._plan.prompted, self._front.completions
        if not completions.is_on or prompted.text.silent or prompted.pooling is not None or prompted.images:
            return
        if None not in assembler.reasons:
            tokens, ref = assembler.tokens, self._plan.model.ref
            completions.remember(self._reply_id, ref, prompted.prompts, tokens, self._judged, self._caller.tenant)

    async def _count_scores(self, scores: Sequence[float | None]) -> None:
        """Count the scores of the choices in the A/B test of the alias that was asked."""
        if self._judged is not None:
            await self._front.ab_tests.count_in_background(self._judged, scores)

    def _times(self, stream: Stream) -> tuple[float, float]:
        """Return the seconds until the engine reported the first token, and from there to the last."""
        return stream.first_token_at - self._began, stream.last_token_at - stream.first_token_at

    def _headers(self, *own: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Return the headers of a reply, of which `own` are those of its kind."""
        return [*own, (b"cache-control", b"no-cache")]

    # -- metrics ------------------------------------------------------------------------------------------------

    def _count_start(self) -> None:
        """Count the request and its prompts, at its start."""
        tokens = self._plan.prompted.prompt_tokens
        self._front.metrics.prompt_tokens[self._name()] += tokens
        self._caller.use.prompt_tokens += tokens
        for counters in self._plan.model.counters:
            counters.requests += 1
            counters.open += 1
            counters.prompt_tokens += tokens

    def _count_batch(self, deltas: list[Delta]) -> None:
        """Count the time until these deltas. The first ones stop the timer of the first token."""
        now = time.monotonic()
        if self._last:
            # All choices advance in one step, so the time between two tokens of a choice is that between two steps.
            count = len(deltas)
            self._observe((now - self._last) * self._choices / count, count)
        else:
            self._first = now
            self._front.metrics.time_to_first_token.observe(now - self._began)
            if deadline := self._timers.pop("first_token_timeout", None):
                deadline.cancel()
        self._last = now

    def _count_end(self, stream: Stream, assembler: Assembler) -> None:
        """Count and log the request, at its end."""
        metrics, name, prompted = self._front.metrics, self._name(), self._plan.prompted
        counts, reasons, seconds = assembler.counts, assembler.reasons, time.monotonic() - self._began
        tokens = sum(counts)
        metrics.generation_tokens[name] += tokens
        self._caller.use.generated_tokens += tokens
        if requests_are_logged():
            first, later = self._times(stream) if stream.first_token_at else (None, 0.0)
            log_request(
                "request ended",
                request=self._request_id,
                id=self._reply_id,
                key=self._caller.name or None,
                model=self._front.models.label(self._plan.model.ref),
                outcome="ok" if None not in reasons else "client left" if self._gone else "failed",
                prompt_tokens=prompted.prompt_tokens,
                tokens=tokens,
                seconds=round(seconds, 3),
                first_token_ms=None if first is None else round(first * 1e3, 1),
                tokens_per_second=round((tokens - self._choices) / later, 1) if later and tokens else None,
                finish=reasons,
            )
        for reason in reasons:
            metrics.finished[name, reason or ("abort" if self._gone else "error")] += 1
        if self._last and None not in reasons:
            metrics.end_to_end.observe(seconds)
            metrics.finish(
                [len(prompt) for prompt in prompted.prompts],
                counts,
                max_tokens=prompted.params.max_tokens,
                n=prompted.n,
                preemptions=stream.preemptions,
                times=(self._began, stream.started, self._first, self._last),
            )
        for counters in self._plan.model.counters:
            counters.open -= 1
            counters.generated_tokens += tokens
            counters.seconds += seconds
            counters.errors += not self._gone and None in reasons

    def _name(self) -> str:
        """Return the model's name for counters, without a version."""
        entry = self._plan.model.entry
        return self._front.models.id if entry is None else entry.name


def _fail_late(stream: Stream, code: str, what: str, seconds: float) -> None:
    """End a stream whose time is over."""
    stream.fail(Timeout(f"the request did not come to {what} within {seconds:g} s", code=code))
