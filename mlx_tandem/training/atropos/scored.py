"""Groups of scored sequences as Atropos hands them out, and the trajectories that are learned from instead.

Positions are those of `tokens`: mask, logprob and token of one position belong together. A mask is the token's id where
it is trained on, and -100 elsewhere. A logprob is 1.0 where a token was not drawn.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.draws import truncation
from mlx_tandem.training.trajectories import Trajectory, new_id
from mlx_tandem.types import SamplingParams

NOT_TRAINED = -100
"""The mask of a token that is not trained on."""

ROUNDING = 1e-3
"""Largest logprob above 0 that is taken for 0."""


class ScoredData(Struct):
    """One group: several sequences with their scores. Other fields of Atropos' have no effect here."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None = None
    generation_params: dict[str, Any] | None = None
    overrides: list[dict[str, Any] | None] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


def trajectories(
    group: ScoredData, *, vocab_size: int, most_tokens: int, created: float, source: str = "atropos", version: int = 0
) -> list[Trajectory]:
    """Return the group as trajectories that are compared with one another.

    `most_tokens` bounds each sequence, and `created` is in Unix seconds. The name of the group begins with `source`;
    `version` is that of the trained adapter that has drawn all of it; 0: unknown. A sequence whose advantage is set
    to zero counts in the mean, and nothing is learned from it. Where a drawn token has no logprob, those of the
    sequence are computed again. Raises InvalidRequest for a group that cannot be learned from.
    """
    n = len(group.tokens)
    for name in ("masks", "scores"):
        if len(getattr(group, name)) != n:
            raise InvalidRequest(f"{name} has {len(getattr(group, name))} entries for {n} sequences", param=name)
    if group.images and any(group.images if isinstance(group.images, list) else [group.images]):
        raise InvalidRequest("images cannot be learned from", param="images")
    name = f"{source}-{secrets.token_hex(12)}"
    return [
        structs.replace(found, group=name, created=created, versions=(version,) * len(found.tokens) if version else ())
        for found in (_trajectory(group, i, vocab_size, most_tokens) for i in range(n))
    ]


def _trajectory(group: ScoredData, i: int, vocab_size: int, most_tokens: int) -> Trajectory:
    tokens = limits.check_token_ids(tuple(group.tokens[i]), vocab_size, f"tokens[{i}]")
    trained = _trained(tokens, group.masks[i], f"masks[{i}]")
    if len(tokens) > most_tokens:
        raise InvalidRequest(f"tokens[{i}] has {len(tokens)} tokens; at most {most_tokens} fit", param=f"tokens[{i}]")
    first, end = trained.index(True), len(tokens) - trained[::-1].index(True)
    if first == 0:
        raise InvalidRequest(f"masks[{i}] leaves no token for the prompt", param=f"masks[{i}]")
    mask = tuple(map(int, trained[first:end]))
    own = _override(group.overrides, i)
    params = _params(group, own)
    logprobs = _logprobs(group.inference_logprobs, i, first, mask)
    zero = own.get("set_advantage_to_zero") is True
    return Trajectory(
        id=new_id(),
        group="",
        prompt=tokens[:first],
        tokens=tokens[first:end],
        logprobs=logprobs,
        model_logprobs=(),
        versions=(),
        temperature=params.temperature,
        reward=float(limits.check("reward", group.scores[i], f"scores[{i}]")),
        external=not logprobs,
        metadata={} if group.env_id is None else {"env_id": group.env_id},
        truncation=truncation(params),
        mask=(0,) * len(mask) if zero else () if all(mask) else mask,
    )


def _trained(tokens: Sequence[int], masks: Sequence[int], at: str) -> list[bool]:
    """Return which tokens are trained on. Raises InvalidRequest if there is none, or a mask is no mask of Atropos'."""
    if len(masks) != len(tokens):
        raise InvalidRequest(f"{at} has {len(masks)} entries for {len(tokens)} tokens", param=at)
    for t, (token, mask) in enumerate(zip(tokens, masks, strict=True)):
        if mask not in (NOT_TRAINED, token):
            raise InvalidRequest(f"{at}[{t}] is {mask}; it must be {NOT_TRAINED} or the token, {token}", param=at)
    trained = [mask != NOT_TRAINED for mask in masks]
    if not any(trained):
        raise InvalidRequest(f"{at} leaves no token to train on", param=at)
    return trained


def _logprobs(given: Sequence[Sequence[float]] | None, i: int, first: int, mask: Sequence[int]) -> tuple[float, ...]:
    """Return the logprobs of the completion, 0 where nothing was drawn; () if a drawn token has none."""
    own = given[i] if given is not None and i < len(given) else ()
    part = own[first : first + len(mask)]
    if len(part) != len(mask) or not all(
        math.isfinite(p) and p <= ROUNDING for p, m in zip(part, mask, strict=True) if m
    ):
        return ()
    return tuple(min(float(p), 0.0) if m else 0.0 for p, m in zip(part, mask, strict=True))


def _override(given: Sequence[dict[str, Any] | None] | None, i: int) -> dict[str, Any]:
    """Return the overrides of one sequence."""
    return (given[i] if given is not None and i < len(given) else None) or {}


def _params(group: ScoredData, own: dict[str, Any]) -> SamplingParams:
    """Return how a sequence was drawn: by its overrides, else by the group's parameters, else by the group's overrides.

    A parameter that is in none of them had no effect. Raises InvalidRequest for a value out of its range.
    """
    said: dict[str, Any] = {}
    for layer in (group.group_overrides, group.generation_params, own):
        said |= {k: v for k, v in (layer or {}).items() if v is not None}
    ranges = {"temperature": "example_temperature", "top_p": "top_p", "min_p": "min_p", "top_k": "top_k"}
    found: dict[str, Any] = {name: limits.check(of, said[name], name) for name, of in ranges.items() if name in said}
    found["temperature"] = float(found.get("temperature", 1.0))
    if "top_k" in found:
        found["top_k"] = max(int(found["top_k"]), 0)
    return SamplingParams(max_tokens=1, **found)
