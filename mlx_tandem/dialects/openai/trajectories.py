"""Requests that go on with a trajectory: their prompts begin with the tokens that were given and drawn before."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.openai.bodies import ChatBody, Common, CompletionBody
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.chats import ChatRequest
from mlx_tandem.generation.continued_chats import Kept, continued, digest
from mlx_tandem.training.live.recorder import Continued, Talk


async def chat_prompt(
    front: ServerFront, body: ChatBody, asked: ChatRequest, prompt: Sequence[int]
) -> tuple[list[int], Talk | None]:
    """Return the prompt of a chat, which is `prompt` as the template writes it, and its place in a conversation.

    Raises InvalidRequest and NotFound, and Conflict for a conversation that does not go on with its trajectory.
    """
    plain = asked.adds_prompt and not asked.continues
    talk = Talk(len(asked.messages) if plain else 0, digest(prompt))
    if body.trajectory_id is None:
        return list(prompt), talk if body.collect_trajectory else None
    if not plain:
        field = "continue_final_message" if asked.continues else "add_generation_prompt"
        raise InvalidRequest(f"{field} cannot be used together with trajectory_id", param=field)
    kept = _kept(front, body)
    whole = await continued(front, asked, prompt, kept[0])
    return whole, talk._replace(continued=kept[1])


async def text_prompt(front: ServerFront, body: CompletionBody, prompts: Sequence[Sequence[int]]) -> Talk | None:
    """Return the place in a conversation of a text completion that goes on with a trajectory; None for others.

    Raises InvalidRequest and NotFound, and Conflict for a prompt that does not begin with the trajectory's tokens.
    """
    if body.trajectory_id is None:
        return None
    if len(prompts) != 1:
        raise InvalidRequest("a trajectory goes on with one prompt", param="prompt")
    kept, going = _kept(front, body)
    await continued(front, ChatRequest([]), prompts[0], kept._replace(messages=0))
    return Talk(0, b"", going)


def _kept(front: ServerFront, body: Common) -> tuple[Kept, Continued]:
    """Return the trajectory that the request goes on with. Raises NotFound, Conflict and InvalidRequest."""
    assert body.trajectory_id is not None
    learner = front.check_learning("trajectory_id", "trajectory_id").keeping(body.trajectory_id).learner
    found = learner.later.get(body.trajectory_id)
    for field, wrong in (
        ("n", (body.n or 1) != 1),
        ("truncate_prompt_tokens", body.truncate_prompt_tokens is not None),
        ("collect_trajectory", body.collect_trajectory is False),
    ):
        if wrong:
            raise InvalidRequest(f"{field} cannot be {getattr(body, field)!r} with trajectory_id", param=field)
    exchanges = found.exchanges
    last, tokens = exchanges[-1], [t for e in exchanges for part in (e.given, e.tokens) for t in part]
    going = Continued(body.trajectory_id, len(exchanges), len(tokens), found.begun.temperature, found.begun.truncation)
    return Kept(tokens, last.tokens, last.messages, last.rendered), going
