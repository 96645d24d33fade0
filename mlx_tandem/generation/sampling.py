"""Sampling parameters as callers write them, checked against `limits` and turned into the engine's."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.output import TextOptions
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
    repetition_context_size: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    xtc_probability: Any = None
    xtc_threshold: Any = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
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
        if name == "repetition_penalty" and type(value) in (int, float) and value == 0:
            return fallback  # mlx-lm's clients say 0 for no penalty
        return float(limits.check(name, value))

    xtc_probability = number("xtc_probability", 0.0)
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
        stop_token_ids=_token_ids(body.stop_token_ids, vocabulary, "stop_token_ids"),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=max(
            (k for k in (prompt_logprobs(body), logprobs if echo else None) if k is not None), default=None
        ),
        repetition_context=_repetition_context(body.repetition_context_size, prompt + most),
        allowed_token_ids=_token_ids(body.allowed_token_ids, vocabulary, "allowed_token_ids"),
        xtc_probability=xtc_probability,
        xtc_threshold=number("xtc_threshold", 0.1),
        xtc_kept=_xtc_kept(front) if xtc_probability else (),
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
    most = min(front.config.server.max_n, front.client.check_ready().max_num_seqs)
    if n > most:
        raise InvalidRequest(f"n is at most {most} on this server", param="n")
    return n


def kept_tokens(front: Front, given: Any, max_tokens: Any) -> int | None:
    """Return how many of its last tokens `truncate_prompt_tokens` leaves a prompt; None: all. -1 is as many as there is
    room for beside `max_tokens`, or beside an answer of the default length, but half of the context at least."""
    if given is None:
        return None
    asked = int(limits.check("truncate_prompt_tokens", given))
    if asked == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens")
    if asked > 0:
        return asked
    room = front.room(front.client.check_ready())
    answer = min(front.config.server.default_max_tokens, room // 2)
    if type(max_tokens) is int and 0 < max_tokens < room:
        answer = max_tokens
    return min(front.config.server.max_prompt_tokens or room, room - answer)


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


_MOST_IDS = {"stop_token_ids": limits.MAX_STOP_TOKEN_IDS, "allowed_token_ids": limits.MAX_ALLOWED_TOKEN_IDS}


def _token_ids(value: Any, vocabulary: int, param: str) -> tuple[int, ...]:
    """Return a checked list of token ids; () for none. A list of allowed tokens must have one."""
    if value is None:
        return ()
    if isinstance(value, list) and len(value) > _MOST_IDS[param]:
        raise InvalidRequest(f"{param} has at most {_MOST_IDS[param]} ids", param=param)
    ids = limits.check_token_ids(value, vocabulary, param)
    if not ids and param == "allowed_token_ids":
        raise InvalidRequest("allowed_token_ids is empty: nothing could be drawn", param=param)
    return ids


def _repetition_context(value: Any, longest: int) -> int:
    """Return the window of the repetition penalty; 0 where it holds all tokens of a sequence of `longest`."""
    window = 0 if value is None else int(limits.check("repetition_context_size", value))
    return window if window < longest else 0


def _xtc_kept(front: Front) -> tuple[int, ...]:
    """Return the tokens that XTC never leaves out, as in mlx-lm: the line break and what ends the model's answer."""
    info = front.client.check_ready()
    kept = {*front.tokenizer.encode("\n"), *info.eos_token_ids}
    return tuple(sorted(t for t in kept if t < info.vocab_size))


def _logit_bias(value: Any, vocabulary: int) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias must be an object", param="logit_bias", code="invalid_type")
    if len(value) > limits.MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has at most {limits.MAX_LOGIT_BIAS} entries", param="logit_bias")
    bias: dict[int, float] = {}
    for key in sorted(value, key=str):
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12 else key
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidRequest(f"{ascii(key)[:64]} in logit_bias is not a token id", param="logit_bias")
        limits.check_token_ids([token], vocabulary, "logit_bias")
        if token in bias:
            raise InvalidRequest(f"logit_bias names token {token} twice", param="logit_bias")
        bias[token] = float(limits.check("logit_bias", value[key]))
    return tuple(bias.items())
