"""OpenAI's `/v1/embeddings`."""

from __future__ import annotations

import secrets
from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Struct

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.openai.bodies import input_prompts
from mlx_tandem.dialects.plan import Plan, Renderer
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.embeddings import EmbeddingOptions, embedding_request, vectors
from mlx_tandem.generation.events import Usage
from mlx_tandem.limits import bounds
from mlx_tandem.strict_json import dumps
from mlx_tandem.training.live.recorder import Outcome
from mlx_tandem.types import Pooling


class EmbeddingsBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for embeddings.

    `pooling` and `normalize` are this project's: the model's own pooling, and vectors of length 1, are the defaults.
    """

    input: str | list[int | str | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, bounds("dimensions")] | None = None
    user: str | None = None  # keeps a caller on the same arm of an alias
    pooling: Pooling | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: Annotated[int, bounds("truncate_prompt_tokens")] | None = None
    priority: Annotated[int, bounds("priority")] | None = None
    ttl: Annotated[float, bounds("ttl")] | None = None


async def plan_embeddings(front: ServerFront, body: EmbeddingsBody) -> Plan:
    """Return the plan of a request for embeddings. Raises InvalidRequest and NotFound."""
    model = await front.models.select(body.model, body.user)
    kept = body.truncate_prompt_tokens
    whole = await input_prompts(front, body.input, "input", cut=kept is not None)
    prompts = whole if kept is None else [prompt[-kept:] for prompt in whole]
    for prompt in prompts:
        front.max_tokens(len(prompt), 1, "max_tokens", "input")
    normalize = body.normalize is not False
    options = EmbeddingOptions(body.pooling or front.pooling, normalize, body.dimensions)
    info = front.client.check_ready()
    prompted = embedding_request(info, prompts, model.ref, options, priority=body.priority or 0)
    label = front.models.label(model.ref)
    renderer = EmbeddingsRenderer(label, options, is_text=body.encoding_format == "base64")
    return Plan(prompted, model, renderer, keep_alive=body.ttl)


class EmbeddingsRenderer(Renderer):
    """A writer of OpenAI's list of embeddings, as numbers or as little-endian float32 numbers in base64."""

    def __init__(self, model: str, options: EmbeddingOptions, *, is_text: bool):
        self.id = f"embd-{secrets.token_hex(12)}"
        self._model = model
        self._options = options
        self._is_text = is_text

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body."""
        found = vectors(answers, self._options)
        data = [
            {
                "object": "embedding",
                "index": i,
                "embedding": b64encode(vector.tobytes()).decode() if self._is_text else vector.tolist(),
            }
            for i, vector in enumerate(found)
        ]
        counts = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}
        return dumps({"object": "list", "data": data, "model": self._model, "usage": counts})
