"""What a request must say by plain evaluation: mlx-lm's model on one sequence, and sampling written out in numpy.

A reply's tokens are followed one by one: each must be the one that wins its draw by the logits that the tokens before
it give, up to a near-tie in float32, and the choice must end where it has to and nowhere before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.utils import load_adapters, load_model

from mlx_tandem import demo
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.model.ops.sampling.sampler import gumbel_noise, row_key
from tests import tiny_models

TOKENIZER = Tokenizer.load(demo.MODEL_PATH)
LOGPROB_TOLERANCE = 1e-4
NEAR_TIE = 1e-3
"""Of logits; draws at low temperatures and strong penalties multiply it."""

Array = npt.NDArray[np.floating[Any]]


@cache
def _model(adapter: str | None) -> Any:
    model, _ = load_model(demo.MODEL_PATH)
    model.set_dtype(mx.float32)  # as the server does on a CPU
    if adapter is None:
        return model
    folder = demo.ADAPTER_PATHS[adapter]
    peft = folder / "adapter_model.safetensors"
    if not peft.is_file():
        return load_adapters(model, str(folder))
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = {name: np.array(t.astype(mx.float32)) for name, t in mx.load(str(peft)).items()}
    deltas = {}
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            deltas[path] = config["lora_alpha"] / config["r"] * (b.astype(np.float64) @ a).T
    return tiny_models.merge(model, deltas)


def logits_of(ids: Sequence[int], adapter: str | None) -> Array:
    """[tokens, vocabulary], each row after the token of its place, by one forward without a cache."""
    return _logits(tuple(ids), adapter).astype(np.float64)


@lru_cache(maxsize=256)
def _logits(ids: tuple[int, ...], adapter: str | None) -> Array:
    return np.array(_model(adapter)(mx.array([ids]))[0].astype(mx.float32))


def log_softmax(logits: Array) -> Array:
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


@dataclass(frozen=True)
class Sampled:
    """A request's sampling parameters with their defaults filled in, by OpenAI's and vLLM's names."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    max_tokens: int = 16
    seed: int = 0
    stop: str | None = None
    ends: frozenset[int] = frozenset()  # tokens that end a choice: the model's own unless ignored, and stop_token_ids
    include_stop: bool = False
    show_special: bool = False


def check_tokens(prompt: list[int], tokens: list[int], choice: int, adapter: str | None, p: Sampled) -> Array:
    """Assert that each of `tokens` wins its draw; return the model's own logprobs, [tokens, vocabulary]."""
    logits = logits_of([*prompt, *tokens], adapter)[len(prompt) - 1 : -1]
    for i, token in enumerate(tokens):
        _check_draw(logits[i], prompt, tokens[:i], token, choice, p)
    return log_softmax(logits)


def _check_draw(raw: Array, prompt: list[int], said: list[int], token: int, choice: int, p: Sampled) -> None:
    z = raw.copy()
    for seen in set(prompt) | set(said):
        z[seen] = z[seen] / p.repetition_penalty if z[seen] > 0 else z[seen] * p.repetition_penalty
    for seen in set(said):
        z[seen] -= p.frequency_penalty * said.count(seen) + p.presence_penalty
    for biased, amount in p.logit_bias:
        z[biased] += amount
    if len(said) < p.min_tokens:
        z[list(p.ends)] = -np.inf
    slack = NEAR_TIE * max(p.repetition_penalty, 1 / p.repetition_penalty)
    where = f"token {len(said)}: {token}"
    if p.temperature == 0:
        assert z[token] >= z.max() - slack, f"{where}, should be {z.argmax()}"
        return
    scaled = (z - z.max()) / p.temperature
    slack /= p.temperature
    position = len(prompt) + len(said)
    key = mx.array([row_key(p.seed, choice)], mx.uint32)
    race = scaled + np.array(gumbel_noise(key, mx.array([position], mx.int32), z.size))[0]
    possible, certain = _kept(np.exp(scaled), p, slack)
    assert possible[token], f"{where} was cut away"
    best = race[certain].max(initial=-np.inf)
    assert race[token] >= best - slack, f"{where} loses the draw by {best - race[token]}"


def _kept(mass: Array, p: Sampled, slack: float) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which tokens min-p, top-k and top-p may leave, and which they leave whatever the rounding is."""
    possible, certain = mass > 0, mass > 0
    if p.min_p:
        possible &= mass >= p.min_p * (1 - slack)
        certain &= mass >= p.min_p * (1 + slack)
    if p.top_k:
        threshold = np.sort(mass * possible)[-p.top_k]
        possible &= mass >= threshold * (1 - slack)
        certain &= mass > threshold * (1 + slack)
    if p.top_p < 1:
        kept = np.sort(mass * possible)[::-1]
        sums = np.concatenate([[0.0], np.cumsum(kept)])
        above = sums[np.searchsorted(-kept, -mass)]  # of all that are likelier
        possible &= above <= p.top_p * kept.sum() * (1 + slack)
        certain &= above < p.top_p * kept.sum() * (1 - slack)
    return possible, certain


def check_end(tokens: list[int], text: str, finish: str, p: Sampled) -> None:
    """Assert that a choice ends where a token or a stop string ends it, or full, and that its text is its tokens'."""
    ends = [i for i, t in enumerate(tokens) if t in p.ends and i >= p.min_tokens]
    assert not ends or ends[0] == len(tokens) - 1, "it went on after a token that ends it"
    hits = [i for i in range(p.min_tokens, len(tokens)) if p.stop and _stops_at(tokens, i, p)]
    assert not hits or hits[0] == len(tokens) - 1, "it went on after a stop string"
    assert len(tokens) <= p.max_tokens
    if ends and not hits:
        shown = tokens if p.include_stop else tokens[:-1]
        assert (finish, text) == ("stop", _decoded(shown, p))
    elif hits:
        whole = _decoded(tokens, p)
        assert p.stop is not None
        at = whole.index(p.stop, max(len(_decoded(tokens[: p.min_tokens], p)) - len(p.stop) + 1, 0))
        assert (finish, text) == ("stop", whole[: at + len(p.stop) * p.include_stop])
    else:
        assert (finish, text) == ("length", _decoded(tokens, p))
        assert len(tokens) == p.max_tokens, "it ended for no reason"


def _stops_at(tokens: list[int], i: int, p: Sampled) -> bool:
    """Whether token `i` brings the end of a stop string."""
    assert p.stop is not None
    before, after = _decoded(tokens[:i], p), _decoded(tokens[: i + 1], p)
    shown = before if tokens[i] in p.ends and not p.include_stop else after
    return p.stop in shown[max(len(before) - len(p.stop) + 1, 0) :]


def _decoded(tokens: Sequence[int], p: Sampled) -> str:
    return TOKENIZER.decode(tokens, show_special=p.show_special)
