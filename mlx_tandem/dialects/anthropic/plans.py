"""Making the plans of messages from their bodies, and counting their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_tandem.dialects.anthropic.bodies import MessagesBody, TokensBody
from mlx_tandem.dialects.anthropic.messages import chat_form, is_prefill
from mlx_tandem.dialects.anthropic.renderer import AtLimit, MessageRenderer
from mlx_tandem.dialects.anthropic.tools import offer
from mlx_tandem.dialects.plan import Plan
from mlx_tandem.errors import renamed
from mlx_tandem.generation.chats import ChatRequest, Thinking
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.grammar.constraint import Constraint
from mlx_tandem.generation.grammar.fields import json_constraint
from mlx_tandem.generation.prompted_chats import prompted_chat
from mlx_tandem.generation.sampling import Sampling, sampling_params, text_options
from mlx_tandem.strict_json import dumps

_FIELDS = {
    "enable_thinking": "thinking",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""The fields of this dialect by their names in errors about thoughts."""


async def plan_message(front: Front, body: MessagesBody) -> Plan:
    """Return the plan of a message. Raises InvalidRequest and NotFound.

    A prompt may leave less room than `max_tokens`; the answer then ends where the context ends, and says so.
    """
    model = await front.models.select(body.model, None if body.metadata is None else body.metadata.user_id)
    with renamed(**_FIELDS):
        request, skipped = _chat_request(front, body)
        chat = await request.chat(front)
    room = front.room(front.client.check_ready()) - len(chat.prompt)
    at_limit: AtLimit = "max_tokens" if body.max_tokens <= room else "model_context_window_exceeded"
    silent = body.max_tokens == 0
    sampling = Sampling(
        max_tokens=min(body.max_tokens, max(room, 1)),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
    )
    with renamed(stop="stop_sequences"):
        params = sampling_params(front, sampling, len(chat.prompt), "messages", echo=silent)
        text = text_options(sampling, echo=silent)
    prompted = await prompted_chat(front, model, chat, params, text, _constraint(body))
    renderer = MessageRenderer(
        front.models.label(model.ref),
        len(chat.prompt),
        at_limit,
        shows_thoughts=body.thinking is None or body.thinking.display != "omitted",
    )
    return Plan(prompted, model, renderer, bool(body.stream), skipped=skipped)


async def count_tokens(front: Front, body: TokensBody) -> Sequence[bytes]:
    """Return the number of the tokens that the prompt of this conversation would have, as the body of the reply."""
    front.client.check_ready()
    await front.models.select(body.model)
    with renamed(**_FIELDS):
        request, _ = _chat_request(front, body)
        found = await request.listing(front)
    return (dumps({"input_tokens": found.count}),)


def _chat_request(front: Front, body: TokensBody) -> tuple[ChatRequest, tuple[str, ...]]:
    """Return the conversation with everything that decides how it is rendered and how its answers are read.

    The second value has the fields of the tools and blocks that are left out.
    """
    turns = chat_form(body.system, body.messages, sees=front.reads_images)
    tools, skipped = offer(body.tools, body.tool_choice)
    continues = is_prefill(turns.messages)
    request = ChatRequest(
        turns.messages,
        tools,
        _thinking(front, body),
        adds_prompt=not continues,
        continues=continues,
        fields=turns.fields,
    )
    return request, (*skipped, *turns.skipped)


def _constraint(body: TokensBody) -> Constraint | None:
    """Return what the answer must match; None for any text."""
    if body.output_config is not None and body.output_config.format is not None:
        return json_constraint("output_config.format", body.output_config.format.schema_, ".schema")
    if body.output_format is not None:
        return json_constraint("output_format", body.output_format.schema_, ".schema")
    return None


def _thinking(front: Front, body: TokensBody) -> Thinking:
    """Return the wishes about thoughts. A request that says nothing about them gets none if the model allows it."""
    asked = body.thinking
    effort = None if body.output_config is None else body.output_config.effort
    if asked is None:
        return Thinking(False if front.reading.switches else None, effort)
    budget = asked.budget_tokens
    if isinstance(body, MessagesBody) and budget is not None and budget >= body.max_tokens:
        budget = None  # It has no effect.
    return Thinking(asked.type != "disabled", effort, budget)
