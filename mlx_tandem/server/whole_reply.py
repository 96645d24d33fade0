"""The reply that is one JSON body."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Send

from mlx_tandem.dialects.shapes import dumps
from mlx_tandem.engine.stream import Stream
from mlx_tandem.errors import EngineError
from mlx_tandem.server.replies import Reply
from mlx_tandem.training.live.recorder import Outcome, Said

MANY_LOGPROBS = 20_000
"""Entries from which on a reply is put together on another thread, so that streams do not wait for it."""


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
        await self._send_body(send, body)

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
            own = self._details(i, said[i], echoed=plan.echo is not None and not shape.one_prompt)
            if outcomes:
                own |= outcomes[i]
            whole = shape.whole(i, text, choice.finish) | own
            choices.append(whole if shape.one_prompt else whole | details[k])
        body = {
            "id": self._id,
            "object": shape.object,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
            "usage": self._usage(),
        }
        return dumps(body | details[0] if shape.one_prompt else body)
