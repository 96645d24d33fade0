"""Making the plans of responses from their bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from msgspec import to_builtins

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.openai.collect import check_metadata
from mlx_tandem.dialects.openai.logprobs import ChatLogprobs
from mlx_tandem.dialects.plan import Plan
from mlx_tandem.dialects.response_store import Conversation
from mlx_tandem.dialects.responses.bodies import Format, ResponseBody, Text, logprobs_of
from mlx_tandem.dialects.responses.items import ToolList, added_tools, chat_form, input_items
from mlx_tandem.dialects.responses.renderer import Item, ResponseRenderer, new_id
from mlx_tandem.dialects.responses.tools import offer
from mlx_tandem.dialects.turns import Turns
from mlx_tandem.errors import InvalidRequest, renamed
from mlx_tandem.generation.caller import CALLER
from mlx_tandem.generation.chats import ChatRequest, Thinking
from mlx_tandem.generation.grammar.constraint import Constraint
from mlx_tandem.generation.grammar.fields import json_constraint
from mlx_tandem.generation.prompted_chats import prompted_chat
from mlx_tandem.generation.sampling import Sampling, check_logprobs, sampling_params, text_options
from mlx_tandem.types import SamplingParams

MANY_ITEMS = 64
"""Most items of a conversation that does not wait for its turn to be put together."""


async def plan_response(front: ServerFront, body: ResponseBody) -> Plan:
    """Return the plan of a response. Raises InvalidRequest and NotFound."""
    model = await front.models.select(body.model, body.user)
    check_metadata(body.metadata)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    conversation, turns, added = await _conversation(front, body)
    offered = offer([("tools", body.tools or []), *added], body.tool_choice, body.parallel_tool_calls)
    effort = None if body.reasoning is None else body.reasoning.effort
    with renamed(messages="input", reasoning_effort="reasoning.effort"):
        variables = body.chat_template_kwargs or {}
        thinking = Thinking(None, effort)
        asked = ChatRequest(turns.messages, offered.tools, thinking, variables, fields=turns.fields)
        chat = await asked.chat(front)
        sampling = Sampling(
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            repetition_penalty=body.repetition_penalty,
        )
        longest = None if body.max_output_tokens is None else ("max_output_tokens", body.max_output_tokens)
        logprobs = logprobs_of(body)
        check_logprobs(front, "top_logprobs", logprobs)
        params = sampling_params(front, sampling, len(chat.prompt), "input", logprobs=logprobs, max_tokens=longest)
    prompted = await prompted_chat(front, model, chat, params, text_options(sampling), _constraint(body))

    loop, owner = asyncio.get_running_loop(), CALLER.get().tenant

    def keep(id: str, whole: bytes, output: Sequence[Item], deltas: bytes) -> None:
        # A long reply is written on another thread, and the store belongs to the loop.
        loop.call_soon_threadsafe(front.responses.put, id, whole, conversation, output, deltas, owner)

    settings = _settings(body, front.models.label(model.ref), params)
    renderer = ResponseRenderer(
        new_id(),
        settings,
        None if body.store is False else keep,
        namespaces=offered.namespaces,
        customs=offered.customs,
        logprobs=None if logprobs is None else ChatLogprobs(front.tokenizer),
    )
    skipped = (*offered.skipped, *turns.skipped)
    return Plan(prompted, model, renderer, bool(body.stream), skipped=skipped)


async def _conversation(front: ServerFront, body: ResponseBody) -> tuple[Conversation, Turns, list[ToolList]]:
    """Return the conversation that ends with the request's input, as it is stored and as it is sent to the template.

    The lists of tools among its items come last. It may be as large as a body that has all of it. Raises
    InvalidRequest, NotFound and TooLarge.
    """
    server, responses = front.config.server, front.responses
    most = max(server.max_request_bytes, server.max_image_request_bytes if front.reads_images else 0)
    earlier = Conversation()
    if body.previous_response_id is not None:
        earlier = responses.conversation(body.previous_response_id, most)
    given = len(body.input) if isinstance(body.input, list) else 0
    async with responses.turn if given + earlier.count > MANY_ITEMS else nullcontext():
        await asyncio.sleep(0)
        items = input_items(body.input, responses.item, server.max_request_bytes)
        if not items and not earlier.count:
            raise InvalidRequest("input is required", param="input", code="missing_required_parameter")
        before = await responses.decoded(earlier)
        await asyncio.sleep(0)
        every = [*before, *items]
        turns = chat_form(body.instructions, every, before=len(before), sees=front.reads_images)
    conversation = earlier if body.store is False else earlier.followed_by(items)
    return conversation, turns, added_tools(every, before=len(before))


def _constraint(body: ResponseBody) -> Constraint | None:
    """Return what the answer must match; None for any text. Raises InvalidRequest for a schema that is missing."""
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return json_constraint("text.format")
    if form.schema_ is None:
        raise InvalidRequest(
            "text.format.schema is required", param="text.format.schema", code="missing_required_parameter"
        )
    return json_constraint("text.format", form.schema_, ".schema")


def _settings(body: ResponseBody, model: str, params: SamplingParams) -> dict[str, Any]:
    """Return the members of a response that repeat its request."""
    reasoning, text = body.reasoning, body.text or Text()
    form = text.format or Format("text")
    return {
        "model": model,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "text": {"format": _without_nulls(form), "verbosity": text.verbosity or "medium"},
        "truncation": "disabled",
        "background": False,
        "store": body.store is not False,
        "metadata": body.metadata or {},
        "service_tier": "default",
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "user": body.user,
    }


def _without_nulls(form: Format) -> dict[str, Any]:
    """Return the form of an answer as a request gives it."""
    return {name: value for name, value in to_builtins(form).items() if value is not None}
