"""vLLM's `/inference/v1/generate`: token ids in, token ids out, without any text."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from mlx_tandem import limits
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.openai.bodies import StreamOptions
from mlx_tandem.dialects.openai.errors import error_body
from mlx_tandem.dialects.openai.logprobs import LOWEST, prompt_scores, token_name
from mlx_tandem.dialects.openai.renderer import DONE, usage_object
from mlx_tandem.dialects.plan import Plan, Renderer
from mlx_tandem.dialects.rollouts.sampling import TokenSampling, drawn, policy, rollout, within
from mlx_tandem.dialects.sse import COMMENT
from mlx_tandem.errors import InvalidRequest, TandemError
from mlx_tandem.generation.answers import Answer, Answers
from mlx_tandem.generation.events import Finish, TextDelta, Usage
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.limits import bounds
from mlx_tandem.strict_json import dumps
from mlx_tandem.training.live.recorder import Outcome

MAX_REQUEST_ID = 128
"""Most characters of the id that a client gives its request."""


class TokensBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request whose prompt is token ids."""

    token_ids: list[int]
    sampling_params: TokenSampling
    model: str | None = None
    request_id: Annotated[str, Meta(max_length=MAX_REQUEST_ID)] | None = None  # of the reply
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, bounds("priority")] | None = None
    return_token_ids: bool | None = None  # the reply repeats the prompt's
    cache_salt: str | None = None  # without effect: what is cached belongs to one version of one adapter in any case
    features: None = None  # images go to /v1/chat/completions
    kv_transfer_params: dict[str, Any] | None = None


async def plan_tokens(front: ServerFront, body: TokensBody) -> Plan:
    """Return the plan of a request whose prompt is token ids. Raises InvalidRequest and NotFound."""
    if body.kv_transfer_params:
        raise InvalidRequest("kv_transfer_params is not supported", param="kv_transfer_params")
    model = await policy(front, body.model)
    info = front.client.check_ready()
    if not body.token_ids:
        raise InvalidRequest("token_ids is empty", param="token_ids")
    prompt = list(limits.check_token_ids(body.token_ids, info.vocab_size, "token_ids"))
    sampling = body.sampling_params
    if body.priority is not None:
        sampling.priority = body.priority
    if body.stream and sampling.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="sampling_params.prompt_logprobs")
    with within("sampling_params"):
        prompted = await rollout(front, sampling, model, [prompt], "token_ids")
    return Plan(prompted, model, TokensRenderer(front, prompted, body), stream=bool(body.stream))


class TokensRenderer(Renderer):
    """A writer of the token ids of choices, as one JSON body or as a stream of events."""

    keepalive = COMMENT

    def __init__(self, front: Front, prompted: Prompted, body: TokensBody):
        self.id = body.request_id or f"generate-tokens-{secrets.token_hex(12)}"
        self._tokenizer = front.tokenizer
        self._prompted = prompted
        self._body = body

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body."""
        prompt, asked = self._prompted.prompts[0], self._body.sampling_params.prompt_logprobs
        choices = [self._choice(i, answer, answer.reason) for i, answer in enumerate(answers.choices)]
        body: dict[str, Any] = {"request_id": self.id, "choices": choices, "prompt_logprobs": None}
        if asked is not None:
            body["prompt_logprobs"] = prompt_scores(self._tokenizer, prompt, answers.prompts[0].logprobs, asked)
        if self._body.return_token_ids:
            body["prompt_token_ids"] = prompt
        return dumps(body | {"kv_transfer_params": None, "usage": usage_object(usage)})

    def open(self) -> bytes:
        """Return a comment, so that the stream begins before the prompt is read."""
        return COMMENT

    def text(self, event: TextDelta) -> bytes:
        """Return the event for new tokens; no bytes for a piece of text without tokens of its own."""
        return self._event([self._choice(event.choice, event, None)]) if event.tokens else b""

    def finish(self, event: Finish) -> bytes:
        """Return the event for the end of a choice."""
        return self._event([self._choice(event.choice, event, event.reason)])

    def close(self, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the end of the stream, before it the usage if the request asks for it."""
        options = self._body.stream_options
        counts = self._event([], usage=usage_object(usage)) if options is not None and options.include_usage else b""
        return counts + DONE

    def error(self, error: TandemError) -> bytes:
        """Return the event with the error object."""
        return b"data: " + error_body(error) + b"\n\n"

    def _event(self, choices: Sequence[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + dumps({"request_id": self.id, "choices": choices} | more) + b"\n\n"

    def _choice(self, index: int, said: Answer | TextDelta | Finish, reason: str | None) -> dict[str, Any]:
        """Return a choice, or the next part of one."""
        logprobs = None if self._prompted.params.logprobs is None else {"content": self._content(said)}
        choice = {"index": index, "logprobs": logprobs, "finish_reason": reason, "token_ids": said.tokens}
        return choice if self._prompted.version is None else choice | {"versions": said.versions}

    def _content(self, said: Answer | TextDelta | Finish) -> list[dict[str, Any]]:
        """Return the entry of each token. Tokens are named by their ids."""
        params = self._prompted.params
        return [
            _entry(token, drawn(params, lp)) | {"top_logprobs": [_entry(t, max(p, LOWEST)) for t, p in lp.top]}
            for token, lp in zip(said.tokens, said.logprobs, strict=True)
        ]


def _entry(token: int, logprob: float) -> dict[str, Any]:
    return {"token": token_name(token), "logprob": logprob, "bytes": None}
