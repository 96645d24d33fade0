"""Sampling parameters of requests, checked against `limits` and converted to the engine's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Struct
from msgspec.structs import fields

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.output import TextOptions
from mlx_tandem.limits import bounds
from mlx_tandem.types import SamplingParams


class Sampling(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that every dialect shares. Null has the same meaning as an absent field.

    The ranges are those of `limits.py`. The functions below check the fields of type Any, because their range depends
    on other fields or no type describes their values.
    """

    max_tokens: Any = None  # 0: the request only asks about the prompt, and no token is shown
    min_tokens: Annotated[int, bounds("min_tokens")] | None = None
    temperature: Annotated[float, bounds("temperature")] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    top_k: Annotated[int, bounds("top_k")] | None = None
    min_p: Annotated[float, bounds("min_p")] | None = None
    repetition_penalty: Any = None  # mlx-lm's clients send 0 for no penalty
    repetition_context_size: Annotated[int, bounds("repetition_context_size")] | None = None
    presence_penalty: Annotated[float, bounds("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounds("frequency_penalty")] | None = None
    xtc_probability: Annotated[float, bounds("xtc_probability")] | None = None
    xtc_threshold: Annotated[float, bounds("xtc_threshold")] | None = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    seed: Annotated[int, bounds("seed")] | None = None
    n: Annotated[int, bounds("n")] | None = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, bounds("prompt_logprobs")] | None = None
    priority: Annotated[int, bounds("priority")] | None = None
    speculation: bool | None = None  # None and true: drafts are verified if the server makes any
    # What the answer must match; `grammar/fields.py` reads these.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


_SET_APART = frozenset({"max_tokens", "min_tokens", "seed", "prompt_logprobs", "logit_bias"})
"""Parameters with a range that are not plain numbers, or that depend on the prompt, the model or the dialect."""

NUMBERS = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name in Sampling.__struct_fields__ and field.name in limits.PARAMETERS and field.name not in _SET_APART
)
"""Names of the numbers that go unchanged from `Sampling` to `SamplingParams`."""


def sampling_params(
    front: Front,
    body: Sampling,
    prompt: int,
    prompt_param: str,
    *,
    logprobs: int | None = None,
    max_tokens: tuple[str, Any] | None = None,
    echo: bool = False,
    plain: bool = False,
) -> SamplingParams:
    """Return the engine's parameters for a prompt of `prompt` tokens. Raises InvalidRequest naming the field.

    `max_tokens` holds the name and the value of the field if the dialect has another field than `max_tokens` for it.
    With `echo`, the prompt gets the same logprobs as its continuation. With `plain`, what the request does not give is
    what changes nothing, whatever the model's folder says.
    """
    check_logprobs(front, "prompt_logprobs", body.prompt_logprobs)
    field, asked = max_tokens or ("max_tokens", body.max_tokens)
    if is_silent(body, echo):
        asked = 1  # The engine has to draw a token, which is dropped.
    elif asked is not None:
        limits.check(field, asked)
    most = front.max_tokens(prompt, asked, field, prompt_param)
    least = body.min_tokens or 0
    if least > most or (least and is_silent(body, echo)):
        raise InvalidRequest(f"min_tokens is {least} and {field} {most}", param="min_tokens")
    vocabulary = front.client.check_ready().vocab_size
    numbers = _numbers(body, {} if plain else front.defaults)
    return SamplingParams(
        max_tokens=most,
        min_tokens=least,
        logit_bias=_logit_bias(body.logit_bias, vocabulary),
        seed=front.seed(body.seed),
        stop_token_ids=_token_ids(body.stop_token_ids, vocabulary, "stop_token_ids"),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=max(
            (k for k in (body.prompt_logprobs, logprobs if echo else None) if k is not None), default=None
        ),
        repetition_context=_repetition_context(body.repetition_context_size, prompt + most),
        allowed_token_ids=_token_ids(body.allowed_token_ids, vocabulary, "allowed_token_ids"),
        xtc_kept=_xtc_kept(front) if numbers.get("xtc_probability") else (),
        **numbers,
    )


def _numbers(body: Sampling, defaults: Mapping[str, float]) -> dict[str, Any]:
    """Return the values of NUMBERS that the request, or else `defaults`, gives."""
    given = {name: getattr(body, name) for name in NUMBERS}
    penalty = given["repetition_penalty"]
    if type(penalty) in (int, float) and penalty == 0:
        given["repetition_penalty"] = 1.0
    elif penalty is not None:
        given["repetition_penalty"] = float(limits.check("repetition_penalty", penalty))
    numbers: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            value = defaults.get(name)
        if value is not None:
            numbers[name] = max(int(value), 0) if name == "top_k" else float(value)
    return numbers


def is_silent(body: Sampling, echo: bool = False) -> bool:
    """Return whether the request only asks about its prompt: `max_tokens` is 0, and it wants an echo or logprobs."""
    asked = body.max_tokens
    return type(asked) is int and asked == 0 and (echo or body.prompt_logprobs is not None)


def text_options(body: Sampling, echo: bool = False) -> TextOptions:
    """Return the options for turning the request's tokens into text."""
    return TextOptions(
        stop_strings(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        show_special=body.skip_special_tokens is False,
        silent=is_silent(body, echo),
    )


def check_logprobs(front: Front, param: str, asked: int | None) -> None:
    """Raise InvalidRequest naming `param` when a request asks for more alternatives than this server allows."""
    most = front.config.server.max_logprobs
    if asked is not None and asked > most:
        raise InvalidRequest(f"{param} is {asked}; this server gives {most} at most", param=param)


def choices(front: Front, body: Sampling) -> int:
    """Return the number of choices for each prompt. Raises InvalidRequest when `n` is over the server's limit."""
    if body.n is None:
        return 1
    most = min(front.config.server.max_n, front.client.check_ready().max_num_seqs)
    if body.n > most:
        raise InvalidRequest(f"n is at most {most} on this server", param="n")
    return body.n


def kept_tokens(front: Front, asked: int | None, max_tokens: Any) -> int | None:
    """Return how many of a prompt's last tokens `truncate_prompt_tokens` keeps; None means all of them.

    -1 keeps as many tokens as fit together with `max_tokens`. Without a usable `max_tokens`, it reserves room for an
    answer of the default length, or for half of the context if that is less.
    """
    if asked is None:
        return None
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
    """Return the strings of `stop`, which is None, one string or a list. Raises InvalidRequest naming `stop`."""
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
    """Return a checked list of token ids; () for None. Raises InvalidRequest for an empty list of allowed tokens."""
    if value is None:
        return ()
    if isinstance(value, list) and len(value) > _MOST_IDS[param]:
        raise InvalidRequest(f"{param} has at most {_MOST_IDS[param]} ids", param=param)
    ids = limits.check_token_ids(value, vocabulary, param)
    if not ids and param == "allowed_token_ids":
        raise InvalidRequest("allowed_token_ids is empty: nothing could be drawn", param=param)
    return ids


def _repetition_context(asked: int | None, longest: int) -> int:
    """Return the window of the repetition penalty in tokens; 0 if it covers a whole sequence of `longest` tokens."""
    window = asked or 0
    return window if window < longest else 0


def _xtc_kept(front: Front) -> tuple[int, ...]:
    """Return the tokens that XTC never excludes, as in mlx-lm: the line break and the tokens that end an answer."""
    info = front.client.check_ready()
    kept = {*front.tokenizer.encode("\n"), *info.eos_token_ids}
    return tuple(sorted(t for t in kept if t < info.vocab_size))


def _logit_bias(value: Any, vocabulary: int) -> tuple[tuple[int, float], ...]:
    """Return the checked pairs of token id and bias. Raises InvalidRequest naming `logit_bias`."""
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
