"""Anthropic's routes. It lists models at OpenAI's paths, for requests that name a version of its API."""

from __future__ import annotations

from mlx_tandem.dialects.anthropic import models
from mlx_tandem.dialects.anthropic.bodies import MessagesBody, TokensBody
from mlx_tandem.dialects.anthropic.errors import ERRORS
from mlx_tandem.dialects.anthropic.plans import count_tokens, plan_message
from mlx_tandem.dialects.route import Route

VERSION = "anthropic-version"
"""The header that every request of Anthropic's clients has."""

ROUTES = (
    Route(
        "POST",
        "/v1/messages",
        plan_message,
        MessagesBody,
        reads="prompts",
        images=True,
        errors=ERRORS,
        scope="inference",
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        TokensBody,
        reads="texts",
        images=True,
        errors=ERRORS,
        scope="inference",
    ),
    Route("GET", "/v1/models", models.listing, header=VERSION, errors=ERRORS, scope="any"),
    Route("GET", "/v1/models/{model:path}", models.one, header=VERSION, errors=ERRORS, scope="any"),
)
