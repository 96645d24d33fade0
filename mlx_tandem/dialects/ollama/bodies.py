"""Ollama's request bodies.

Every field of the published API is here. Fields with the comment "no effect" are accepted; `refuse_unsupported` refuses
fields and options that have an effect which this server does not have. Unknown keys inside of messages and tools mean
nothing and are accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.limits import PARAMETERS, bounds

_PREDICT = Meta(ge=-2, le=int(PARAMETERS["max_tokens"].high))
_LAST = Meta(ge=-1, le=int(PARAMETERS["repetition_context_size"].high))


class Options(Struct, forbid_unknown_fields=True, kw_only=True):
    """The field `options`. The options from `num_keep` on have no effect; most are about how Ollama loads a model."""

    num_predict: Annotated[int, _PREDICT] | None = None  # below 1: until the answer or the context ends
    temperature: Annotated[float, bounds("temperature")] | None = None
    top_k: Annotated[int, bounds("top_k")] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    min_p: Annotated[float, bounds("min_p")] | None = None
    seed: Annotated[int, bounds("seed")] | None = None  # -1: random
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float, bounds("repetition_penalty")] | None = None
    repeat_last_n: Annotated[int, _LAST] | None = None  # -1: all tokens; 0: no penalty
    presence_penalty: Annotated[float, bounds("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounds("frequency_penalty")] | None = None
    penalize_newline: bool | None = None  # false is refused beside a penalty of repetitions
    typical_p: float | None = None  # 1 only
    tfs_z: float | None = None  # 1 only
    mirostat: int | None = None  # 0 only
    mirostat_tau: float | None = None  # no effect without mirostat
    mirostat_eta: float | None = None  # no effect without mirostat
    num_keep: int | None = None
    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    draft_num_predict: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None


class Common(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that chats and completions share."""

    model: str | None = None
    stream: bool | None = None  # true by default
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: float | str | None = None  # how long the engine stays in memory after this
    truncate: bool | None = None  # no effect: a prompt that is too long is refused
    shift: bool | None = None  # no effect: an answer ends where the context ends
    format: Literal["", "json"] | dict[str, Any] | None = None  # json: any object; an object: a JSON schema
    logprobs: bool | None = None
    top_logprobs: Annotated[int, bounds("top_logprobs")] | None = None


class ChatBody(Common, forbid_unknown_fields=True, kw_only=True):
    """The body of a chat. Without messages it asks to load the model, which is always loaded."""

    messages: list[Any] | None = None
    tools: list[Any] | None = None


class GenerateBody(Common, forbid_unknown_fields=True, kw_only=True):
    """The body of a completion. Without a prompt it asks to load the model."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None  # the prompt is used as it is, without the chat template
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None


class EmbedBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request for the vectors of texts. Without a text it asks to load the model."""

    model: str | None = None
    input: str | list[str] | None = None
    truncate: bool | None = None  # true by default: the beginning of a text that is too long is read
    dimensions: Annotated[int, bounds("dimensions")] | None = None
    options: Options | None = None  # no effect
    keep_alive: float | str | None = None


class EmbeddingsBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request for the vector of one text, in the older form."""

    model: str | None = None
    prompt: str | None = None
    options: Options | None = None  # no effect
    keep_alive: float | str | None = None


class ShowBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request for the description of a model."""

    model: str | None = None
    name: str | None = None  # the older name of `model`
    verbose: bool | None = None  # no effect
    system: str | None = None  # no effect
    template: str | None = None  # no effect
    options: Any = None  # no effect


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "width": (0,),
    "height": (0,),
    "steps": (0,),
}
"""Fields that only null and these values are accepted of."""

_NEUTRAL_OPTIONS: dict[str, float] = {"typical_p": 1, "tfs_z": 1, "mirostat": 0}
"""Options that only null and this value are accepted of."""


def refuse_unsupported(body: Common) -> None:
    """Raise InvalidRequest that names a field or an option whose value would need what this server does not have."""
    for name, values in _NEUTRAL.items():
        value = getattr(body, name, None)
        if value is not None and value not in values:
            raise InvalidRequest(f"{name} is not supported", param=name, code="unsupported_parameter")
    options = body.options
    if options is None:
        return
    for name, neutral in _NEUTRAL_OPTIONS.items():
        if getattr(options, name) not in (None, neutral):
            raise _refusal(name, f"can only be {neutral:g} here, which changes nothing")
    penalty = options.repeat_penalty
    if options.penalize_newline is False and penalty not in (None, 1):
        raise _refusal("penalize_newline", "can only be true here beside repeat_penalty")
    if options.repeat_last_n is not None and (options.presence_penalty or options.frequency_penalty):
        raise _refusal("repeat_last_n", "is not supported beside presence_penalty or frequency_penalty")


def _refusal(option: str, what: str) -> InvalidRequest:
    """Return the error for an option. `what` says what is wrong with its value."""
    name = f"options.{option}"
    return InvalidRequest(f"{name} {what}", param=name, code="unsupported_parameter")
