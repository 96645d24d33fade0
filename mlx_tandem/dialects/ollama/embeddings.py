"""Ollama's `/api/embed` and the older `/api/embeddings`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from mlx_tandem.dialects.idling import keep_alive_seconds
from mlx_tandem.dialects.ollama.bodies import EmbedBody, EmbeddingsBody
from mlx_tandem.dialects.ollama.names import select
from mlx_tandem.dialects.openai.bodies import input_prompts
from mlx_tandem.dialects.plan import Plan, Renderer
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.embeddings import EmbeddingOptions, embedding_request, vectors
from mlx_tandem.generation.events import Usage
from mlx_tandem.generation.front import Front
from mlx_tandem.strict_json import dumps
from mlx_tandem.training.live.recorder import Outcome

Empty = dict[str, Any]
"""The reply to a request without a text, which only asks to load the model."""


async def plan_embed(front: Front, body: EmbedBody) -> Plan | Empty:
    """Return the plan of a request for the vectors of one or more texts. Raises InvalidRequest and NotFound.

    Unless `truncate` is false, only the beginning of a text that is too long is read.
    """
    began, kept = time.monotonic(), keep_alive_seconds(body.keep_alive)
    model = await select(front, body.model)
    label = front.models.label(model.ref)
    if not body.input:
        return {"model": label, "embeddings": []}
    load_seconds = time.monotonic() - began
    cut = body.truncate is not False
    given: list[int | str | list[int]] = [body.input] if isinstance(body.input, str) else [*body.input]
    prompts = await input_prompts(front, given, "input", cut=cut)
    if cut:
        prompts = [prompt[: front.longest_prompt()] for prompt in prompts]
    options = EmbeddingOptions(front.pooling, True, body.dimensions)
    prompted = embedding_request(front.client.check_ready(), prompts, model.ref, options)
    return Plan(prompted, model, EmbedRenderer(label, options, began, load_seconds), keep_alive=kept)


async def plan_embeddings(front: Front, body: EmbeddingsBody) -> Plan | Empty:
    """Return the plan of a request for the vector of one text. Raises InvalidRequest and NotFound."""
    kept = keep_alive_seconds(body.keep_alive)
    model = await select(front, body.model)
    if not body.prompt:
        return {"embedding": []}
    prompts = await input_prompts(front, body.prompt, "prompt")
    options = EmbeddingOptions(front.pooling, normalize=False)
    prompted = embedding_request(front.client.check_ready(), prompts, model.ref, options)
    return Plan(prompted, model, EmbeddingsRenderer(options), keep_alive=kept)


class EmbedRenderer(Renderer):
    """A writer of the reply of `/api/embed`: a vector of length 1 for each text."""

    def __init__(self, model: str, options: EmbeddingOptions, began: float, load_seconds: float):
        """Begin a reply of the model with this name. `began` is the time of the monotonic clock at its start."""
        self.id = "ollama-" + secrets.token_hex(12)
        self._model = model
        self._options = options
        self._began = began
        self._load_seconds = load_seconds

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body. Durations are in nanoseconds."""
        return dumps(
            {
                "model": self._model,
                "embeddings": [vector.tolist() for vector in vectors(answers, self._options)],
                "total_duration": int((time.monotonic() - self._began) * 1e9),
                "load_duration": int(self._load_seconds * 1e9),
                "prompt_eval_count": usage.prompt,
            }
        )


class EmbeddingsRenderer(Renderer):
    """A writer of the reply of `/api/embeddings`: one vector, of whatever length the model gives it."""

    def __init__(self, options: EmbeddingOptions):
        self.id = "ollama-" + secrets.token_hex(12)
        self._options = options

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body."""
        (vector,) = vectors(answers, self._options)
        return dumps({"embedding": vector.tolist()})
