"""Making the plans of chats and text completions from their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.openai.bodies import (
    ChatBody,
    Common,
    CompletionBody,
    chat_logprobs,
    chat_request,
    input_prompts,
    predicted,
    prompt_texts,
    streaming,
)
from mlx_tandem.dialects.openai.collect import collect_fields, control_arm, follows, shown_version
from mlx_tandem.dialects.openai.renderer import ChatRenderer, OpenAIRenderer, Shown, TextRenderer
from mlx_tandem.dialects.openai.trajectories import chat_prompt, text_prompt
from mlx_tandem.dialects.plan import Plan
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.adapters.model_names import Selection
from mlx_tandem.generation.chat_constraints import chat_constraint
from mlx_tandem.generation.chats import ChatRequest
from mlx_tandem.generation.grammar.constraint import Constraint
from mlx_tandem.generation.grammar.fields import constraint_of
from mlx_tandem.generation.messages import chat_messages
from mlx_tandem.generation.output import TextOptions
from mlx_tandem.generation.parsers import MakeParser
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.generation.sampling import (
    check_logprobs,
    choices,
    kept_tokens,
    sampling_params,
    text_options,
)
from mlx_tandem.training.draws import altered
from mlx_tandem.training.live.recorder import Talk
from mlx_tandem.types import Grammar, Image, SamplingParams


async def plan_chat(front: ServerFront, body: ChatBody) -> Plan:
    """Return the plan of a chat. Raises InvalidRequest and NotFound."""
    model = await _selected(front, body)
    _check_streaming(body)
    n, text, logprobs = choices(front, body), text_options(body), chat_logprobs(body)
    constraint = constraint_of(body)
    check_logprobs(front, "top_logprobs", logprobs)
    longest = ("max_completion_tokens", body.max_completion_tokens) if body.max_completion_tokens is not None else None
    kept = kept_tokens(front, body.truncate_prompt_tokens, longest[1] if longest else body.max_tokens)
    asked = chat_request(body)
    chat = await asked.chat(front, cut=kept is not None)
    if chat.images:
        _check_images(body)
    prompt, talk = await chat_prompt(front, body, asked, _last(chat.prompt, kept))
    params = sampling_params(front, body, len(prompt), "messages", logprobs=logprobs, max_tokens=longest)
    params = chat.params(params)
    texts = (front.tokenizer.decode(prompt, show_special=True),) if _learns(body) else ()
    echo = _echoed(asked) if body.echo else None
    grammar, prediction = await _grammar(front, chat_constraint(front, chat, constraint)), await predicted(front, body)
    generates = _Generates(
        [prompt], params, n, chat.text(text), prediction, chat.parser, chat.most_calls, grammar, talk, chat.images
    )
    return _plan(front, body, ChatRenderer, model, generates, texts, echo)


async def plan_completion(front: ServerFront, body: CompletionBody) -> Plan:
    """Return the plan of a text completion. Raises InvalidRequest and NotFound."""
    model = await _selected(front, body)
    _check_streaming(body)
    echo = bool(body.echo)
    n, text, logprobs = choices(front, body), text_options(body, echo), body.logprobs
    constraint = constraint_of(body)
    check_logprobs(front, "logprobs", logprobs)
    kept = kept_tokens(front, body.truncate_prompt_tokens, body.max_tokens)
    whole = await input_prompts(front, body.prompt, "prompt", cut=kept is not None)
    prompts = [_last(prompt, kept) for prompt in whole]
    params = sampling_params(front, body, max(map(len, prompts)), "prompt", logprobs=logprobs, echo=echo)
    texts = prompt_texts(front, body, whole, prompts) if echo or _learns(body) else ()
    talk = await text_prompt(front, body, prompts)
    grammar, prediction = await _grammar(front, constraint), await predicted(front, body)
    generates = _Generates(prompts, params, n, text, prediction, grammar=grammar, talk=talk)
    return _plan(front, body, TextRenderer, model, generates, texts, texts if echo else None)


class _Generates(NamedTuple):
    """The part of a plan that the engine needs: the prompts, and how to continue them."""

    prompts: list[list[int]]
    params: SamplingParams
    n: int
    text: TextOptions
    prediction: tuple[int, ...]
    parser: MakeParser | None = None
    most_calls: int | None = None
    grammar: Grammar | None = None
    talk: Talk | None = None
    images: tuple[Image, ...] = ()


def _plan(
    front: ServerFront,
    body: Common,
    renderer: type[OpenAIRenderer],
    model: Selection,
    generates: _Generates,
    texts: Sequence[str],
    echo: tuple[str, ...] | None,
) -> Plan:
    """Return the plan of either route.

    `texts` are the prompts as the reward functions see them. `echo` has the text that the replies to each prompt begin
    with; None means none.
    """
    prompts, params, n, text, prediction, parser, most_calls, grammar, talk, images = generates
    stream, with_usage, always_usage = streaming(body)
    follow = follows(front, body, model)
    collect = collect_fields(front, body, model, params, prompts, texts, n=n, silent=text.silent, talk=talk)
    if collect is not None and collect.keep and (forced := altered(params) if grammar is None else grammar.param):
        # Its tokens were drawn from another distribution than the policy's, which is what is trained.
        raise InvalidRequest(f"trajectories are not collected beside {forced}", param="collect_trajectory")
    if collect is not None and not follow:
        model, collect = control_arm(front, body, model, collect)
    version = shown_version(front, body, model)
    learned = collect is not None and params.logprobs is None
    prompted = Prompted(
        prompts,
        [model.ref] * len(prompts),
        structs.replace(params, logprobs=0) if learned else params,
        n,
        text,
        parser=parser,
        most_calls=most_calls,
        version=version,
        running_usage=stream and always_usage,
        priority=body.priority or 0,
        speculate=body.speculation is not False,
        prediction=prediction,
        follow=follow,
        grammar=grammar,
        images=images,
    )
    shown = Shown(
        usage=with_usage or front.config.server.force_include_usage,
        logprobs=params.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        versions=version is not None,
        echo=echo,
        reasoning=not isinstance(body, ChatBody) or body.include_reasoning is not False,
        legacy=isinstance(body, ChatBody) and body.functions is not None,
    )
    return Plan(prompted, model, renderer(front, prompted, shown), stream, collect, body.ttl)


async def _grammar(front: ServerFront, constraint: Constraint | None) -> Grammar | None:
    """Return the grammar of a constraint, if there is one."""
    return None if constraint is None else await front.constraints.grammar(constraint)


def _last(prompt: list[int], kept: int | None) -> list[int]:
    """Return the last `kept` tokens of the prompt; all of it for None."""
    return prompt if kept is None else prompt[-kept:]


def _echoed(asked: ChatRequest) -> tuple[str, ...] | None:
    """Return the last message, with which a chat's reply begins; None if the reply does not repeat it.

    As in vLLM, the reply repeats a message of the assistant, and any message that it continues.
    """
    last = chat_messages(asked.messages)[-1]
    return (last["content"],) if last["role"] == "assistant" or not asked.adds_prompt else None


async def _selected(front: ServerFront, body: Common) -> Selection:
    """Return the model that `lora_adapter` or `model` names."""
    if body.lora_adapter is None:
        return await front.models.select(body.model, body.user)
    return await front.models.select_adapter(body.lora_adapter, body.model, body.user)


def _check_images(body: ChatBody) -> None:
    """Raise InvalidRequest for a field that cannot be used in a chat with images."""
    for name in ("truncate_prompt_tokens", "collect_trajectory", "trajectory_id", "scoring_function", "echo"):
        if getattr(body, name) not in (None, False):
            raise InvalidRequest(f"{name} cannot be used in a chat with images", param=name)


def _learns(body: Common) -> bool:
    """Return whether a reward function will score the completions, and so needs the prompt as text."""
    return bool(body.collect_trajectory or body.trajectory_id) or body.scoring_function is not None


def _check_streaming(body: Common) -> None:
    """Raise InvalidRequest for fields that cannot be used in a stream, or only in a stream."""
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    streaming(body)
