"""The bodies of vLLM's own routes."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class LoadBody(Struct, forbid_unknown_fields=True):
    """The body of a request to load an adapter."""

    lora_name: str
    lora_path: str | None = None
    load_inplace: bool = False
    base_model_name: str | None = None


class UnloadBody(Struct, forbid_unknown_fields=True):
    """The body of a request to remove an adapter."""

    lora_name: str
    lora_int_id: int | None = None


class TokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request to tokenise either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None  # for a prompt only; the template adds those of a conversation
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request for the text of token ids."""

    model: str | None = None
    tokens: list[int]
