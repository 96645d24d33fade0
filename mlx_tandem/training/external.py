"""Trajectories that something else has made and a client sends: what they may hold, each field checked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest, NotFound
from mlx_tandem.training.messages import Turn, for_template
from mlx_tandem.training.trajectories import Trajectory, check_label, check_rewards, new_id, same_prompt

Prompt = str | list[dict[str, Any]]
"""A text, or chat messages for the model's template."""


class External(Struct, forbid_unknown_fields=True):
    """A trajectory as a client writes it: prompt and completion each as text or as token ids.

    One with a `trajectory_id` is a choice of a request that was collected, posted as the reply showed it: it stands for
    what was collected, which has the prompt and the reward. Its tokens have to be those of the reply.
    """

    reward: float | None = None  # of the whole; this or `turn_rewards` is required
    prompt: str | list[Turn] | None = None  # chat messages go through the template
    prompt_token_ids: list[int] | None = None
    completion: str | None = None
    token_ids: list[int] | None = None
    group: str | None = None  # absent: shared by all that have the same prompt
    id: str | None = None
    logprobs: list[float] | dict[str, Any] | None = None  # checked, and not believed
    versions: list[int] | None = None  # of the trained adapter, one for each token of the completion; 0: the base
    temperature: float = 1.0  # that the completion was drawn at
    mask: list[Literal[0, 1]] | None = None  # one for each of `token_ids`; 0: said by a tool or a user, not trained on
    turn_rewards: list[float] = []  # one for each run of 1 in `mask`
    tokens: list[int] | None = None  # another name of `token_ids`
    lora_version: int | str | None = None  # the one version that made all of the completion, or its checkpoint
    trajectory_id: str | None = None  # of one that was collected and waits
    score: float | None = None  # another name of `reward`
    # What else a choice of a reply has.
    index: int | None = None
    text: str | None = None
    finish_reason: str | None = None


class Sent(NamedTuple):
    """The trajectories that a client wants to be learned from: those that it has made, and ids of collected ones."""

    made: tuple[Trajectory, ...]
    ids: tuple[str, ...]


def check_external(
    items: Sequence[str | External],
    *,
    vocab_size: int,
    max_tokens: int,
    newest_version: int,
    encode_prompt: Callable[[Prompt], Sequence[int]],
    encode_completion: Callable[[str], Sequence[int]],
    number_of: Callable[[int | str], int] = int,
    waits: Callable[[str], Trajectory | None] = lambda id: None,
) -> Sent:
    """Return the trajectories that `items`, the body's `trajectories`, describe.

    `max_tokens` bounds prompt and completion together; `newest_version` is the highest version number of the trained
    adapter that was ever given. `number_of` returns the number of a version that is named, and `waits` a collected
    trajectory by its id. Raises InvalidRequest for the first field that is wrong, with its name.
    """
    if not 0 < len(items) <= limits.MAX_TRAJECTORIES:
        raise InvalidRequest(
            f"trajectories must have 1 to {limits.MAX_TRAJECTORIES} entries, not {len(items)}", param="trajectories"
        )
    first_with: dict[str, int] = {}
    ids: dict[str, None] = {}
    made: dict[int, External] = {}
    for i, item in enumerate(items):
        if isinstance(item, str) or item.trajectory_id is not None:
            ids[_collected(item, f"trajectories[{i}]", waits)] = None
            continue
        made[i] = _renamed(item, f"trajectories[{i}]", number_of)
        if item.id is not None and first_with.setdefault(item.id, i) != i:
            at = f"trajectories[{i}].id"
            raise InvalidRequest(f"{at} is also the id of trajectories[{first_with[item.id]}]", param=at)
    return Sent(
        tuple(
            _check(item, f"trajectories[{i}]", vocab_size, max_tokens, newest_version, encode_prompt, encode_completion)
            for i, item in made.items()
        ),
        tuple(ids),
    )


def _collected(item: str | External, at: str, waits: Callable[[str], Trajectory | None]) -> str:
    """Return the id of the collected trajectory that `item` stands for. Raises InvalidRequest if it does not wait."""
    id, place = (item, at) if isinstance(item, str) else (item.trajectory_id or "", f"{at}.trajectory_id")
    found = waits(id)
    if found is None:
        raise InvalidRequest(
            f"{place}: no collected trajectory {id[:64]!a} waits; it may have been learned from or dropped already",
            param=place,
            code="trajectory_not_found",
        )
    tokens = None if isinstance(item, str) else item.token_ids or item.tokens
    if tokens is not None and tuple(tokens) != found.tokens:
        raise InvalidRequest(f"{at}.token_ids are not those of {id}", param=f"{at}.token_ids")
    return id


def _renamed(item: External, at: str, number_of: Callable[[int | str], int]) -> External:
    """Return the trajectory with its fields under their own names. Raises InvalidRequest."""
    for other, own in (("tokens", "token_ids"), ("score", "reward"), ("lora_version", "versions")):
        if getattr(item, other) is not None and getattr(item, own) is not None:
            raise InvalidRequest(f"give either {at}.{other} or {at}.{own}", param=f"{at}.{other}")
    ids = item.token_ids if item.tokens is None else item.tokens
    versions, reward = item.versions, item.reward if item.score is None else item.score
    if item.lora_version is not None:
        if ids is None:
            raise InvalidRequest(f"{at}.lora_version is for token_ids", param=f"{at}.lora_version")
        try:
            versions = [number_of(item.lora_version)] * len(ids)
        except (NotFound, ValueError) as e:
            raise InvalidRequest(f"{at}.lora_version: {e}", param=f"{at}.lora_version") from e
    logprobs = None if isinstance(item.logprobs, dict) else item.logprobs
    return replace(item, token_ids=ids, versions=versions, reward=reward, logprobs=logprobs)


def _check(
    item: External,
    at: str,
    vocab_size: int,
    max_tokens: int,
    newest_version: int,
    encode_prompt: Callable[[Prompt], Sequence[int]],
    encode_completion: Callable[[str], Sequence[int]],
) -> Trajectory:
    prompt_ids, completion_ids = None, None
    if item.prompt is not None:
        prompt_ids = _encoded(item.prompt, f"{at}.prompt", encode_prompt)
    if item.completion is not None:
        completion_ids = encode_completion(item.completion)
    prompt = _ids(prompt_ids, item.prompt_token_ids, f"{at}.prompt", f"{at}.prompt_token_ids", vocab_size)
    tokens = _ids(completion_ids, item.token_ids, f"{at}.completion", f"{at}.token_ids", vocab_size)
    if len(prompt) + len(tokens) > max_tokens:
        raise InvalidRequest(f"{at} has {len(prompt) + len(tokens)} tokens; at most {max_tokens} fit", param=at)
    mask = _mask(item, f"{at}.mask")
    turns = sum(own for own, _ in groupby(mask)) if mask else 1
    reward, turn_rewards = check_rewards(item.reward, item.turn_rewards, turns, f"{at}.")
    # Nothing can be learned from greedy choices: they have no logprobs. Nor from what was drawn nearly so.
    limits.check("example_temperature", item.temperature, f"{at}.temperature")
    for name, values in (("logprobs", item.logprobs), ("versions", item.versions)):
        if values is not None and len(values) != len(tokens):
            raise InvalidRequest(
                f"{at}.{name} has {len(values)} entries for {len(tokens)} tokens", param=f"{at}.{name}"
            )
    for i, x in enumerate(item.logprobs if isinstance(item.logprobs, list) else ()):
        if not (math.isfinite(x) and x <= 0):
            raise InvalidRequest(
                f"{at}.logprobs[{i}] must be a finite number of at most 0", param=f"{at}.logprobs[{i}]"
            )
    for i, v in enumerate(item.versions or ()):
        where = f"{at}.versions[{i}]"
        if limits.check("version", v, where) > newest_version:
            raise InvalidRequest(
                f"{where} is {v}, which has never been there: the newest version is {newest_version}", param=where
            )
    return Trajectory(
        id=new_id() if item.id is None else check_label(item.id, f"{at}.id"),
        group=_group(prompt, item.group, f"{at}.group"),
        prompt=prompt,
        tokens=tokens,
        logprobs=(),
        model_logprobs=(),
        versions=tuple(item.versions or ()),
        temperature=item.temperature,
        reward=reward,
        external=True,
        created=time.time(),
        mask=mask,
        turn_rewards=turn_rewards,
    )


def _group(prompt: tuple[int, ...], named: str | None, at: str) -> str:
    """Return the group of answers to this prompt. The same name with another prompt is another group."""
    own = same_prompt(prompt)
    return own if named is None else f"named:{check_label(named, at)}:{own}"


def _mask(item: External, at: str) -> tuple[int, ...]:
    """Return which tokens of the completion are trained on; () for all of them."""
    if item.mask is None:
        return ()
    if item.token_ids is None:
        raise InvalidRequest(f"{at} is for token_ids", param=at)
    if len(item.mask) != len(item.token_ids):
        raise InvalidRequest(f"{at} has {len(item.mask)} entries for {len(item.token_ids)} tokens", param=at)
    if not any(item.mask):
        raise InvalidRequest(f"{at} leaves no token to train on", param=at)
    return tuple(item.mask)


def _encoded(prompt: str | list[Turn], at: str, encode: Callable[[Prompt], Sequence[int]]) -> Sequence[int]:
    if not prompt:
        raise InvalidRequest(f"{at} is empty", param=at)
    if not isinstance(prompt, str) and len(prompt) > limits.MAX_MESSAGES:
        raise InvalidRequest(f"{at} has at most {limits.MAX_MESSAGES} messages", param=at)
    with _within(at):
        return encode(prompt if isinstance(prompt, str) else for_template(prompt))


@contextmanager
def _within(at: str) -> Iterator[None]:
    """Name the prompt at `at`, or the part of it that is wrong, in errors of whoever encodes a conversation."""
    try:
        yield
    except InvalidRequest as e:
        part = (e.param or "").removeprefix("messages")
        where = at + part if part.startswith("[") else at
        raise InvalidRequest(f"{where}: {e.message}", param=where, code=e.code) from e


def _ids(
    encoded: Sequence[int] | None, given: Sequence[int] | None, text_at: str, ids_at: str, vocab_size: int
) -> tuple[int, ...]:
    if (encoded is None) == (given is None):
        raise InvalidRequest(f"give either {text_at} or {ids_at}", param=text_at if encoded is None else ids_at)
    at, ids = (text_at, encoded) if given is None else (ids_at, given)
    if not ids:
        raise InvalidRequest(f"{at} must have at least one token", param=at)
    return limits.check_token_ids(tuple(ids), vocab_size, at)
