"""The sampling routes of `trl vllm-serve`: `/generate/`, `/chat/` and `/get_sequence_logprobs/`."""

from __future__ import annotations

import secrets
from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Struct, structs

from mlx_tandem import limits
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.openai.bodies import input_prompts
from mlx_tandem.dialects.openai.logprobs import LOWEST
from mlx_tandem.dialects.plan import Plan, Renderer
from mlx_tandem.dialects.rollouts.sampling import TokenSampling, drawn, policy, rollout
from mlx_tandem.errors import InvalidRequest, renamed
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.chats import ChatRequest
from mlx_tandem.generation.events import Usage
from mlx_tandem.generation.output import TextOptions
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.generation.sampling import check_logprobs
from mlx_tandem.generation.tools.offer import tools_of
from mlx_tandem.limits import bounds
from mlx_tandem.strict_json import dumps
from mlx_tandem.training.live.recorder import Outcome
from mlx_tandem.types import SamplingParams, TokenLogprob


class TRLSampling(Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters that TRL sends with prompts and with conversations. `generation_kwargs` takes precedence."""

    n: Annotated[int, bounds("n")] = 1
    repetition_penalty: float = 1.0
    temperature: Annotated[float, bounds("temperature")] = 1.0
    top_p: Annotated[float, bounds("top_p")] = 1.0
    top_k: Annotated[int, bounds("top_k")] = -1
    min_p: Annotated[float, bounds("min_p")] = 0.0
    max_tokens: int = 16
    logprobs: Annotated[int, bounds("logprobs")] | None = 0
    structured_outputs_regex: str | None = None
    guided_decoding_regex: str | None = None  # the name in older versions
    generation_kwargs: TokenSampling | None = None


class TRLGenerateBody(TRLSampling, kw_only=True, forbid_unknown_fields=True):
    """The body of a request with prompts as texts or as token ids."""

    prompts: list[str | list[int]]
    images: None = None


class TRLChatBody(TRLSampling, kw_only=True, forbid_unknown_fields=True):
    """The body of a request with conversations."""

    messages: list[list[dict[str, Any]]]
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[Any] | None = None  # shown to the model; the caller reads its calls


class SequencesBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for the logprobs of given tokens. `prompt_lengths` says where each completion begins."""

    sequences: list[list[int]]
    prompt_lengths: list[int]
    top_logprobs: int = 100
    temperature: float = 1.0  # the logprobs are those of the model's own distribution
    response_format: Literal["json", "binary"] = "json"


async def plan_generate(front: ServerFront, body: TRLGenerateBody) -> Plan:
    """Return the plan of a request with prompts. Raises InvalidRequest."""
    model = await policy(front, None)
    prompts = await input_prompts(front, list(body.prompts), "prompts")
    with renamed(**_NAMES):
        prompted = await rollout(front, _sampling(body), model, prompts, "prompts")
    return Plan(prompted, model, TRLRenderer(prompted))


async def plan_chat(front: ServerFront, body: TRLChatBody) -> Plan:
    """Return the plan of a request with conversations. Raises InvalidRequest."""
    model = await policy(front, None)
    if not 0 < len(body.messages) <= limits.MAX_PROMPTS:
        raise InvalidRequest(f"messages has 1 to {limits.MAX_PROMPTS} conversations", param="messages")
    prompts: list[list[int]] = []
    for messages in body.messages:
        asked = ChatRequest(messages, tools_of(body.tools, None, None), variables=body.chat_template_kwargs)
        if asked.images:
            raise InvalidRequest("images go to /v1/chat/completions", param="messages")
        prompts.append(list((await asked.chat(front)).prompt))
    with renamed(**_NAMES):
        prompted = await rollout(front, _sampling(body), model, prompts, "messages")
    return Plan(prompted, model, TRLRenderer(prompted))


_NAMES = {"guided_regex": "structured_outputs_regex"}


def _sampling(body: TRLSampling) -> TokenSampling:
    """Return the parameters, those of `generation_kwargs` before the others."""
    shared = [name for name in TRLSampling.__struct_fields__ if name in TokenSampling.__struct_fields__]
    own = TokenSampling(**{name: getattr(body, name) for name in shared})
    own.guided_regex = body.structured_outputs_regex or body.guided_decoding_regex
    for name, value in structs.asdict(body.generation_kwargs or TokenSampling()).items():
        if value is not None:
            setattr(own, name, value)
    return own


class TRLRenderer(Renderer):
    """A writer of the token ids of prompts and completions, with the logprobs of the tokens, the highest first."""

    def __init__(self, prompted: Prompted):
        self.id = f"trl-{secrets.token_hex(12)}"
        self._prompted = prompted

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body."""
        body: dict[str, Any] = {
            "prompt_ids": self._prompted.prompts,
            "completion_ids": [answer.tokens for answer in answers.choices],
            "logprobs": None,
            "logprob_token_ids": None,
        }
        if self._prompted.params.logprobs is not None:
            found = [
                [self._best(token, lp) for token, lp in zip(answer.tokens, answer.logprobs, strict=True)]
                for answer in answers.choices
            ]
            body["logprobs"] = [[[p for _, p in best] for best in answer] for answer in found]
            body["logprob_token_ids"] = [[[t for t, _ in best] for best in answer] for answer in found]
        return dumps(body)

    def _best(self, token: int, logprob: TokenLogprob) -> list[tuple[int, float]]:
        """Return the drawn token and the alternatives, with their logprobs."""
        others = [(t, max(p, LOWEST)) for t, p in logprob.top if t != token]
        return sorted([(token, drawn(self._prompted.params, logprob)), *others], key=lambda pair: -pair[1])


# -- the logprobs of given tokens -------------------------------------------------------------------------------


async def plan_sequences(front: ServerFront, body: SequencesBody) -> Plan:
    """Return the plan of a request that scores sequences. The one token that the engine has to draw is dropped."""
    model = await policy(front, None)
    limits.check("prompt_logprobs", body.top_logprobs, "top_logprobs")
    check_logprobs(front, "top_logprobs", body.top_logprobs)
    if body.temperature != 1:
        raise InvalidRequest("temperature can only be 1 for the logprobs of given tokens", param="temperature")
    sequences = await input_prompts(front, list(body.sequences), "sequences")
    if len(body.prompt_lengths) != len(sequences):
        message = f"prompt_lengths has {len(body.prompt_lengths)} entries for {len(sequences)} sequences"
        raise InvalidRequest(message, param="prompt_lengths")
    for i, (length, sequence) in enumerate(zip(body.prompt_lengths, sequences, strict=True)):
        if not 1 <= length <= len(sequence):
            where = f"prompt_lengths[{i}]"
            raise InvalidRequest(f"{where} must be 1 to {len(sequence)}, the length of its sequence", param=where)
    most = front.max_tokens(max(map(len, sequences)), 1, "max_tokens", "sequences")
    params = SamplingParams(max_tokens=most, temperature=0.0, prompt_logprobs=body.top_logprobs)
    prompted = Prompted(sequences, [model.ref] * len(sequences), params, text=TextOptions(silent=True))
    return Plan(prompted, model, SequencesRenderer(prompted, body))


class SequencesRenderer(Renderer):
    """A writer of the logprobs of completions' tokens and of their alternatives, as JSON or as arrays in base64."""

    def __init__(self, prompted: Prompted, body: SequencesBody):
        self.id = f"trl-{secrets.token_hex(12)}"
        self._sequences, self._body = prompted.prompts, body

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body."""
        found = [
            list(zip(sequence[length:], read.logprobs[length - 1 :], strict=True))
            for sequence, length, read in zip(self._sequences, self._body.prompt_lengths, answers.prompts, strict=True)
        ]
        return self._binary(found) if self._body.response_format == "binary" else self._json(found)

    def _json(self, found: Sequence[Sequence[tuple[int, TokenLogprob]]]) -> bytes:
        """Return lists: of each token, its alternatives by rank, and the token itself."""
        ranked = [[self._ranked(token, lp) for token, lp in own] for own in found]
        return dumps(
            {
                "logprobs": [[[p for _, p in best] for best in own] for own in ranked],
                "logprob_token_ids": [[[t for t, _ in best] for best in own] for own in ranked],
            }
        )

    def _ranked(self, token: int, logprob: TokenLogprob) -> list[tuple[int, float]]:
        """Return the most likely tokens, and the given one if it is not among them."""
        top = [(t, max(p, LOWEST)) for t, p in logprob.top[: self._body.top_logprobs]]
        return top if any(t == token for t, _ in top) else [*top, (token, max(logprob.model, LOWEST))]

    def _binary(self, found: Sequence[Sequence[tuple[int, TokenLogprob]]]) -> bytes:
        """Return arrays [sequences, longest completion, top_logprobs or 1] of float32 and int32.

        Where there is no token, a logprob is -inf and an id 0.
        """
        import numpy as np  # Its import takes time and memory.

        k, lengths = self._body.top_logprobs, [len(own) for own in found]
        shape = (len(found), max(lengths), k)
        best, best_ids = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int32)
        own, own_ids = np.full((*shape[:2], 1), -np.inf, np.float32), np.zeros((*shape[:2], 1), np.int32)
        for i, pairs in enumerate(found):
            for t, (token, lp) in enumerate(pairs):
                own[i, t, 0], own_ids[i, t, 0] = lp.model, token
                for j, (other, p) in enumerate(lp.top[:k]):
                    best[i, t, j], best_ids[i, t, j] = p, other
        arrays = {"logprobs": best, "token_ids": best_ids, "actual_logprobs": own, "actual_token_ids": own_ids}
        encoded = {f"{name}_b64": b64encode(array.tobytes()).decode() for name, array in arrays.items()}
        return dumps(encoded | {"shape": shape, "completion_lengths": lengths})
