"""Recomputes with mlx-lm the logprob of each token that a server has streamed, under given adapters.

The forward, the cache and the deltas are not the server's; only adapter folders are read by its own reader. A reply
may have been made under several adapters one after the other with its keys and values kept, and is recomputed in
that way.
"""

# ruff: noqa: I001
from __future__ import annotations

import statistics
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, cast

from mlx_tandem.model import device  # noqa: F401  first: it loads a fast BLAS before MLX

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.utils import load_model
from mlx_lm.models.cache import make_prompt_cache

from streams import TARGETS

from mlx_tandem import demo
from mlx_tandem.adapters import formats
from mlx_tandem.adapters.formats import LinearShape
from mlx_tandem.cli.bench.stream import Stream
from mlx_tandem.limits import MAX_LORA_RANK
from mlx_tandem.training.store import manifests

TOLERANCE = 1e-4  # nats

Kind = Literal["greedy", "pinned", "followed"]

Pairs = dict[str, tuple[mx.array, mx.array]]
"""A and B by module path, as in `AdapterWeights`."""


@dataclass(frozen=True)
class Reply:
    """The contents of a stream. `versions` matters for the policy's tokens only."""

    kind: Kind
    body: dict[str, Any]
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]

    @classmethod
    def of(cls, kind: Kind, body: dict[str, Any], stream: Stream) -> Reply:
        """Return the reply of a kept stream."""
        reply = cls(kind, body, [], [], [], [])
        for choice in stream.choices():
            reply.prompt.extend(choice.get("prompt_token_ids") or ())
            reply.tokens.extend(choice.get("token_ids") or ())
            reply.versions.extend(choice.get("versions") or ())
            reply.logprobs.extend((choice.get("logprobs") or {}).get("token_logprobs") or ())
        return reply

    @property
    def makers(self) -> Sequence[Hashable]:
        """Return for each token the adapter that made it, for `Replay`."""
        target = self.body.get("model")
        return [target] * len(self.tokens) if target in TARGETS else self.versions


class Replay:
    """A float32 model, and adapters by any name; the name None is the base."""

    def __init__(self, model: Path):
        self._model = cast(Any, load_model(Path(model))[0])
        self._model.set_dtype(mx.float32)
        linears = {path: m for path, m in self._model.named_modules() if isinstance(m, nn.Linear)}
        self._shapes = {path: LinearShape(m.weight.shape[1], m.weight.shape[0]) for path, m in linears.items()}
        self._adapters: dict[Hashable, Pairs] = {None: {}}
        self._wrapped = {path: _Adapted(m) for path, m in linears.items()}
        self._model.update_modules(tree_unflatten(list(self._wrapped.items())))

    def add(self, name: Hashable, folder: Path) -> None:
        """Add the adapter in `folder`."""
        layers = len(self._model.layers)
        weights = formats.read(folder, self._shapes, max_rank=MAX_LORA_RANK, base_layers=layers)
        self._adapters[name] = {path: (mx.array(a), mx.array(b)) for path, (a, b) in weights.tensors.items()}

    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int], makers: Sequence[Hashable]) -> list[float]:
        """Return the logprob of each token of the reply, the i-th made under the adapter `makers[i]`.

        The prompt is read under the adapter of the first token. A token is read, and its keys and values are
        written, under the adapter of the token after it.
        """
        ids = [*prompt, *tokens]
        readers = [makers[0]] * len(prompt) + list(makers[1:])
        cache = make_prompt_cache(self._model)
        found: list[mx.array] = []
        start = 0
        for maker, run in groupby(readers):
            end = start + len(list(run))
            for path, linear in self._wrapped.items():
                linear.pair[:] = self._adapters[maker].get(path, ())
            logits = self._model(mx.array([ids[start:end]]), cache=cache)[0]
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            found.append(mx.take_along_axis(logprobs, mx.array(ids[start + 1 : end + 1])[:, None], axis=-1)[:, 0])
            mx.eval(found[-1])
            start = end
        return [float(x) for x in np.concatenate([np.array(f) for f in found])[len(prompt) - 1 :]]


class _Adapted(nn.Module):
    """A linear with the delta of the adapter whose turn it is."""

    def __init__(self, linear: nn.Linear):
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = linear
        self.pair: list[mx.array] = []

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        if self.pair:
            a, b = self.pair
            y = y + (x @ a) @ b
        return y


def compare(replies: Sequence[Reply], checkpoints: Path) -> dict[str, Any]:
    """Return how far the replies' logprobs are from mlx-lm's under the versions that they name.

    To show that the comparison can fail, it also returns what it finds with wrong weights.
    """
    model = Replay(demo.MODEL_PATH)
    for name, folder in demo.ADAPTER_PATHS.items():
        model.add(name, folder)
    contents: dict[int, str] = {}
    for folder in checkpoints.glob("published-*"):
        manifest = manifests.read(folder)
        contents[manifest.version] = manifest.digest
        model.add(manifest.version, folder)
    found: dict[str, dict[str, Any]] = {}
    before: list[float] = []
    recomputed: list[float] = []
    for n, reply in enumerate(replies):
        errors = _errors(reply, model.logprobs(reply.prompt, reply.tokens, reply.makers))
        own = found.setdefault(reply.kind, {"replies": 0, "tokens": 0, "over": 0, "largest": 0.0})
        own["replies"] += 1
        own["tokens"] += len(errors)
        own["over"] += sum(not e <= TOLERANCE for e in errors)
        own["largest"] = max(own["largest"], *errors)
        last = reply.versions[-1]
        if reply.kind == "pinned" and last - 1 in contents:
            other = [last - 1] * len(reply.tokens)
            before.append(max(_errors(reply, model.logprobs(reply.prompt, reply.tokens, other))))
        if reply.kind == "followed" and last != reply.versions[0]:
            cold = model.logprobs(reply.prompt, reply.tokens, [last] * len(reply.tokens))
            own_tokens = [e for e, v in zip(_errors(reply, cold), reply.versions, strict=True) if v == last]
            recomputed.append(max(own_tokens))
        if n % 200 == 0:
            print(f"replayed {n}/{len(replies)}", file=sys.stderr, flush=True)
    controls = {"under_the_version_before": before, "without_kept_cache": recomputed}
    return {
        "versions": len(contents),
        "contents": len(set(contents.values())),
        "tolerance": TOLERANCE,
        "replay": found,
        "controls": {name: _found(errors) for name, errors in controls.items()},
    }


def _errors(reply: Reply, logprobs: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(reply.logprobs, logprobs, strict=True)]


def _found(largest: Sequence[float]) -> dict[str, float]:
    """Return how many replies there are with these largest errors, how many were detected, and the median."""
    median = statistics.median(largest) if largest else 0.0
    return {"replies": len(largest), "found": sum(e > TOLERANCE for e in largest), "median": median}
