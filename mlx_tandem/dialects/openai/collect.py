"""The fields of a request that concern learning: metadata, scores, trajectories, and following newer versions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from mlx_tandem import limits
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.openai.bodies import Common
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.adapters.model_names import Selection
from mlx_tandem.generation.caller import CALLER
from mlx_tandem.strict_json import check_nested, dumps
from mlx_tandem.training.draws import check_same
from mlx_tandem.training.live.recorder import Collect, Collecting, Continued, Talk
from mlx_tandem.training.trajectories import ACROSS, check_label, new_id, same_prompt
from mlx_tandem.types import SamplingParams

if TYPE_CHECKING:
    from mlx_tandem.training.rewards import Scoring


def check_metadata(given: dict[str, Any] | None) -> dict[str, Any]:
    """Return the request's `metadata`; {} for None.

    Raises InvalidRequest for metadata that is too large or too deep, or has numbers that msgpack or JSON cannot write.
    """
    values = limits.MAX_METADATA_BYTES  # Each value takes at least one byte.
    check_nested(given or {}, "metadata", depth=limits.MAX_METADATA_DEPTH, values=values)
    if given and len(dumps(given)) > limits.MAX_METADATA_BYTES:
        raise InvalidRequest(f"metadata is over {limits.MAX_METADATA_BYTES} bytes", param="metadata")
    return given or {}


def collect_fields(
    front: ServerFront,
    body: Common,
    model: Selection,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[str],
    *,
    n: int,
    silent: bool,
    talk: Talk | None,
) -> Collect | None:
    """Return the request's task for learning; None if it has none.

    `texts` are the prompts as the reward functions see them. With `silent` the request generates nothing. Raises
    InvalidRequest naming the field.
    """
    metadata = check_metadata(body.metadata)
    going = None if talk is None else talk.continued
    keep, shown = bool(body.collect_trajectory) or going is not None, body.scoring_function is not None
    if not keep and not shown:
        return None
    if keep:
        CALLER.get().check_learning()
    field = "trajectory_id" if going is not None else "collect_trajectory" if keep else "scoring_function"
    collecting = _collecting(front, model, going, field, keep=keep)
    training, rewards = collecting.config.rl_training, collecting.learner.rewards
    if silent:
        raise InvalidRequest(f"{field} needs a completion, and max_tokens is 0", param=field)
    function = body.scoring_function if shown else "later" if going else training.scoring_function
    if not function:
        raise InvalidRequest(
            f"scoring_function is required, one of {', '.join(rewards.names)}: "
            "this server was started without one to take otherwise",
            param="scoring_function",
            code="missing_required_parameter",
        )
    if keep:
        limits.check("example_temperature", params.temperature, "temperature")  # Greedy choices have no logprobs.
        if params.greedy:
            raise InvalidRequest("top_p must be over 0 where trajectories are collected", param="top_p")
        if going is not None:
            check_same(params, going.temperature, going.truncation)
    later = function == "later"
    if later and collecting.learner.later is None:
        front.check_learning("scoring_function later", "scoring_function")
    if later and not keep:
        raise InvalidRequest("scoring_function later needs collect_trajectory", param="scoring_function")
    scoring = rewards.check(function, metadata)
    alone = later or (not training.siblings and training.group_size < 2)
    return Collect(
        adapter=collecting.name,
        keep=keep,
        shown=shown and not later,
        scoring=scoring,
        metadata=metadata,
        groups=_groups(metadata, scoring, prompts, n, alone=alone),
        shared="group" in metadata,
        prompts=tuple(texts),
        params=params,
        later=later,
        talk=talk,
    )


def _collecting(front: ServerFront, model: Selection, going: Continued | None, field: str, *, keep: bool) -> Collecting:
    """Return what takes the answers of `model`, or scores them alone. Raises InvalidRequest.

    A trajectory stays with the learner that has its beginning, whose adapter or the base goes on with it.
    """
    if front.relay is not None:
        if keep and front.relay.version_of(model.ref) is None:
            raise InvalidRequest(f"trajectories are collected of {front.relay.name} and of the base", param=field)
        return front.relay
    learners = front.check_learning(field, field)
    found = learners.of_version(model.ref)
    if going is not None:
        owner = learners.keeping(going.id)
        if model.ref is not None and found is not owner:
            raise InvalidRequest(
                f"this trajectory is one of {owner.name}: only it and the base go on with it", param=field
            )
        return owner
    if found is None and keep:
        raise InvalidRequest(f"trajectories are collected of {', '.join(learners.names)} and of the base", param=field)
    return found or learners.default


def _groups(
    metadata: dict[str, Any], scoring: Scoring, prompts: Sequence[Sequence[int]], n: int, *, alone: bool
) -> tuple[str, ...]:
    """Return the group of each prompt. A group that a request names never equals one that is made here.

    Single answers to equal prompts, which are scored alike, are one group. `alone`: the server adds no answers to them,
    so that they are compared with answers to other prompts.
    """
    if "group" not in metadata:
        parts = msgspec.to_builtins(scoring.parts)
        if n == 1 and alone:
            return (f"{ACROSS}{scoring.function}:{hashlib.blake2b(dumps(parts), digest_size=8).hexdigest()}",) * len(
                prompts
            )
        if n == 1:
            rest = dumps([metadata, parts])
            return tuple(f"single:{same_prompt(prompt, rest)}:{k}" for k, prompt in enumerate(prompts))
        own = new_id()
        return tuple(f"request:{own}:{k}" for k in range(len(prompts)))
    named = metadata["group"]
    if not isinstance(named, str):
        raise InvalidRequest("metadata.group must be a string", param="metadata.group", code="invalid_type")
    check_label(named, "metadata.group")
    # The same name for another prompt is another group: answers to different prompts are no siblings.
    return tuple(f"named:{named}:{same_prompt(prompt)}" for prompt in prompts)


def control_arm(front: ServerFront, body: Common, model: Selection, collect: Collect) -> tuple[Selection, Collect]:
    """Return the model that answers a request that is collected, and its task for learning.

    Some requests for a trained adapter, without a version, are answered by its accepted version, and some by both.
    """
    asked = body.model if body.lora_adapter is None else body.lora_adapter
    if not collect.compared or model.ref is None or model.arm is not None or asked != collect.adapter:
        return model, collect
    collecting = front.collector(collect.adapter)
    pair = None if collecting is None else collecting.learner.choose(model.ref)
    if pair is None:
        return model, collect
    entry = front.models.registry.entry(pair.first.label)
    return Selection(entry), replace(collect, pair=pair)


def follows(front: ServerFront, body: Common, model: Selection) -> bool:
    """Return whether the request continues under newer versions of its trained adapter when they are published."""
    if body.swap_policy != "inflight_keep":
        return False
    trained = front.check_learning("swap_policy inflight_keep", "swap_policy").names
    asked = body.model if body.lora_adapter is None else body.lora_adapter
    if model.ref is None or model.ref.name not in trained or "@" in (asked or ""):
        raise InvalidRequest(
            f"swap_policy inflight_keep is for requests to {' or '.join(trained)}, without a version",
            param="swap_policy",
        )
    return True


def shown_version(front: ServerFront, body: Common, model: Selection) -> int | None:
    """Return the version that the reply names for each token; None if the reply names no versions."""
    collecting = front.collecting
    if collecting is None or not (body.return_token_ids or body.collect_trajectory or body.trajectory_id):
        return None
    number = collecting.version_of(model.ref)
    return number if number is not None or model.ref is None else model.ref.version
