"""MLX ParaLLM's `/v1/perplexity`: how likely the model finds a text, without generating any."""

from __future__ import annotations

import math

from msgspec import Struct
from starlette.types import Send

from mlx_tandem.dialects.shapes import LOWEST, TEXT, dumps
from mlx_tandem.engine.stream import Stream
from mlx_tandem.generation.output import TextOptions
from mlx_tandem.server.replies import Plan, Reply
from mlx_tandem.training.live.front import ServerFront
from mlx_tandem.types import SamplingParams, TokenLogprob

LARGEST = 700.0
"""Mean negative logprob, in nats, from which on its exponential is not computed: JSON has no infinity."""


class PerplexityBody(Struct, forbid_unknown_fields=True):
    text: str  # taken as it is, without the chat template
    model: str | None = None
    user: str | None = None  # keeps a caller on one arm of an alias


async def plan_perplexity(front: ServerFront, body: PerplexityBody) -> Plan:
    """Return the plan of a request that has its prompt scored and draws one token, which is dropped."""
    model = await front.models.select(body.model, body.user)
    prompt = await front.text_prompt(body.text, "text")
    most = front.max_tokens(len(prompt), 1, "max_tokens", "text")
    params = SamplingParams(max_tokens=most, temperature=0.0, prompt_logprobs=0)
    return Plan(TEXT, model, [prompt], params, 1, TextOptions(silent=True), stream=False, with_usage=False)


class PerplexityReply(Reply):
    """One JSON body with the mean negative logprob of the text's tokens, in nats, and its exponential.

    The first token has no logprob and does not count; a text of one token has the perplexity 1.
    """

    async def _run(self, stream: Stream, send: Send) -> None:
        scores: tuple[TokenLogprob, ...] = ()
        async for deltas in stream:
            self._count_batch(deltas)
            for delta in deltas:
                scores = delta.prompt_logprobs or scores
                self._push(self._choices[0], 0, delta)
        if self._client_left():
            return
        mean = -math.fsum(max(lp.model, LOWEST) for lp in scores) / max(len(scores), 1)
        body = {
            "model": self._model,
            "token_count": len(scores),
            "avg_nll": mean,
            "ppl": math.exp(min(mean, LARGEST)),
        }
        await self._send_body(send, dumps(body))
