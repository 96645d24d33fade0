"""OpenAI's routes. Each of them also exists without /v1, for clients whose base URL leaves it out."""

from __future__ import annotations

from mlx_tandem.dialects.openai import models
from mlx_tandem.dialects.openai.accept import accepting
from mlx_tandem.dialects.openai.bodies import ChatBody, CompletionBody
from mlx_tandem.dialects.openai.embeddings import EmbeddingsBody, plan_embeddings
from mlx_tandem.dialects.openai.plans import plan_chat, plan_completion
from mlx_tandem.dialects.route import Route

ROUTES = tuple(
    route
    for prefix in ("/v1", "")
    for route in (
        Route(
            "POST",
            f"{prefix}/chat/completions",
            plan_chat,
            ChatBody,
            reads="prompts",
            images=True,
            prepare=accepting("chat"),
            scope="inference",
        ),
        Route(
            "POST",
            f"{prefix}/completions",
            plan_completion,
            CompletionBody,
            reads="prompts",
            prepare=accepting("completions"),
            scope="inference",
        ),
        Route("POST", f"{prefix}/embeddings", plan_embeddings, EmbeddingsBody, reads="prompts", scope="inference"),
        Route("GET", f"{prefix}/models", models.listing, scope="any"),
        Route("GET", f"{prefix}/models/{{model:path}}", models.one, scope="any"),
    )
)
