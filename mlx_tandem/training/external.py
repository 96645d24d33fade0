"""Trajectories that something else has made and a client sends: what they may hold, each field checked."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.trajectories import Trajectory, check_label, new_id

Prompt = str | list[dict[str, str]]
"""Text, or chat messages that go through the template."""


class External(Struct, forbid_unknown_fields=True):
    """A trajectory as a client writes it: prompt and completion each as text or as token ids."""

    reward: float
    prompt: Prompt | None = None  # chat messages go through the template
    prompt_token_ids: list[int] | None = None
    completion: str | None = None
    token_ids: list[int] | None = None
    group: str | None = None  # absent: shared by all that have the same prompt
    id: str | None = None
    logprobs: list[float] | None = None  # checked, and not believed
    versions: list[int] | None = None
    temperature: float = 1.0


def check_external(
    items: Sequence[External],
    *,
    vocab_size: int,
    max_tokens: int,
    encode_prompt: Callable[[Prompt], Sequence[int]],
    encode_completion: Callable[[str], Sequence[int]],
) -> tuple[Trajectory, ...]:
    """The trajectories that `items`, the body's `trajectories`, describe; InvalidRequest names the field that is wrong.
    `max_tokens` bounds prompt and completion together."""
    if not 0 < len(items) <= limits.MAX_TRAJECTORIES:
        raise InvalidRequest(
            f"trajectories must have 1 to {limits.MAX_TRAJECTORIES} entries, not {len(items)}", param="trajectories"
        )
    return tuple(
        _check(item, f"trajectories[{i}]", vocab_size, max_tokens, encode_prompt, encode_completion)
        for i, item in enumerate(items)
    )


def _check(
    item: External,
    at: str,
    vocab_size: int,
    max_tokens: int,
    encode_prompt: Callable[[Prompt], Sequence[int]],
    encode_completion: Callable[[str], Sequence[int]],
) -> Trajectory:
    prompt_text = None if item.prompt is None else encode_prompt(item.prompt)
    completion_text = None if item.completion is None else encode_completion(item.completion)
    prompt = _ids(prompt_text, item.prompt_token_ids, f"{at}.prompt", f"{at}.prompt_token_ids", vocab_size)
    tokens = _ids(completion_text, item.token_ids, f"{at}.completion", f"{at}.token_ids", vocab_size)
    if len(prompt) + len(tokens) > max_tokens:
        raise InvalidRequest(f"{at} has {len(prompt) + len(tokens)} tokens; at most {max_tokens} fit", param=at)
    limits.check("reward", item.reward, f"{at}.reward")
    limits.check("temperature", item.temperature, f"{at}.temperature")
    if item.temperature == 0:
        raise InvalidRequest(
            f"{at}.temperature must be above 0: greedy choices have no logprobs", param=f"{at}.temperature"
        )
    for name, values in (("logprobs", item.logprobs), ("versions", item.versions)):
        if values is not None and len(values) != len(tokens):
            raise InvalidRequest(
                f"{at}.{name} has {len(values)} entries for {len(tokens)} tokens", param=f"{at}.{name}"
            )
    for i, x in enumerate(item.logprobs or ()):
        if not (math.isfinite(x) and x <= 0):
            raise InvalidRequest(
                f"{at}.logprobs[{i}] must be a finite number of at most 0", param=f"{at}.logprobs[{i}]"
            )
    for i, v in enumerate(item.versions or ()):
        limits.check("version", v, f"{at}.versions[{i}]")
    return Trajectory(
        id=new_id() if item.id is None else check_label(item.id, f"{at}.id"),
        group=_same_prompt(prompt) if item.group is None else check_label(item.group, f"{at}.group"),
        prompt=prompt,
        tokens=tokens,
        logprobs=(),
        model_logprobs=(),
        versions=tuple(item.versions or ()),
        temperature=item.temperature,
        reward=float(item.reward),
        external=True,
        created=time.time(),
    )


def _ids(
    encoded: Sequence[int] | None, given: Sequence[int] | None, text_at: str, ids_at: str, vocab_size: int
) -> tuple[int, ...]:
    if (encoded is None) == (given is None):
        raise InvalidRequest(f"give either {text_at} or {ids_at}", param=text_at if encoded is None else ids_at)
    at = ids_at if encoded is None else text_at
    ids = tuple(encoded or given or ())
    if not ids:
        raise InvalidRequest(f"{at} must have at least one token", param=at)
    return limits.check_token_ids(ids, vocab_size, at)


def _same_prompt(prompt: tuple[int, ...]) -> str:
    digest = hashlib.blake2b(b"".join(t.to_bytes(4, "little") for t in prompt), digest_size=12)
    return f"prompt-{digest.hexdigest()}"
