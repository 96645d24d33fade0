"""MLX ParaLLM's `/v1/perplexity`: how likely the model finds a text, without generating any."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

from msgspec import Struct

from mlx_tandem.decode import dumps
from mlx_tandem.dialects.openai.logprobs import LOWEST
from mlx_tandem.dialects.plan import Plan, Renderer
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.events import Usage
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.output import TextOptions
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.training.live.recorder import Outcome
from mlx_tandem.types import SamplingParams

LARGEST = 700.0
"""Mean negative logprob, in nats, from which on its exponential is not computed: JSON has no infinity."""


class PerplexityBody(Struct, forbid_unknown_fields=True):
    """A text to be scored."""

    text: str  # taken as it is, without the chat template
    model: str | None = None
    user: str | None = None  # keeps a caller on one arm of an alias


async def plan_perplexity(front: Front, body: PerplexityBody) -> Plan:
    """Return the plan of a request that has its prompt scored and draws one token, which is dropped."""
    model = await front.models.select(body.model, body.user)
    prompt = await front.text_prompt(body.text, "text")
    most = front.max_tokens(len(prompt), 1, "max_tokens", "text")
    params = SamplingParams(max_tokens=most, temperature=0.0, prompt_logprobs=0)
    prompted = Prompted([prompt], [model.ref], params, text=TextOptions(silent=True))
    return Plan(prompted, model, PerplexityRenderer(front.models.label(model.ref)))


class PerplexityRenderer(Renderer):
    """Writes the mean negative logprob of the text's tokens, in nats, and its exponential.

    The first token has no logprob and does not count; a text of one token has the perplexity 1.
    """

    def __init__(self, model: str):
        self.id = f"ppl-{secrets.token_hex(12)}"
        self._model = model

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body."""
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
