"""From a checked body to the plan of its reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_tandem.dialects.collect import collect_fields, follows, shown_version
from mlx_tandem.dialects.openai import (
    ChatBody,
    Common,
    CompletionBody,
    chat_logprobs,
    chat_options,
    completion_logprobs,
    completion_prompts,
    prompt_texts,
    streaming,
)
from mlx_tandem.dialects.shapes import CHAT, TEXT
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.messages import chat_messages
from mlx_tandem.generation.model_names import Selection
from mlx_tandem.generation.sampling import (
    check_logprobs,
    choices,
    is_silent,
    kept_tokens,
    priority,
    prompt_logprobs,
    sampling_params,
    text_options,
)
from mlx_tandem.server.replies import Plan
from mlx_tandem.training.live.front import ServerFront


async def plan_chat(front: ServerFront, body: ChatBody) -> Plan:
    model = await _selected(front, body)
    _refuse_streamed_scores(body)
    stream, with_usage, always_usage = streaming(body)
    n, text, logprobs = choices(front, body), text_options(body), chat_logprobs(body)
    check_logprobs(front, "top_logprobs", logprobs)
    longest = ("max_completion_tokens", body.max_completion_tokens) if body.max_completion_tokens is not None else None
    kept = kept_tokens(front, body.truncate_prompt_tokens, longest[1] if longest else body.max_tokens)
    messages, options = chat_messages(body.messages), chat_options(body)
    prompt = _last(await front.chat_prompt(messages, options, cut=kept is not None), kept)
    params = sampling_params(front, body, len(prompt), "messages", logprobs=logprobs, max_tokens=longest)
    texts = (front.tokenizer.decode(prompt, show_special=True),) if _learns(body) else ()
    return Plan(
        CHAT,
        model,
        [prompt],
        params,
        n,
        text,
        stream,
        with_usage,
        priority(body),
        always_usage=always_usage,
        echo=_echoed(messages, options) if body.echo else None,
        prompt_logprobs=prompt_logprobs(body),
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        collect=collect_fields(front, body, model, params, [prompt], texts, silent=is_silent(body)),
        version=shown_version(front, body, model),
        follow=follows(front, body, model),
    )


async def plan_completion(front: ServerFront, body: CompletionBody) -> Plan:
    model = await _selected(front, body)
    _refuse_streamed_scores(body)
    stream, with_usage, always_usage = streaming(body)
    echo = bool(body.echo)
    n, text, logprobs = choices(front, body), text_options(body, echo), completion_logprobs(body)
    check_logprobs(front, "logprobs", logprobs)
    kept = kept_tokens(front, body.truncate_prompt_tokens, body.max_tokens)
    whole = await completion_prompts(front, body)
    prompts = [_last(prompt, kept) for prompt in whole]
    params = sampling_params(front, body, max(map(len, prompts)), "prompt", logprobs=logprobs, echo=echo)
    texts = prompt_texts(front, body, whole, prompts) if echo or _learns(body) else ()
    return Plan(
        TEXT,
        model,
        prompts,
        params,
        n,
        text,
        stream,
        with_usage,
        priority(body),
        always_usage=always_usage,
        echo=texts if echo else None,
        prompt_logprobs=prompt_logprobs(body),
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        collect=collect_fields(front, body, model, params, prompts, texts, silent=is_silent(body, echo)),
        version=shown_version(front, body, model),
        follow=follows(front, body, model),
    )


def _last(prompt: list[int], kept: int | None) -> list[int]:
    """Return the prompt, or the last `kept` tokens of it."""
    return prompt if kept is None else prompt[-kept:]


def _echoed(messages: Sequence[Mapping[str, Any]], options: Mapping[str, bool]) -> tuple[str, ...] | None:
    """Return what a chat's reply begins with when it repeats the last message: as in vLLM, where the reply goes on with
    that message or has its role; None: nothing."""
    last = messages[-1]
    return (last["content"],) if last["role"] == "assistant" or not options["add_generation_prompt"] else None


async def _selected(front: ServerFront, body: Common) -> Selection:
    if body.lora_adapter is None:
        return await front.models.select(body.model, body.user)
    return await front.models.select_adapter(body.lora_adapter, body.model, body.user)


def _learns(body: Common) -> bool:
    """Whether a reward function will see the prompt."""
    return bool(body.collect_trajectory) or body.scoring_function is not None


def _refuse_streamed_scores(body: Common) -> None:
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
