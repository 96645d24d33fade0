"""OpenAI's request bodies, which have the supported parameters. `parameters.py` lists how all others are handled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.dialects.flat_tools import flat_fields
from mlx_tandem.errors import InvalidRequest, renamed
from mlx_tandem.generation.chats import ChatRequest, Effort, Thinking
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.messages import TextPart
from mlx_tandem.generation.sampling import Sampling
from mlx_tandem.generation.tools.offer import Tools, tools_of
from mlx_tandem.limits import bounds


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a streamed reply."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's field: each event has the usage
    include_obfuscation: bool | None = None  # no effect: events are never padded


class Prediction(Struct, tag="content", tag_field="type", forbid_unknown_fields=True):
    """OpenAI's predicted output: a text that the answer may repeat in part, as a string or as parts of text."""

    content: str | list[TextPart]


class Common(Sampling, kw_only=True, forbid_unknown_fields=True):
    """The fields that chats and text completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    truncate_prompt_tokens: Annotated[int, bounds("truncate_prompt_tokens")] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prediction: Prediction | None = None
    user: str | None = None  # keeps a caller on the same arm of an alias
    ttl: Annotated[float, bounds("ttl")] | None = None  # seconds for which the engine is kept in memory after this
    lora_adapter: str | None = None  # the adapter, for callers who name the base in `model`
    # Fields for learning.
    collect_trajectory: bool | None = None
    trajectory_id: str | None = None  # the trajectory that this request goes on with
    scoring_function: str | dict[str, Any] | list[Any] | None = None
    metadata: dict[str, Any] | None = None  # for reward functions; it has no effect without one
    swap_policy: Literal["pin", "inflight_keep"] | None = None


class ChatBody(Common, kw_only=True, forbid_unknown_fields=True):
    """The body of a chat."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, bounds("max_completion_tokens")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, bounds("top_logprobs")] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Tools and reasoning.
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, bounds("thinking_token_budget")] | None = None
    include_reasoning: bool | None = None


class CompletionBody(Common, kw_only=True, forbid_unknown_fields=True):
    """The body of a text completion."""

    prompt: str | list[int | str | list[int]]
    logprobs: Annotated[int, bounds("logprobs")] | None = None


def chat_request(body: ChatBody) -> ChatRequest:
    """Return the conversation with everything that decides how it is rendered and how its answers are read."""
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message goes on with the last message, and add_generation_prompt begins another one",
            param="continue_final_message",
        )
    continues = bool(body.continue_final_message)
    return ChatRequest(
        body.messages,
        chat_tools(body),
        Thinking(body.enable_thinking, body.reasoning_effort, body.thinking_token_budget),
        body.chat_template_kwargs or {},
        adds_prompt=not continues and body.add_generation_prompt is not False,
        continues=continues,
    )


def chat_tools(body: ChatBody) -> Tools | None:
    """Return the tools of a chat, which `functions` may describe in OpenAI's older form; None for none."""
    if body.functions is None and body.function_call is None:
        return tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    if body.tools is not None or body.tool_choice is not None:
        raise InvalidRequest("tools and functions cannot be used together", param="functions")
    tools = [{"type": "function", "function": function} for function in body.functions or ()]
    choice = body.function_call
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    named = enumerate(function.get("name") for function in body.functions or () if isinstance(function, dict))
    places = {name: f"functions[{i}].parameters" for i, name in named if isinstance(name, str)}
    with flat_fields(), renamed(**{"tool_choice": "function_call", "tool_choice.function.name": "function_call.name"}):
        return tools_of(tools, choice, False, param="functions", places=places)


def chat_logprobs(body: ChatBody) -> int | None:
    """Return how many alternatives to report for each token; None if no logprobs are wanted."""
    top = body.top_logprobs or 0
    if body.logprobs:
        return top
    if top:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return None


def streaming(body: Common) -> tuple[bool, bool, bool]:
    """Return whether to stream, whether the stream ends with the usage, and whether each event has the usage."""
    options = body.stream_options
    if options is None:
        return bool(body.stream), False, False
    if not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    always = bool(options.continuous_usage_stats)
    return True, always if options.include_usage is None else options.include_usage, always


async def input_prompts(
    front: Front, given: str | list[int | str | list[int]], param: str, *, cut: bool = False
) -> list[list[int]]:
    """Return the token ids of each prompt in `given`: a text, a list of ids, or a list of texts and lists of ids.

    `cut` says that the caller shortens the prompts. Raises InvalidRequest naming the prompt.
    """
    vocabulary = front.client.check_ready().vocab_size
    if isinstance(given, str):
        return [await front.text_prompt(given, param, cut=cut)]
    if not given:
        raise InvalidRequest(f"{param} is empty", param=param)
    if isinstance(given[0], int):
        return [list(limits.check_token_ids(given, vocabulary, param))]
    if len(given) > limits.MAX_PROMPTS:
        raise InvalidRequest(f"{param} has at most {limits.MAX_PROMPTS} prompts", param=param)
    total = sum(len(item) for item in given if isinstance(item, str))
    prompts: list[list[int]] = []
    for i, item in enumerate(given):
        place = f"{param}[{i}]"
        if isinstance(item, str):
            prompts.append(await front.text_prompt(item, place, total=total, cut=cut))
        elif isinstance(item, int):
            raise InvalidRequest(f"{place} must be a prompt like the first one", param=place, code="invalid_type")
        elif not item:
            raise InvalidRequest(f"{place} is empty", param=place)
        else:
            prompts.append(list(limits.check_token_ids(item, vocabulary, place)))
    return prompts


async def predicted(front: Front, body: Common) -> tuple[int, ...]:
    """Return the token ids of the predicted output; none without one. Raises InvalidRequest."""
    if body.prediction is None:
        return ()
    param, content = "prediction.content", body.prediction.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    ids = await front.prompts.text(text, param, begins=False)
    most = front.room(front.client.check_ready())
    if len(ids) > most:
        raise InvalidRequest(f"{param} has {len(ids)} tokens; {most} are allowed", param=param)
    return tuple(ids)


def prompt_texts(
    front: Front, body: CompletionBody, whole: list[list[int]], prompts: list[list[int]]
) -> tuple[str, ...]:
    """Return the texts of the prompts, which `echo` repeats.

    A prompt that came as text and was not cut is returned as it was written. Prompts that came as token ids, or were
    cut from `whole` to `prompts`, are decoded.
    """
    several = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    given = body.prompt if several else [body.prompt]
    return tuple(
        own if isinstance(own, str) and len(ids) == len(all_ids) else front.tokenizer.decode(ids, show_special=True)
        for own, all_ids, ids in zip(given, whole, prompts, strict=True)
    )
