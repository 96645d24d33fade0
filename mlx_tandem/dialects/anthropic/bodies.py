"""Anthropic's request bodies.

Every field of the published API is here. A field of the type None is refused unless it is null; fields with the comment
"no effect" are accepted. Unknown keys inside of messages, blocks and tools mean nothing and are accepted as well.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mlx_tandem.limits import PARAMETERS, bounds


class Thinking(Struct):
    """The field `thinking`. `display` says whether the reply shows the thoughts or their signature alone."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=int(PARAMETERS["max_tokens"].high))] | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(Struct):
    """The field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Tool(Struct):
    """A tool of the client's own. Anthropic's own tools have other types."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class Format(Struct, rename={"schema_": "schema"}):
    """The form of an answer that is JSON."""

    type: Literal["json_schema"]
    schema_: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    """The field `output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class Metadata(Struct):
    """The field `metadata`."""

    user_id: str | None = None  # keeps a caller on the same arm of an alias


class AllTurns(Struct):
    """All turns with thoughts."""

    type: Literal["all"]


class Edit(Struct):
    """An edit of the context. Keeping all thoughts is the only one that changes nothing."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | AllTurns


class ContextManagement(Struct, forbid_unknown_fields=True):
    """The field `context_management` of the beta API."""

    edits: list[Edit] = []


class TokensBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request for the number of a conversation's tokens."""

    model: str | None = None
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    mcp_servers: Annotated[list[None], Meta(max_length=0)] | None = None
    cache_control: Any = None  # no effect: all prompts are cached
    speed: Literal["standard", "fast"] | None = None  # no effect
    user_profile_id: str | None = None  # no effect
    workspace_id: str | None = None  # no effect
    billing_policy: Any = None  # no effect
    compaction: None = None
    output_format: Format | None = None  # the older place of `output_config.format`


class MessagesBody(TokensBody, forbid_unknown_fields=True, kw_only=True):
    """The body of a request for a message."""

    max_tokens: Annotated[int, Meta(ge=0, le=int(PARAMETERS["max_tokens"].high))]  # 0: the prompt is read and cached
    stream: bool | None = None
    temperature: Annotated[float, bounds("temperature")] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    top_k: Annotated[int, bounds("top_k")] | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # no effect
    diagnostics: Any = None  # no effect: they are about Anthropic's caches
    fallback_credit_token: Any = None  # no effect
    inference_geo: None = None
    container: None = None
    fallbacks: None = None
    thread: None = None
