"""The body of a request for a response.

Every field of the published API is here. A field of the type None is refused unless it is null; fields with the comment
"no effect" are accepted. Unknown keys inside of items and tools mean nothing and are accepted as well.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct

from mlx_tandem.generation.chats import Effort
from mlx_tandem.limits import bounds


class Reasoning(Struct, forbid_unknown_fields=True):
    """The field `reasoning`. Thoughts are returned as they are, and never summarised."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # no effect
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # no effect
    context: Literal["auto", "current_turn", "all_turns"] | None = None  # no effect: the chat template decides
    mode: Literal["standard"] | None = None


class Format(Struct, rename={"schema_": "schema"}):
    """The field `text.format`. Its other members belong to a JSON schema, which is always enforced."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class Text(Struct, forbid_unknown_fields=True):
    """The field `text`."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # no effect


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream."""

    include_obfuscation: bool | None = None  # no effect: events are never padded


Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
"""Parts of replies. Logprobs are served; the others this server never has, or, for reasoning, always has in plain."""


class ResponseBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request for a response."""

    model: str | None = None
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None  # true by default
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, bounds("max_output_tokens")] | None = None
    temperature: Annotated[float, bounds("temperature")] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None  # keeps a caller on the same arm of an alias
    include: list[Include] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # no effect: a prompt that is too long is refused
    max_tool_calls: int | None = None  # no effect: it is about tools of OpenAI's own
    service_tier: str | None = None  # no effect
    safety_identifier: str | None = None  # no effect
    prompt_cache_key: str | None = None  # no effect: all prompts are cached
    prompt_cache_options: Any = None  # no effect
    prompt_cache_retention: str | None = None  # no effect
    access_programs: Any = None  # no effect
    client_metadata: Any = None  # no effect; Codex sends it, and it is no part of the published API
    image: Any = None  # no effect without images
    top_logprobs: Annotated[int, bounds("top_logprobs")] | None = None
    repetition_penalty: Any = None  # vLLM's field, as in chats
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's field, as in chats
    background: Literal[False] | None = None
    conversation: None = None
    context_management: None = None
    moderation: None = None
    prompt: None = None


class RetrieveQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """The query of a request for a response of the store."""

    stream: bool | None = None
    starting_after: Annotated[int, bounds("starting_after")] | None = None
    include: Any = None  # no effect: what a response has is kept with it
    include_obfuscation: bool | None = None  # no effect: events are never padded


class ItemsQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """The query of a request for the input of a response of the store."""

    limit: Annotated[int, bounds("limit")] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    include: Any = None  # no effect


def logprobs_of(body: ResponseBody) -> int | None:
    """Return how many alternatives to report for each token of a message; None if no logprobs are wanted."""
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        return body.top_logprobs or 0
    return None
