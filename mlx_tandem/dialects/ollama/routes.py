"""Ollama's routes."""

from __future__ import annotations

from mlx_tandem.dialects.ollama import models
from mlx_tandem.dialects.ollama.bodies import ChatBody, EmbedBody, EmbeddingsBody, GenerateBody, ShowBody
from mlx_tandem.dialects.ollama.embeddings import plan_embed, plan_embeddings
from mlx_tandem.dialects.ollama.errors import ERRORS
from mlx_tandem.dialects.ollama.plans import plan_chat, plan_completion
from mlx_tandem.dialects.route import PLAIN, Route

MEDIA = PLAIN | {"application/octet-stream"}
"""Content types that curl and LiteLLM's asynchronous client send JSON with."""

ROUTES = (
    Route(
        "POST",
        "/api/chat",
        plan_chat,
        ChatBody,
        reads="prompts",
        images=True,
        media=MEDIA,
        errors=ERRORS,
        scope="inference",
    ),
    Route(
        "POST",
        "/api/generate",
        plan_completion,
        GenerateBody,
        reads="prompts",
        images=True,
        media=MEDIA,
        errors=ERRORS,
        scope="inference",
    ),
    Route("POST", "/api/embed", plan_embed, EmbedBody, reads="prompts", media=MEDIA, errors=ERRORS, scope="inference"),
    Route(
        "POST",
        "/api/embeddings",
        plan_embeddings,
        EmbeddingsBody,
        reads="prompts",
        media=MEDIA,
        errors=ERRORS,
        scope="inference",
    ),
    Route("GET", "/api/tags", models.tags, errors=ERRORS, scope="any"),
    Route("GET", "/api/ps", models.running, errors=ERRORS, scope="any"),
    Route("POST", "/api/show", models.show, ShowBody, media=MEDIA, errors=ERRORS, scope="any", wakes=False),
    Route("GET", "/api/version", models.version, errors=ERRORS, scope="any"),
)
