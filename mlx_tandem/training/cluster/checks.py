"""Checks of trajectories that come from another machine: each field, before anything is made of it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.strict_json import check_nested, dumps
from mlx_tandem.training.cluster.wire import Item
from mlx_tandem.training.trajectories import Trajectory, check_label

GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,399}")
"""Names of groups, which are made of labels."""


HIGHEST = limits.LEARNING["example_logprob"].high
"""Highest logprob that is accepted: rounding may bring one slightly over 0."""


def check_items(items: Sequence[Item], *, vocab_size: int, most_tokens: int) -> None:
    """Raise InvalidRequest for the first trajectory that this server could not have collected itself.

    `most_tokens` bounds prompt and completion together.
    """
    for i, item in enumerate(items):
        _check(item.trajectory, f"items[{i}].trajectory", vocab_size, most_tokens)


def _check(t: Trajectory, at: str, vocab_size: int, most_tokens: int) -> None:
    check_label(t.id, f"{at}.id")
    if not GROUP.fullmatch(t.group):
        raise InvalidRequest(f"{at}.group is no name of a group", param=f"{at}.group")
    for name in ("prompt", "tokens"):
        limits.check_token_ids(getattr(t, name), vocab_size, f"{at}.{name}")
    if not t.prompt or not t.tokens or len(t.prompt) + len(t.tokens) > most_tokens:
        raise InvalidRequest(f"{at} must have a prompt and a completion of {most_tokens} tokens at most", param=at)
    for name in ("logprobs", "model_logprobs"):
        values = getattr(t, name)
        lengths = (0,) if t.external else (len(t.tokens),) if name == "logprobs" else (0, len(t.tokens))
        if len(values) not in lengths or not all(math.isfinite(v) and v <= HIGHEST for v in values):
            raise InvalidRequest(
                f"{at}.{name} must have {lengths[-1]} finite numbers of at most 0", param=f"{at}.{name}"
            )
    for name in ("versions", "mask"):
        if len(getattr(t, name)) not in (0, len(t.tokens)):
            raise InvalidRequest(f"{at}.{name} must have {len(t.tokens)} entries or none", param=f"{at}.{name}")
    for version in t.versions:
        limits.check("version", version, f"{at}.versions")
    if any(m not in (0, 1) for m in t.mask) or (t.mask and not any(t.mask)):
        raise InvalidRequest(f"{at}.mask must have 1 where the policy has spoken, and else 0", param=f"{at}.mask")
    limits.check("example_temperature", t.temperature, f"{at}.temperature")
    for reward in (t.reward, *t.turn_rewards):
        limits.check("reward", reward, f"{at}.reward")
    if t.turn_rewards and len(t.turn_rewards) != len(t.turns):
        raise InvalidRequest(f"{at}.turn_rewards must have one number for each turn", param=f"{at}.turn_rewards")
    _check_rest(t, at)


def _check_rest(t: Trajectory, at: str) -> None:
    for name in ("top_p", "top_k", "min_p"):
        limits.check(f"example_{name}", getattr(t.truncation, name), f"{at}.truncation.{name}")
    if not 0 <= t.created <= 1e11:
        raise InvalidRequest(f"{at}.created must be a time in seconds", param=f"{at}.created")
    if len(t.finish_reason) > 64 or not t.finish_reason.isascii():
        raise InvalidRequest(f"{at}.finish_reason is over 64 letters", param=f"{at}.finish_reason")
    check_nested(t.metadata, f"{at}.metadata", depth=limits.MAX_METADATA_DEPTH, values=limits.MAX_METADATA_BYTES)
    try:
        size = len(dumps(t.metadata))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        size = limits.MAX_METADATA_BYTES + 1
    if size > limits.MAX_METADATA_BYTES:
        raise InvalidRequest(f"{at}.metadata is over {limits.MAX_METADATA_BYTES} bytes", param=f"{at}.metadata")
