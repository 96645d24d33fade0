"""`/pooling` in vLLM's form, by which reward models score texts and answers."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Sequence

from mlx_tandem.dialects.openai.bodies import input_prompts
from mlx_tandem.dialects.plan import Plan, Renderer
from mlx_tandem.dialects.vllm.bodies import PoolingBody
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.chats import ChatRequest
from mlx_tandem.generation.events import Usage
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.reward_models import head_of, scores, scoring_request, to_last_end
from mlx_tandem.generation.tools.offer import tools_of
from mlx_tandem.strict_json import dumps
from mlx_tandem.training.live.recorder import Outcome


async def plan_pooling(front: Front, body: PoolingBody) -> Plan:
    """Return the plan of a request for scores. Raises InvalidRequest and NotFound.

    A text is scored at its last token, and a conversation at the token that ends its last answer.
    """
    model = await front.models.select(body.model, body.user)
    label = front.models.label(model.ref)
    head = head_of(model.entry, label, "model")
    assert model.entry is not None
    param = "input" if body.messages is None else "messages"
    texts = await _texts(front, body)
    for text in texts:
        front.max_tokens(len(text), 1, "max_tokens", param)
    prompted = scoring_request(front.client.check_ready(), texts, model.entry, priority=body.priority or 0)
    return Plan(prompted, model, PoolingRenderer(label, head))


async def _texts(front: Front, body: PoolingBody) -> Sequence[Sequence[int]]:
    """Return the token ids of what is scored."""
    if body.messages is None:
        if body.input is None:
            raise InvalidRequest("input or messages is required", param="input", code="missing_required_parameter")
        for name in ("tools", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise InvalidRequest(f"{name} is for messages, not for input", param=name)
        return await input_prompts(front, body.input, "input")
    if body.input is not None:
        raise InvalidRequest("either input or messages can be given, not both", param="input")
    if not body.messages or body.messages[-1].get("role") != "assistant":
        raise InvalidRequest("the last message has to be the assistant's, which is scored", param="messages")
    tools = tools_of(body.tools, None, None)
    asked = ChatRequest(body.messages, tools, variables=body.chat_template_kwargs or {}, adds_prompt=False)
    if asked.images:
        raise InvalidRequest("reward models read no images", param="messages")
    return [to_last_end(front, (await asked.chat(front)).prompt)]


class PoolingRenderer(Renderer):
    """A writer of vLLM's list of pooled data, which is one score for each text."""

    def __init__(self, model: str, head: array[float]):
        self.id = f"pool-{secrets.token_hex(12)}"
        self._model = model
        self._head = head

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body."""
        data = [
            {"index": i, "object": "pooling", "data": [score]} for i, score in enumerate(scores(answers, self._head))
        ]
        counts = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt, "completion_tokens": 0}
        head = {"id": self.id, "object": "list", "created": int(time.time()), "model": self._model}
        return dumps(head | {"data": data, "usage": counts})
