"""Requests for one answer to a chat, which the dialects besides OpenAI's chats have in common."""

from __future__ import annotations

from mlx_tandem.generation.adapters.model_names import Selection
from mlx_tandem.generation.chat_constraints import chat_constraint
from mlx_tandem.generation.chats import Chat
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.grammar.constraint import Constraint
from mlx_tandem.generation.output import TextOptions
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.types import SamplingParams


async def prompted_chat(
    front: Front,
    model: Selection,
    chat: Chat,
    params: SamplingParams,
    text: TextOptions,
    constraint: Constraint | None = None,
) -> Prompted:
    """Return the request for one answer, which has to match `constraint`. Raises InvalidRequest naming the field."""
    made = chat_constraint(front, chat, constraint)
    return Prompted(
        [chat.prompt],
        [model.ref],
        chat.params(params),
        text=chat.text(text),
        parser=chat.parser,
        most_calls=chat.most_calls,
        images=chat.images,
        grammar=None if made is None else await front.constraints.grammar(made),
    )
