"""The bodies of vLLM's own routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mlx_tandem.limits import MAX_PROMPTS, bounds


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


class ScoringBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that requests for scores share. `instruction` says what a document has to do for the query."""

    model: str | None = None
    instruction: str | None = None
    use_activation: bool | None = None  # false: the logarithm of the odds instead of the probability
    priority: Annotated[int, bounds("priority")] | None = None
    user: str | None = None  # keeps a caller on the same arm of an alias
    truncate_prompt_tokens: None = None  # what is cut off might be the question


class ScoreBody(ScoringBody, forbid_unknown_fields=True, kw_only=True):
    """The body of a request for the scores of pairs."""

    text_1: str | list[str]
    text_2: str | list[str]
    encoding_format: None = None


class PoolingBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request for the scores of texts, or of the last answer of a conversation, by a reward model."""

    model: str | None = None
    input: str | list[int | str | list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    encoding_format: Literal["float"] | None = None
    task: Literal["classify"] | None = None  # vLLM's name of what heads do
    use_activation: Literal[False] | None = None  # scores are given as they are
    add_generation_prompt: Literal[False] | None = None
    priority: Annotated[int, bounds("priority")] | None = None
    user: str | None = None  # keeps a caller on the same arm of an alias
    truncate_prompt_tokens: None = None  # what is cut off might be the question


class Document(Struct):
    """A document as an object."""

    text: str


class RerankBody(ScoringBody, forbid_unknown_fields=True, kw_only=True):
    """The body of a request that sorts documents."""

    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Meta(ge=0, le=MAX_PROMPTS)] | None = None  # 0: all
    return_documents: bool | None = None  # true by default
    max_tokens_per_doc: None = None
    max_chunks_per_doc: None = None
    rank_fields: None = None
