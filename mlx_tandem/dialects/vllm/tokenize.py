"""The handlers of `/tokenize`, `/detokenize` and `/tokenizer_info`, whose replies have vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_tandem.dialects.vllm.bodies import DetokenizeBody, TokenizeBody
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.chats import ChatRequest
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.parts import Part
from mlx_tandem.generation.tools.offer import tools_of
from mlx_tandem.strict_json import dumps

Pieces = Sequence[bytes]
"""The body of a reply in pieces, so that long parts are not copied into one text."""


async def tokenize(front: Front, body: TokenizeBody) -> Pieces:
    """Return the token ids of a prompt or a conversation, as the body of the reply."""
    info = front.client.check_ready()
    await front.models.select(body.model)
    pieces = bool(body.return_token_strs)
    if body.messages is None:
        parts, begins = _prompt(body)
        del body  # The text may wait long for its turn, and `parts` already have a copy of it.
        found = await front.prompts.listing(parts, "prompt", begins=begins, pieces=pieces)
    else:
        found = await _conversation(body).listing(front, pieces=pieces)
    head = b'{"count":%d,"max_model_len":%d,"tokens":' % (found.count, info.max_model_len)
    return (head, found.tokens, b',"token_strs":', found.pieces or b"null", b"}")


async def detokenize(front: Front, body: DetokenizeBody) -> Pieces:
    """Return the text of token ids, as the body of the reply."""
    info = front.client.check_ready()
    await front.models.select(body.model)
    return (b'{"prompt":', await front.prompts.text_of(body.tokens, info.vocab_size, "tokens"), b"}")


def tokenizer_info(front: Front) -> bytes:
    """Return the special tokens and the chat template, with which clients can write prompts, as the reply's body."""
    texts, template = front.tokenizer.special_texts(), front.prompts.template
    return dumps(
        {
            **{name: texts.get(name) for name in ("bos_token", "eos_token", "pad_token")},
            "chat_template": template.source,
        }
    )


def _prompt(body: TokenizeBody) -> tuple[list[Part], bool]:
    """Return the prompt in parts, and whether it gets special tokens."""
    if body.prompt is None:
        raise InvalidRequest("prompt or messages is required", param="prompt", code="missing_required_parameter")
    for name in ("add_generation_prompt", "tools", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} is for messages, not for a prompt", param=name)
    return [(body.prompt, False)], body.add_special_tokens is not False


def _conversation(body: TokenizeBody) -> ChatRequest:
    """Return the conversation."""
    if body.prompt is not None:
        raise InvalidRequest("either prompt or messages can be given, not both", param="prompt")
    if body.add_special_tokens:
        raise InvalidRequest("messages get their special tokens from the template", param="add_special_tokens")
    return ChatRequest(
        body.messages or [],
        tools_of(body.tools, None, None),
        variables=body.chat_template_kwargs or {},
        adds_prompt=body.add_generation_prompt is not False,
    )
