"""`/tokenize`, `/detokenize` and `/tokenizer_info`, with vLLM's shapes."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.server.dialects.messages import chat_messages
from mlx_tandem.server.dialects.openai import TemplateOptions, template_options
from mlx_tandem.server.front import LONG_TEXT, Front


class TokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None  # of a prompt; the template of a conversation has its own
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


async def tokenize(front: Front, body: TokenizeBody) -> dict[str, Any]:
    info = front.client.check_ready()
    await front.models.select(body.model)
    tokens = await (_prompt(front, body) if body.messages is None else _conversation(front, body))
    return {
        "count": len(tokens),
        "max_model_len": info.max_model_len,
        "tokens": tokens,
        "token_strs": [front.tokenizer.piece(t) for t in tokens] if body.return_token_strs else None,
    }


async def detokenize(front: Front, body: DetokenizeBody) -> dict[str, Any]:
    info = front.client.check_ready()
    await front.models.select(body.model)
    tokens = limits.check_token_ids(body.tokens, info.vocab_size, "tokens")
    return {"prompt": front.tokenizer.decode(tokens, show_special=True)}


def tokenizer_info(front: Front) -> dict[str, str | None]:
    """What a client needs to write prompts of its own."""
    texts = front.tokenizer.special_texts()
    return {
        **{name: texts.get(name) for name in ("bos_token", "eos_token", "pad_token")},
        "chat_template": front.template.source if front.template is not None else None,
    }


async def _prompt(front: Front, body: TokenizeBody) -> list[int]:
    text = body.prompt
    if text is None:
        raise InvalidRequest("prompt or messages is required", param="prompt", code="missing_required_parameter")
    for name in ("add_generation_prompt", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} is for messages, not for a prompt", param=name)
    special = body.add_special_tokens is not False
    if len(text) < LONG_TEXT:
        return front.tokenizer.encode(text, add_special_tokens=special)
    return await asyncio.to_thread(front.tokenizer.encode, text, add_special_tokens=special)


async def _conversation(front: Front, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        raise InvalidRequest("either prompt or messages can be given, not both", param="prompt")
    if body.add_special_tokens:
        raise InvalidRequest("messages get their special tokens from the template", param="add_special_tokens")
    options = template_options(body.chat_template_kwargs)
    options["add_generation_prompt"] = body.add_generation_prompt is not False
    return await front.chat_prompt(chat_messages(body.messages or []), options)
