"""Replies that are one JSON body."""

from __future__ import annotations

import asyncio

from starlette.types import Send

from mlx_tandem.engine.client.stream import Stream
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.assembler import Assembler
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.server.headers import JSON_TYPE
from mlx_tandem.server.replies import Reply

MANY_NUMBERS = 20_000
"""Fewest numbers in a reply that another thread encodes, so that streams do not wait for it."""


class WholeReply(Reply):
    """A reply with one JSON body, which is sent when all choices have ended."""

    async def _run(self, stream: Stream, assembler: Assembler, send: Send) -> None:
        prompted, renderer = self._plan.prompted, self._plan.renderer
        details = renderer.wants_details or self._recorder is not None
        answers = Answers(len(prompted.prompts), prompted.choices, details=details)
        count, push, add = self._count_batch, assembler.push, answers.add
        async for deltas in stream:
            count(deltas)
            add(push(deltas))
        if self._gone:
            return
        outcomes = await self._outcomes(answers)
        renderer.times = self._times(stream)
        self._remember(assembler)
        if _numbers(prompted, answers) < MANY_NUMBERS:
            body = renderer.whole(answers, assembler.usage(), outcomes)
        else:
            body = await asyncio.to_thread(renderer.whole, answers, assembler.usage(), outcomes)
        headers = [*self._headers(JSON_TYPE), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _numbers(prompted: Prompted, answers: Answers) -> int:
    """Return about how many logprobs of prompts and answers and numbers of embeddings a reply has."""
    params = prompted.params
    scores = sum(len(prompt.logprobs) for prompt in answers.prompts) * (1 + (params.prompt_logprobs or 0))
    if params.logprobs is not None:
        scores += sum(len(answer.logprobs) for answer in answers.choices) * (1 + params.logprobs)
    return scores + sum(len(prompt.embedding) // 4 for prompt in answers.prompts)
