"""Turning a caller's examples into data for the engine, with errors that name the argument."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import msgspec

from mlx_tandem import limits
from mlx_tandem.engine.learning import Datum, LossConfig, LossKind, Truncation
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.parts import Part
from mlx_tandem.generation.prompt_text import said
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.strict_json import convert
from mlx_tandem.training.examples import FORMS, Turns, parse

Data = Sequence["Datum | Mapping[str, Any]"]
"""The examples of a batch."""

Render = Callable[["Turns", Mapping[str, Any]], "list[Part]"]
"""A function that renders a conversation with the chat template."""

EXTRAS = ("weights", "advantages", "logprobs", "temperature", "anchor", "reference", "truncation")
"""Keys of an example besides those of its form."""


class ServedCodec:
    """A model's tokenizer and chat template, for use on any thread except that of the front's loop.

    `longest` is the most tokens of an example, and `chats` says whether the model has a chat template of its own. `end`
    is the token that ends a taught text, and `ends` are all tokens that end a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        render: Render,
        *,
        vocab_size: int,
        longest: int,
        eos_token_ids: Sequence[int],
        chats: bool = True,
    ):
        """Take over the parts. Raises InvalidRequest for a model without a token that ends a text."""
        self._tokenizer = tokenizer
        self._render = render
        self.vocab_size = vocab_size
        self.longest = longest
        self.chats = chats
        named = tokenizer.special_tokens.get(tokenizer.special_texts().get("eos_token", ""))
        ends = [*([] if named is None else [named]), *eos_token_ids]
        if not ends:
            raise InvalidRequest("this model names no token that ends a text: it cannot learn to end one")
        self.end, self.ends = ends[0], frozenset(ends)

    @classmethod
    def of(cls, front: Front) -> ServedCodec:
        """Return the codec of the model that `front` serves. Raises EngineUnavailable while there is no engine."""
        info, prompts = front.client.check_ready(), front.prompts

        def render(messages: Turns, options: Mapping[str, Any]) -> list[Part]:
            return front.from_thread(prompts.rendered(messages, options))

        return cls(
            front.tokenizer,
            render,
            vocab_size=info.vocab_size,
            longest=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
            chats=not prompts.template.is_plain,
        )

    def text(self, text: str, *, begins: bool) -> list[int]:
        """Return the token ids of a text. With `begins` the tokenizer adds the tokens that begin one."""
        _check_characters(text)
        return self._tokenizer.encode(text, add_special_tokens=begins)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens."""
        return self._tokenizer.decode(ids)

    def said(self, ids: Sequence[int]) -> str:
        """Return the text of a prompt for people: without special tokens and roles."""
        return said(self._tokenizer, ids)

    def chat(self, messages: Turns, *, asks: bool, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the token ids of a conversation in which these tools are offered.

        With `asks` it ends with the beginning of an answer.
        """
        for value in (*(value for message in messages for value in message.values()), *tools):
            _check_characters(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        options = {"add_generation_prompt": asks} | ({"tools": list(tools)} if tools else {})
        return self._tokenizer.encode_parts(self._render(messages, options))


def _check_characters(text: str) -> None:
    """Raise InvalidRequest for a text with half a surrogate pair, which no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise InvalidRequest("holds half a surrogate pair") from e


def check_data(data: Data, codec: ServedCodec, loss: LossConfig) -> tuple[Datum, ...]:
    """Return the data of a batch. Raises InvalidRequest naming `data[i]` and the field in it."""
    if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Sequence):
        raise InvalidRequest("data must be a list of examples", param="data", code="invalid_type")
    if not data:
        raise InvalidRequest("data is empty", param="data")
    return tuple(_one(value, codec, loss, f"data[{i}]") for i, value in enumerate(data))


def _one(value: Datum | Mapping[str, Any], codec: ServedCodec, loss: LossConfig, where: str) -> Datum:
    """Return the checked datum of one example. `where` is its name in errors."""
    try:
        datum = value if isinstance(value, Datum) else _datum(value, codec)
        _check(datum, codec, loss)
    except InvalidRequest as e:
        param = f"{where}.{e.param}" if e.param else where
        raise InvalidRequest(f"{where}: {e.message}", param=param, code=e.code) from e
    return datum


def _datum(value: Mapping[str, Any], codec: ServedCodec) -> Datum:
    """Return the datum of an example that is given as a mapping."""
    if not isinstance(value, Mapping):
        raise InvalidRequest("must be a mapping or a Datum", code="invalid_type")
    known = {key for keys in FORMS for key in keys} | {"tools", *EXTRAS}
    for key in value:
        if key not in known:
            raise InvalidRequest(f"{key} is not known here", param=str(key), code="unknown_parameter")
    if isinstance(value.get("prompt"), (list, tuple)) or isinstance(value.get("completion"), (list, tuple)):
        datum = _from_ids(value, codec)
    else:
        datum = parse(value).datum(codec)
    changes: dict[str, Any] = {}
    if "weights" in value and "advantages" in value:
        raise InvalidRequest("weights and advantages are two names of the same", param="advantages")
    for name in ("weights", "advantages"):
        if name in value:
            changes["weights"] = _weights(value[name], datum, name)
    for name in ("logprobs", "anchor", "reference"):
        if name in value:
            changes[name] = _numbers(value[name], name, "example_logprob")
    if "truncation" in value:
        changes["truncation"] = _truncation(value["truncation"])
    if "temperature" in value:
        changes["temperature"] = float(limits.check("example_temperature", value["temperature"], "temperature"))
    return msgspec.structs.replace(datum, **changes)


def _from_ids(value: Mapping[str, Any], codec: ServedCodec) -> Datum:
    """Return the datum of a prompt and a completion, of which one or both are token ids. No end token is added."""
    parts = []
    for name in ("prompt", "completion"):
        given = value.get(name)
        if isinstance(given, str):
            given = codec.text(given, begins=name == "prompt")
        ids = limits.check_token_ids(given, codec.vocab_size, name)
        if not ids:
            raise InvalidRequest(f"{name} is empty", param=name)
        parts.append(ids)
    prompt, completion = parts
    return Datum((*prompt, *completion), len(prompt), (1.0,) * len(completion))


def _weights(given: object, datum: Datum, name: str) -> tuple[float, ...]:
    """Return a weight for each token of the completion. A single number is the weight of every taught token."""
    if isinstance(given, (list, tuple)):
        return _numbers(given, name, "example_weight")
    weight = float(limits.check("example_weight", given, name))
    return tuple(weight * w for w in datum.weights)


def _truncation(given: object) -> Truncation:
    """Return which tokens a draw left out: a mapping with some of top_p, top_k and min_p."""
    if not isinstance(given, Mapping):
        raise InvalidRequest("truncation must be a mapping", param="truncation", code="invalid_type")
    found: dict[str, Any] = {}
    for key, number in given.items():
        if key not in Truncation.__struct_fields__:
            raise InvalidRequest(f"truncation.{key} is not known here", param=f"truncation.{key}")
        found[key] = limits.check(f"example_{key}", number, f"truncation.{key}")
    return Truncation(**found)


def _numbers(given: object, name: str, range_of: str) -> tuple[float, ...]:
    """Return a list of numbers in the range that `limits` has under `range_of`. Raises InvalidRequest."""
    if not isinstance(given, (list, tuple)):
        raise InvalidRequest(f"{name} must be a list of numbers", param=name, code="invalid_type")
    return tuple(float(limits.check(range_of, x, f"{name}[{i}]")) for i, x in enumerate(given))


def _check(datum: Datum, codec: ServedCodec, loss: LossConfig) -> None:
    """Raise InvalidRequest for a datum that the model or the loss cannot be trained with."""
    limits.check_token_ids(datum.tokens, codec.vocab_size, "tokens")
    completion = len(datum.tokens) - datum.prompt_length
    if datum.prompt_length < 1 or completion < 1:
        raise InvalidRequest("a token of prompt and one of completion are needed", param="prompt_length")
    if len(datum.tokens) > codec.longest:
        raise InvalidRequest(f"has {len(datum.tokens)} tokens; {codec.longest} fit", code="context_length_exceeded")
    if len(datum.weights) != completion:
        raise InvalidRequest(f"weights has {len(datum.weights)} entries for {completion} tokens", param="weights")
    if loss.kind not in ("cross_entropy", "score") and not datum.logprobs:
        raise InvalidRequest(f"{loss.kind} needs the logprobs that the tokens were drawn with", param="logprobs")
    for name in ("logprobs", "anchor", "reference"):
        own = getattr(datum, name)
        if own and len(own) != completion:
            raise InvalidRequest(f"{name} has {len(own)} entries for {completion} tokens", param=name)


def check_loss(loss: LossKind | LossConfig, switches: Mapping[str, Any]) -> LossConfig:
    """Return the configuration of a loss, which is given by its name or as a whole, with `switches` changed.

    Raises InvalidRequest naming `loss` or the switch.
    """
    if isinstance(loss, LossConfig):
        config = msgspec.structs.replace(loss, **_known(switches))
    elif loss not in get_args(LossKind):
        raise InvalidRequest(f"loss must be one of {', '.join(get_args(LossKind))}", param="loss")
    else:
        config = convert({"kind": loss, **_known(switches)}, LossConfig)
    for name in ("scale", "clip_low", "clip_high", "kl_coef", "beta", "max_importance_ratio", "max_divergence"):
        limits.check(name, getattr(config, name))
    return config


def _known(switches: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `switches`. Raises InvalidRequest for one that no loss has."""
    for name in switches:
        if name not in LossConfig.__struct_fields__ or name == "kind":
            raise InvalidRequest(f"a loss has no switch {name}", param=name, code="unknown_parameter")
    return switches
