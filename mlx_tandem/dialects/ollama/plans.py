"""Making the plans of chats and completions from their bodies."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.idling import keep_alive_seconds
from mlx_tandem.dialects.ollama.bodies import ChatBody, Common, GenerateBody, Options, refuse_unsupported
from mlx_tandem.dialects.ollama.messages import chat_form, images
from mlx_tandem.dialects.ollama.names import select
from mlx_tandem.dialects.ollama.renderer import ChatRenderer, GenerateRenderer, OllamaRenderer, now
from mlx_tandem.dialects.openai.logprobs import ChatLogprobs
from mlx_tandem.dialects.plan import Plan
from mlx_tandem.dialects.turns import Turns
from mlx_tandem.errors import InvalidRequest, renamed
from mlx_tandem.generation.caller import CALLER
from mlx_tandem.generation.chats import Chat, ChatRequest, Thinking
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.grammar.fields import json_constraint
from mlx_tandem.generation.prompted_chats import prompted_chat
from mlx_tandem.generation.sampling import Sampling, check_logprobs, sampling_params, text_options
from mlx_tandem.generation.tools.offer import tools_of

REPEAT_LAST_N = 64
"""Ollama's default of the option."""

Loaded = dict[str, Any]
"""The reply to a request that only asks to load the model."""


async def plan_chat(front: ServerFront, body: ChatBody) -> Plan | Loaded:
    """Return the plan of a chat, or the reply without one for no messages. Raises InvalidRequest and NotFound."""
    refuse_unsupported(body)
    if not body.messages:
        return await _loaded(front, body, ChatRenderer)
    turns = chat_form(body.messages, sees=front.reads_images)
    asked = ChatRequest(turns.messages, tools_of(body.tools, None, None), _thinking(body), fields=turns.fields)
    return replace(await _plan(front, body, asked, ChatRenderer), skipped=tuple(turns.skipped))


async def plan_completion(front: ServerFront, body: GenerateBody) -> Plan | Loaded:
    """Return the plan of a completion, or the reply without one for no prompt. Raises InvalidRequest and NotFound."""
    refuse_unsupported(body)
    if not body.prompt:
        return await _loaded(front, body, GenerateRenderer)
    if body.raw:
        if body.images:
            raise InvalidRequest("images cannot be used with raw", param="images")
        return await _plan(front, body, body.prompt, GenerateRenderer)
    turns = Turns(())
    if body.system:
        turns.text("system", body.system)
    turns.content("user", [body.prompt, *images(body.images or (), "images")])
    with renamed(messages="prompt"):
        asked = ChatRequest(turns.messages, None, _thinking(body), fields=turns.fields)
        return await _plan(front, body, asked, GenerateRenderer)


async def _plan(front: Front, body: Common, asked: ChatRequest | str, renderer: type[OllamaRenderer]) -> Plan:
    """Return the plan for a conversation, or for a text that is the prompt as it is."""
    began, kept = time.monotonic(), keep_alive_seconds(body.keep_alive)
    model = await select(front, body.model)
    load_seconds = time.monotonic() - began
    if isinstance(asked, str):
        chat = Chat(await front.text_prompt(asked, "prompt"), None, None, frozenset())
    else:
        with renamed(enable_thinking="think", reasoning_effort="think"):
            chat = await asked.chat(front)
    options = body.options or Options()
    sampling = _sampling(front, options, len(chat.prompt))
    logprobs = _logprobs(body)
    names = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
    with renamed(**{inner: f"options.{names.get(inner, inner)}" for inner in (*names, "stop", "min_p", "top_k")}):
        check_logprobs(front, "top_logprobs", logprobs)
        params = sampling_params(front, sampling, len(chat.prompt), "messages", logprobs=logprobs)
        text = text_options(sampling)
    constraint = None
    if body.format:
        constraint = json_constraint("format", None if body.format == "json" else body.format)
    prompted = await prompted_chat(front, model, chat, params, text, constraint)
    shapes = None if logprobs is None else ChatLogprobs(front.tokenizer)
    reply = renderer(front.models.label(model.ref), began, load_seconds, shapes)
    return Plan(prompted, model, reply, body.stream is not False, keep_alive=kept)


def _sampling(front: Front, options: Options, prompt: int) -> Sampling:
    """Return the sampling parameters for these options and a prompt of this many tokens.

    As in Ollama, an answer ends where the context ends, whatever `num_predict` says.
    """
    most = options.num_predict
    if most is not None:
        room = max(front.room(front.client.check_ready()) - prompt, 1)
        room = min(room, front.config.server.max_generation_tokens or room)
        most = room if most < 1 else min(most, room)
    penalty, window = options.repeat_penalty, options.repeat_last_n
    if window is None:
        window = REPEAT_LAST_N
    return Sampling(
        max_tokens=most,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=None if options.seed == -1 else options.seed,
        stop=options.stop,
        repetition_penalty=1.0 if window == 0 else penalty,
        repetition_context_size=max(window, 0),
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
    )


def _logprobs(body: Common) -> int | None:
    """Return how many alternatives to report for each token; None if no logprobs are wanted."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _thinking(body: Common) -> Thinking:
    """Return the wishes about thoughts."""
    if isinstance(body.think, str):
        return Thinking(True, body.think)
    return Thinking(body.think)


async def _loaded(front: ServerFront, body: Common, renderer: type[OllamaRenderer]) -> Loaded:
    """Return the reply to a request to load the model, or with `keep_alive` 0 to unload it once nobody uses it.

    Raises InvalidRequest for the latter on a server that keeps its model, and Forbidden for a key without the scope
    admin.
    """
    kept = keep_alive_seconds(body.keep_alive)
    model = await select(front, body.model)
    unloads = kept == 0
    if unloads and not front.idling.is_on:
        raise InvalidRequest(
            "keep_alive is 0, and this server keeps its model in memory: start it with --idle-unload-s",
            param="keep_alive",
            code="unsupported_parameter",
        )
    if unloads:
        CALLER.get().check_scope("admin", "unloading the model")
    else:
        async with front.client.in_use():
            pass
    front.idling.keep(kept)
    name = front.models.label(model.ref)
    said = renderer(name, 0.0, 0.0).said("", "", ())
    return {"model": name, "created_at": now(), **said, "done": True, "done_reason": "unload" if unloads else "load"}
