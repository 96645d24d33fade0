"""MLX ParaLLM's `/v1/perplexity`, which scores a text under the model without generating any."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

from msgspec import Struct

from mlx_tandem.dialects.openai.logprobs import LOWEST
from mlx_tandem.dialects.plan import Plan, Renderer
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.events import Usage
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.output import TextOptions
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.strict_json import dumps
from mlx_tandem.training.live.recorder import Outcome
from mlx_tandem.types import SamplingParams

LARGEST = 700.0
"""Largest mean negative logprob, in nats, whose exponential is computed. JSON has no infinity for larger ones."""


class PerplexityBody(Struct, forbid_unknown_fields=True):
    """The body of a request to score a text."""

    text: str  # used as it is, without the chat template
    model: str | None = None
    user: str | None = None  # keeps a caller on the same arm of an alias


async def plan_perplexity(front: Front, body: PerplexityBody) -> Plan:
    """Return the plan of a request that scores its prompt. The one token that the engine has to draw is dropped."""
    model = await front.models.select(body.model, body.user)
    prompt = await front.text_prompt(body.text, "text")
    most = front.max_tokens(len(prompt), 1, "max_tokens", "text")
    params = SamplingParams(max_tokens=most, temperature=0.0, prompt_logprobs=0)
    prompted = Prompted([prompt], [model.ref], params, text=TextOptions(silent=True))
    return Plan(prompted, model, PerplexityRenderer(front.models.label(model.ref)))


class PerplexityRenderer(Renderer):
    """A writer of the mean negative logprob of the text's tokens, in nats, and of its exponential, the perplexity.

    The first token has no logprob and does not count. A text of one token has the perplexity 1.
    """

    def __init__(self, model: str):
        self.id = f"ppl-{secrets.token_hex(12)}"
        self._model = model

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body with the scores."""
        scores = answers.prompts[0].logprobs
        mean = -math.fsum(max(lp.model, LOWEST) for lp in scores) / max(len(scores), 1)
        return dumps(
            {
                "model": self._model,
                "token_count": len(scores),
                "avg_nll": mean,
                "ppl": math.exp(min(mean, LARGEST)),
            }
        )
