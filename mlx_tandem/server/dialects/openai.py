"""OpenAI's request bodies. A field that is not here is refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.server.front import Front
from mlx_tandem.server.sampling import Sampling


class TextPart(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class ChatMessage(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    # What clients send along when they repeat a reply of ours.
    refusal: None = None
    audio: None = None
    annotations: None = None
    function_call: None = None
    tool_calls: list[None] | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text"]


class TemplateOptions(Struct, forbid_unknown_fields=True):
    """An allow-list: a caller may not replace what the template is given otherwise."""

    enable_thinking: bool | None = None


class Common(Sampling, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None  # keeps a caller on one arm of an alias
    lora_adapter: str | None = None  # as `model`, for callers who name base and adapter apart
    # Learning.
    collect_trajectory: bool | None = None
    scoring_function: str | dict[str, Any] | list[Any] | None = None
    metadata: dict[str, Any] | None = None  # for reward functions; without them it has no effect
    swap_policy: Literal["pin", "inflight_keep"] | None = None
    # Accepted without effect.
    store: bool | None = None
    service_tier: str | None = None


class ChatBody(Common, kw_only=True, forbid_unknown_fields=True):
    messages: list[ChatMessage]
    max_completion_tokens: Any = None
    logprobs: bool | None = None
    top_logprobs: Any = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateOptions | None = None
    tools: list[None] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(Common, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[int | str | list[int]]
    logprobs: Any = None
    echo: bool | None = None
    suffix: None = None


def chat_messages(messages: list[ChatMessage]) -> list[Mapping[str, Any]]:
    """The conversation as templates expect it."""
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    if len(messages) > limits.MAX_MESSAGES:
        raise InvalidRequest(f"messages has at most {limits.MAX_MESSAGES} entries", param="messages")
    result: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        refuse_items(message.tool_calls, f"messages[{i}].tool_calls")
        content = message.content
        if content is None:
            raise InvalidRequest(f"messages[{i}].content is required", param=f"messages[{i}].content")
        entry: dict[str, Any] = {
            # Templates know "system" only; "developer" is its newer name.
            "role": "system" if message.role == "developer" else message.role,
            "content": content if isinstance(content, str) else "".join(p.text for p in content),
        }
        if message.name is not None:
            entry["name"] = message.name
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        result.append(entry)
    return result


def refuse_items(value: list[None] | None, param: str) -> None:
    if value:
        raise InvalidRequest(f"{param} is not supported", param=param, code="unsupported_parameter")


def template_options(given: TemplateOptions | None) -> dict[str, bool]:
    if given is None or given.enable_thinking is None:
        return {}
    return {"enable_thinking": given.enable_thinking}


def chat_logprobs(body: ChatBody) -> int | None:
    """How many alternatives to report; None: no logprobs at all."""
    top = 0 if body.top_logprobs is None else int(limits.check("top_logprobs", body.top_logprobs))
    if not body.logprobs:
        if body.top_logprobs is not None and top > 0:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None
    return top


def completion_logprobs(body: CompletionBody) -> int | None:
    return None if body.logprobs is None else int(limits.check("logprobs", body.logprobs))


def streaming(body: Common) -> tuple[bool, bool]:
    """Whether to stream, and whether with usage at the end."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    return bool(body.stream), body.stream_options is not None and body.stream_options.include_usage


async def completion_prompts(front: Front, body: CompletionBody) -> list[list[int]]:
    """Token ids of each prompt: one text, one list of ids, or a list of either."""
    prompt = body.prompt
    vocabulary = front.client.check_ready().vocab_size
    if isinstance(prompt, str):
        return [await front.text_prompt(prompt, "prompt")]
    if not prompt:
        raise InvalidRequest("prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [list(limits.check_token_ids(prompt, vocabulary, "prompt"))]
    if len(prompt) > limits.MAX_PROMPTS:
        raise InvalidRequest(f"prompt has at most {limits.MAX_PROMPTS} prompts", param="prompt")
    total = sum(len(item) for item in prompt if isinstance(item, str))
    prompts: list[list[int]] = []
    for i, item in enumerate(prompt):
        param = f"prompt[{i}]"
        if isinstance(item, str):
            prompts.append(await front.text_prompt(item, param, total=total))
        elif isinstance(item, int):
            raise InvalidRequest(f"{param} must be a prompt like the first one", param=param, code="invalid_type")
        elif not item:
            raise InvalidRequest(f"{param} is empty", param=param)
        else:
            prompts.append(list(limits.check_token_ids(item, vocabulary, param)))
    return prompts


def prompt_texts(front: Front, body: CompletionBody, prompts: list[list[int]]) -> tuple[str, ...]:
    """What `echo` repeats: prompts as they were written, token ids as what they stand for."""
    several = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    given = body.prompt if several else [body.prompt]
    return tuple(
        own if isinstance(own, str) else front.tokenizer.decode(ids, show_special=True)
        for own, ids in zip(given, prompts, strict=True)
    )
