"""`POST /generate` in two shapes: that of vLLM's simple API server, and SGLang's. The body decides which is meant."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Struct

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.openai.bodies import input_prompts
from mlx_tandem.dialects.openai.logprobs import LOWEST
from mlx_tandem.dialects.plan import Plan, Renderer
from mlx_tandem.dialects.rollouts.sampling import TokenSampling, drawn, policy, rollout
from mlx_tandem.errors import InvalidRequest, renamed
from mlx_tandem.generation.answers import Answer, Answers
from mlx_tandem.generation.events import Usage
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.limits import bounds
from mlx_tandem.strict_json import dumps
from mlx_tandem.training.live.recorder import Outcome


class TokensPrompt(Struct, forbid_unknown_fields=True):
    """A prompt of vLLM's as an object."""

    prompt_token_ids: list[int]


class SGLangSampling(Struct, kw_only=True, forbid_unknown_fields=True):
    """SGLang's sampling parameters that have a meaning here."""

    max_new_tokens: int | None = None
    min_new_tokens: Annotated[int, bounds("min_tokens")] | None = None
    temperature: Annotated[float, bounds("temperature")] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    top_k: Annotated[int, bounds("top_k")] | None = None
    min_p: Annotated[float, bounds("min_p")] | None = None
    frequency_penalty: Annotated[float, bounds("frequency_penalty")] | None = None
    presence_penalty: Annotated[float, bounds("presence_penalty")] | None = None
    repetition_penalty: float | None = None
    n: Annotated[int, bounds("n")] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # without effect
    no_stop_trim: bool | None = None
    json_schema: str | None = None
    regex: str | None = None
    sampling_seed: Annotated[int, bounds("seed")] | None = None


class GenerateBody(TokenSampling, kw_only=True, forbid_unknown_fields=True):
    """The body of `/generate`: `prompt` with parameters beside it (vLLM), or `input_ids` or `text` (SGLang)."""

    prompt: str | TokensPrompt | None = None
    stream: Literal[False] | None = None
    model: str | None = None
    # SGLang's fields.
    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: SGLangSampling | None = None
    lora_path: str | None = None  # the name of an adapter
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, bounds("logprobs")] | None = None
    return_text_in_logprobs: bool | None = None
    logprob_start_len: Literal[-1] | None = None  # the logprobs of prompts come from vLLM's shape
    rid: str | None = None  # of the reply


_SGLANG = (
    "input_ids", "text", "sampling_params", "lora_path", "return_logprob", "top_logprobs_num",
    "return_text_in_logprobs", "logprob_start_len", "rid",
)  # fmt: skip
"""The fields that only SGLang's shape has."""

_NAMES = {
    "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed",
    "guided_json": "json_schema", "guided_regex": "regex", "include_stop_str_in_output": "no_stop_trim",
}  # fmt: skip
"""SGLang's names of parameters that have another one here."""


async def plan_generate(front: ServerFront, body: GenerateBody) -> Plan:
    """Return the plan of a request in either shape. Raises InvalidRequest and NotFound."""
    if body.prompt is not None:
        _refuse(body, _SGLANG, "beside prompt")
        return await _plan_vllm(front, body)
    if body.input_ids is None and body.text is None:
        message = "prompt (as to vLLM), or input_ids or text (as to SGLang) is required"
        raise InvalidRequest(message, param="prompt", code="missing_required_parameter")
    if body.input_ids is not None and body.text is not None:
        raise InvalidRequest("either input_ids or text can be given, not both", param="text")
    _refuse(body, TokenSampling.__struct_fields__, "here: it belongs into sampling_params")
    return await _plan_sglang(front, body)


def _refuse(body: GenerateBody, names: Sequence[str], where: str) -> None:
    """Raise InvalidRequest for the first of these fields that is given."""
    for name in names:
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} cannot be given {where}", param=name)


# -- vLLM's shape -----------------------------------------------------------------------------------------------


async def _plan_vllm(front: ServerFront, body: GenerateBody) -> Plan:
    model = await policy(front, body.model)
    asked = body.prompt
    assert asked is not None
    given: Any = asked.prompt_token_ids if isinstance(asked, TokensPrompt) else asked
    param = "prompt.prompt_token_ids" if isinstance(asked, TokensPrompt) else "prompt"
    (prompt,) = await input_prompts(front, given, param)
    text = given if isinstance(given, str) else front.tokenizer.decode(prompt, show_special=True)
    prompted = await rollout(front, body, model, [prompt], param)
    return Plan(prompted, model, VLLMRenderer(prompted, text, body.prompt_logprobs))


class VLLMRenderer(Renderer):
    """A writer of the reply of vLLM's simple server, with the logprobs that Atropos' server for it adds.

    `logprobs[choice][token]` is a list of one object, whose first member is the drawn token.
    """

    def __init__(self, prompted: Prompted, text: str, scored: int | None):
        """`text` is the prompt, and `scored` how many alternatives are reported for each of its tokens."""
        self.id = f"generate-{secrets.token_hex(12)}"
        self._prompted, self._text, self._scored = prompted, text, scored

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body."""
        prompt, choices = self._prompted.prompts[0], answers.choices
        body: dict[str, Any] = {
            "text": [answer.text for answer in choices],
            "prompt": self._text,
            "finish_reasons": [answer.reason for answer in choices],
            "prompt_token_ids": prompt,
            "token_ids": [answer.tokens for answer in choices],
        }
        if self._prompted.params.logprobs is not None:
            body["logprobs"] = [[[self._entry(t, lp)] for t, lp in _pairs(answer)] for answer in choices]
        if self._scored is not None:
            scores = zip(prompt[1:], answers.prompts[0].logprobs, strict=True)
            body["prompt_logprobs"] = [
                None,
                *({t: max(lp.model, LOWEST)} | _others(t, lp.top[: self._scored]) for t, lp in scores),
            ]
        return dumps(body)

    def _entry(self, token: int, logprob: Any) -> dict[int, float]:
        return {token: drawn(self._prompted.params, logprob)} | _others(token, logprob.top)


def _others(token: int, top: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Return the alternatives to a token."""
    return {t: max(p, LOWEST) for t, p in top if t != token}


def _pairs(answer: Answer) -> Any:
    """Return each token of a choice with its logprob."""
    return zip(answer.tokens, answer.logprobs, strict=True)


# -- SGLang's shape ---------------------------------------------------------------------------------------------


async def _plan_sglang(front: ServerFront, body: GenerateBody) -> Plan:
    if body.lora_path is not None and body.model is not None:
        raise InvalidRequest("lora_path and model both name what answers", param="lora_path")
    with renamed(model="model" if body.lora_path is None else "lora_path"):
        model = await policy(front, body.lora_path or body.model)
    param = "text" if body.input_ids is None else "input_ids"
    given: Any = body.text if body.input_ids is None else body.input_ids
    prompts = await input_prompts(front, given, param)
    fields = {name: f"sampling_params.{_NAMES.get(name, name)}" for name in TokenSampling.__struct_fields__}
    with renamed(**fields | {"logprobs": "top_logprobs_num"}):
        prompted = await rollout(front, _sampling(body), model, prompts, param)
    is_batch = isinstance(given, list) and not isinstance(given[0], int)
    return Plan(prompted, model, SGLangRenderer(front, prompted, body, several=is_batch or prompted.n > 1))


def _sampling(body: GenerateBody) -> TokenSampling:
    """Return the parameters under the names that they have here."""
    given = body.sampling_params or SGLangSampling()
    names = [name for name in TokenSampling.__struct_fields__ if _NAMES.get(name, name) in given.__struct_fields__]
    made = TokenSampling(**{name: getattr(given, _NAMES.get(name, name)) for name in names})
    made.logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
    return made


class SGLangRenderer(Renderer):
    """A writer of SGLang's replies: an object for one answer, a list of objects where there are several."""

    def __init__(self, front: Front, prompted: Prompted, body: GenerateBody, *, several: bool):
        self.id = body.rid or secrets.token_hex(16)
        self._text_of = front.tokenizer.token_text if body.return_text_in_logprobs else None
        self._prompted, self._body, self._several = prompted, body, several
        self._version = front.models.label(prompted.adapters[0])

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body."""
        found = [self._reply(i, answer, answers) for i, answer in enumerate(answers.choices)]
        return dumps(found if self._several else found[0])

    def _reply(self, index: int, answer: Answer, answers: Answers) -> dict[str, Any]:
        k = index // self._prompted.n
        ended: dict[str, Any] = {"type": answer.reason}
        if answer.reason == "length":
            ended["length"] = len(answer.tokens)
        else:
            last = answer.tokens[-1] if answer.tokens else None
            ended["matched"] = last if answer.end.stop is None else answer.end.stop
        meta: dict[str, Any] = {
            "id": self.id,
            "finish_reason": ended,
            "prompt_tokens": len(self._prompted.prompts[k]),
            "completion_tokens": len(answer.tokens),
            "cached_tokens": answers.prompts[k].cached,
            "weight_version": self._version,
        }
        params = self._prompted.params
        if params.logprobs is not None:
            drawn_ones = [self._triple(t, drawn(params, lp)) for t, lp in _pairs(answer)]
            meta["output_token_logprobs"] = drawn_ones
            if params.logprobs:
                meta["output_top_logprobs"] = [
                    [self._triple(t, max(p, LOWEST)) for t, p in lp.top] for lp in answer.logprobs
                ]
        return {"text": answer.text, "output_ids": answer.tokens, "meta_info": meta}

    def _triple(self, token: int, logprob: float) -> tuple[float, int, str | None]:
        return logprob, token, None if self._text_of is None else self._text_of(token)
