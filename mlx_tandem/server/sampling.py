"""Sampling parameters as callers write them, checked against `limits` and turned into the engine's."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.server.front import Front
from mlx_tandem.text.output import TextOptions
from mlx_tandem.types import SamplingParams


class Sampling(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that every dialect shares. Numbers are typed loosely: `limits.check` names the field and its range."""

    max_tokens: Any = None
    min_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    seed: Any = None
    n: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Any = None
    priority: Any = None


def sampling_params(
    front: Front,
    body: Sampling,
    prompt: int,
    prompt_param: str,
    *,
    logprobs: int | None = None,
    max_tokens: tuple[str, Any] | None = None,
    echo: bool = False,
) -> SamplingParams:
    """Checked parameters for a prompt of `prompt` tokens; `max_tokens` is the field and value where the dialect has
    another one for it. With `echo`, the prompt gets the logprobs that its continuation gets."""
    check_logprobs(front, "prompt_logprobs", prompt_logprobs(body))
    field, asked = max_tokens or ("max_tokens", body.max_tokens)
    if is_silent(body, echo):
        asked = 1  # drawn and dropped
    elif asked is not None:
        limits.check(field, asked)
    most = front.max_tokens(prompt, asked, field, prompt_param)
    least = 0 if body.min_tokens is None else int(limits.check("min_tokens", body.min_tokens))
    if least > most or (least and is_silent(body, echo)):
        raise InvalidRequest(f"min_tokens is {least} and {field} {most}", param="min_tokens")
    vocabulary = front.client.check_ready().vocab_size
    defaults = front.defaults

    def number(name: str, fallback: float) -> float:
        value = getattr(body, name)
        if value is None:
            return float(defaults.get(name, fallback))
        return float(limits.check(name, value))

    return SamplingParams(
        max_tokens=most,
        min_tokens=least,
        temperature=number("temperature", 1.0),
        top_p=number("top_p", 1.0),
        top_k=max(int(number("top_k", 0)), 0),
        min_p=number("min_p", 0.0),
        repetition_penalty=number("repetition_penalty", 1.0),
        presence_penalty=number("presence_penalty", 0.0),
        frequency_penalty=number("frequency_penalty", 0.0),
        logit_bias=_logit_bias(body.logit_bias, vocabulary),
        seed=front.seed(body.seed),
        stop_token_ids=_stop_token_ids(body.stop_token_ids, vocabulary),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=max(
            (k for k in (prompt_logprobs(body), logprobs if echo else None) if k is not None), default=None
        ),
    )


def is_silent(body: Sampling, echo: bool = False) -> bool:
    """Whether nothing is to be generated: `max_tokens` is 0 and something is asked about the prompt."""
    asked = body.max_tokens
    return type(asked) is int and asked == 0 and (echo or body.prompt_logprobs is not None)


def text_options(body: Sampling, echo: bool = False) -> TextOptions:
    return TextOptions(
        stop_strings(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        show_special=body.skip_special_tokens is False,
        silent=is_silent(body, echo),
    )


def prompt_logprobs(body: Sampling) -> int | None:
    """How many alternatives to report for each token of the prompt; None: no logprobs of the prompt."""
    return None if body.prompt_logprobs is None else int(limits.check("prompt_logprobs", body.prompt_logprobs))


def check_logprobs(front: Front, param: str, asked: int | None) -> None:
    """Raise InvalidRequest naming `param` when more alternatives are asked for than this server gives."""
    most = front.config.server.max_logprobs
    if asked is not None and asked > most:
        raise InvalidRequest(f"{param} is {asked}; this server gives {most} at most", param=param)


def priority(body: Sampling) -> int:
    return 0 if body.priority is None else int(limits.check("priority", body.priority))


def choices(front: Front, body: Sampling) -> int:
    """The checked `n`."""
    if body.n is None:
        return 1
    n = int(limits.check("n", body.n))
    most = front.client.check_ready().max_num_seqs
    if n > most:
        raise InvalidRequest(f"n is at most {most} on this server", param="n")
    return n


def stop_strings(value: Any) -> tuple[str, ...]:
    """The checked `stop`: nothing, one string or a list."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise InvalidRequest("stop must be a string or a list of strings", param="stop", code="invalid_type")
    if len(stops) > limits.MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop may have at most {limits.MAX_STOP_STRINGS} strings", param="stop")
    for s in stops:
        if not 1 <= len(s) <= limits.MAX_STOP_LENGTH:
            raise InvalidRequest(f"each stop string has 1 to {limits.MAX_STOP_LENGTH} characters", param="stop")
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(value: Any, vocabulary: int) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = limits.check_token_ids(value, vocabulary, "stop_token_ids")
    if len(ids) > limits.MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids has at most {limits.MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids")
    return ids


def _logit_bias(value: Any, vocabulary: int) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias must be an object", param="logit_bias", code="invalid_type")
    if len(value) > limits.MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has at most {limits.MAX_LOGIT_BIAS} entries", param="logit_bias")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12:
            key = int(key)
        if isinstance(key, bool) or not isinstance(key, int):
            raise InvalidRequest("the keys of logit_bias must be token ids", param="logit_bias")
        limits.check_token_ids([key], vocabulary, "logit_bias")
        bias[key] = float(limits.check("logit_bias", amount))
    return tuple(bias.items())
