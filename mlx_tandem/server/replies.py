"""Running a submission for an HTTP client: what whole replies and event streams have in common.

Both are ASGI responses that loop over the engine's deltas themselves. A client that goes away is noticed while
nothing is being sent, too, and its request is cancelled in the engine at once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs
from starlette.types import Receive, Scope, Send

from mlx_tandem.dialects.shapes import Details, LogprobShape, Shape, prompt_scores, usage
from mlx_tandem.engine.cost import prompt_seconds
from mlx_tandem.engine.stream import Stream
from mlx_tandem.errors import Timeout
from mlx_tandem.generation.model_names import Selection
from mlx_tandem.generation.output import ChoiceText, TextOptions
from mlx_tandem.log import log
from mlx_tandem.server.error_reply import JSON_TYPE
from mlx_tandem.server.request_id import request_id
from mlx_tandem.training.live.front import ServerFront
from mlx_tandem.training.live.recorder import Collect, Outcome, Recorder, Said
from mlx_tandem.types import Delta, Request, SamplingParams, TokenLogprob


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
    always_usage: bool = False  # usage in every event
    echo: tuple[str, ...] | None = None  # for each prompt the text that its replies begin with
    prompt_logprobs: int | None = None  # alternatives to report; None: not asked for
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # logprobs name tokens by their ids
    collect: Collect | None = None  # what is to become of the choices beside their reply
    version: int | None = None  # of the model, to be named for each token; None: not asked for
    follow: bool = False  # go on under newer versions of the model as they come


class Reply:
    """The common half: admission, submission, text, metrics, cancellation."""

    def __init__(self, front: ServerFront, plan: Plan):
        self._front = front
        self._plan = plan
        self._id = plan.shape.id_prefix + secrets.token_hex(12)
        self._request = self._id  # unless the client has one of its own
        self._created = int(time.time())
        self._model = front.models.label(plan.model.ref)
        # What is drawn under several versions depends on when they came.
        self._fingerprint = None if plan.follow else front.fingerprints.of(plan.model.ref)
        self._prompt_tokens = sum(map(len, plan.prompts))
        self._cached = [0] * len(plan.prompts)  # tokens of each that did not have to be computed
        count = len(plan.prompts) * plan.n
        eos = front.client.check_ready().eos_token_ids
        self._choices = plan.text.choices(count, front.tokenizer, plan.params, eos)
        self._scores: list[tuple[TokenLogprob, ...]] = [()] * len(plan.prompts)
        self._recorder: Recorder | None = None
        if plan.collect is not None and front.learning is not None:
            self._recorder = Recorder(front.learning, plan.collect, plan.prompts, plan.n)
        self._shows_tokens = plan.return_token_ids or plan.version is not None
        self._has_details = plan.params.logprobs is not None or self._shows_tokens
        self._logprobs: list[LogprobShape] | None = None
        if plan.params.logprobs is not None:
            self._logprobs = [plan.shape.logprobs(front.tokenizer, plan.tokens_as_ids) for _ in range(count)]
        self._began = time.monotonic()
        self._first = self._last = 0.0  # when the first and the last token came
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front, plan = self._front, self._plan
        self._request = request_id(scope, self._id)
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
                    self._count_end(stream)

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
        first = server.first_token_timeout_s and server.first_token_timeout_s + self._reading_seconds()
        for code, seconds, what in (
            ("first_token_timeout", first, "its first token"),
            ("request_timeout", server.request_timeout_s, "its end"),
        ):
            if seconds:
                error = Timeout(f"the request did not come to {what} within {seconds:g} s", code=code)
                self._deadlines[code] = loop.call_later(seconds, stream.fail, error)

    def _reading_seconds(self) -> float:
        """Return the time that these prompts may take to be read: twice what was predicted, as others are read, too."""
        info = self._front.client.check_ready()
        chunk = info.memory.chunk_tokens or len(self._plan.prompts[0])
        return 2 * sum(prompt_seconds(info.prompt_cost, len(prompt), chunk) for prompt in self._plan.prompts)

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
        return [kind, (b"cache-control", b"no-cache")]

    async def _send_body(self, send: Send, body: bytes) -> None:
        """Send the whole reply, which is JSON."""
        headers = [*self._headers(JSON_TYPE), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

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
            self._first = now
            metrics.time_to_first_token.observe(now - self._began)
            if deadline := self._deadlines.pop("first_token_timeout", None):
                deadline.cancel()
        self._last = now

    def _count_end(self, stream: Stream) -> None:
        metrics, name = self._front.metrics, self._name()
        tokens, seconds = self._completion_tokens(), time.monotonic() - self._began
        metrics.generation_tokens[name] += tokens
        log(
            "request ended",
            logging.DEBUG,
            request=self._request,
            id=self._id,
            model=self._model,
            prompt_tokens=self._prompt_tokens,
            tokens=tokens,
            seconds=round(seconds, 3),
            finish=[choice.finish for choice in self._choices],
        )
        metrics.end_to_end.observe(seconds)
        for choice in self._choices:
            metrics.finished[name, choice.finish or ("abort" if self._gone else "error")] += 1
        if self._last and all(choice.finish is not None for choice in self._choices):
            metrics.finish(
                [len(prompt) for prompt in self._plan.prompts],
                [choice.count for choice in self._choices],
                max_tokens=self._plan.params.max_tokens,
                n=self._plan.n,
                preemptions=stream.preemptions,
                times=(self._began, stream.started, self._first, self._last),
            )
        for counters in self._plan.model.counters:
            counters.open -= 1
            counters.generated_tokens += tokens
            counters.seconds += seconds
            counters.errors += not self._gone and any(c.finish is None for c in self._choices)

    def _name(self) -> str:
        entry = self._plan.model.entry
        return self._front.models.id if entry is None else entry.name
