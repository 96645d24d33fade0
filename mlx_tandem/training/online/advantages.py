"""From scored groups to data of the trainer: how much better each completion was than its siblings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.engine.learning import WHOLE, Batch, Datum, LossConfig, LossKind
from mlx_tandem.training.online.baselines import Baseline, Baselines
from mlx_tandem.training.trajectories import Trajectory, is_across

PASS_TOKENS = 1 << 20
"""About the most tokens that are sent to the engine at once."""

Group = Sequence[Trajectory]

Turns = tuple[float, ...]
"""The advantages of a completion's turns, or the one of all."""


class Recipe(NamedTuple):
    """The loss of an algorithm and the way in which it computes advantages."""

    kind: LossKind
    ratio: Literal["token", "sequence"]
    normalize: Literal["token_sum", "token_mean", "sequence_mean"]
    unit_variance: bool  # advantages are divided by the standard deviation of their group
    clip_low: float = 0.2
    clip_high: float = 0.2


RECIPES: dict[str, Recipe] = {
    "grpo": Recipe("ppo", "token", "sequence_mean", True),
    "dr_grpo": Recipe("ppo", "token", "token_sum", False),
    "dapo": Recipe("ppo", "token", "token_mean", True, clip_high=0.28),
    "gspo": Recipe("ppo", "sequence", "sequence_mean", True, clip_low=3e-4, clip_high=4e-4),
    "cispo": Recipe("cispo", "token", "token_mean", True, clip_low=1.0, clip_high=3.0),
    "ppo": Recipe("ppo", "token", "token_mean", True),
    "importance_sampling": Recipe("importance_sampling", "token", "token_mean", True),
    "dro": Recipe("dro", "token", "token_mean", True),
}
"""By `rl_training.algorithm`: Shao et al. 2024 (GRPO), Liu et al. 2025 (Dr. GRPO), Yu et al. 2025
(DAPO), Zheng et al. 2025 (GSPO), MiniMax-M1 2025 (CISPO; its clip is the one of Tinker, [0, 4])."""


def advantages(rewards: Sequence[float], *, leave_one_out: bool = False) -> tuple[float, ...]:
    """Return each reward less the mean of all, or of the others; zeros when all are the same."""
    if min(rewards) == max(rewards):
        return (0.0,) * len(rewards)
    mean, n = math.fsum(rewards) / len(rewards), len(rewards)
    return tuple((r - mean) * (n / (n - 1) if leave_one_out else 1.0) for r in rewards)


def spread(rewards: Sequence[float], least: float) -> float:
    """Return the standard deviation of rewards, `least` at least: rewards that hardly differ are not blown up."""
    mean = math.fsum(rewards) / len(rewards)
    return max(math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)), least)


def by_group(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Return the trajectories by group, in the order of each group's first member."""
    groups: dict[str, list[Trajectory]] = {}
    for t in trajectories:
        groups.setdefault(t.group, []).append(t)
    return list(groups.values())


def varies(group: Group) -> bool:
    """Return whether the rewards of a group differ."""
    return any(t.reward != group[0].reward for t in group)


def varying(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Return the groups of these trajectories whose rewards differ."""
    return [group for group in by_group(trajectories) if varies(group)]


def batches(groups: Sequence[Group], config: RLTrainingConfig, baselines: Baselines | None = None) -> tuple[Batch, ...]:
    """Return the batches of one update: whole groups, about `update_frequency` completions to a batch.

    `baselines` are those of earlier updates, which groups across prompts are compared with. The sum of the batches'
    losses is the mean over all of the update, however it was cut. Groups must vary.
    """
    recipe = RECIPES[config.algorithm]
    data = [
        each
        for group, found in zip(groups, _all(groups, config, baselines or {}), strict=True)
        for each in _data(group, found, config.mask_truncated)
    ]
    cuts = _cut(data, config.update_frequency)
    tokens, learned = max(_tokens(data), 1), max(_learned(data), 1)
    made = []
    for part in cuts:
        share = {
            "token_sum": 1.0 / (len(data) * config.loss_tokens),
            "token_mean": _tokens(part) / tokens,
            "sequence_mean": _learned(part) / learned,
        }[recipe.normalize]
        loss = LossConfig(
            kind=recipe.kind,
            ratio=recipe.ratio,
            normalize=recipe.normalize,
            scale=share,
            clip_low=config.clip_low or recipe.clip_low,
            clip_high=config.clip_high or recipe.clip_high,
            kl_coef=config.kl_coef,
            max_importance_ratio=config.max_importance_ratio,
            decoupled=config.decoupled,
            max_divergence=config.max_divergence,
        )
        made.append(Batch(config.adapter, tuple(part), loss))
    return tuple(made)


def _all(groups: Sequence[Group], config: RLTrainingConfig, baselines: Baselines) -> list[list[Turns]]:
    """Return the advantages of each turn of each group's completions."""
    scaled = config.advantage_scale or ("group" if RECIPES[config.algorithm].unit_variance else "none")
    rewards = [[t.reward for t in group] for group in groups]
    found = [_group(group, baselines, leave_one_out=config.leave_one_out) for group in groups]
    by = [1.0] * len(groups)
    if scaled == "group":
        by = [spread(own, config.least_spread) for own in rewards]
    elif scaled == "batch":
        by = [spread([a for own in found for turns in own for a in turns], config.least_spread)] * len(groups)
    return [[tuple(a / each for a in turns) for turns in own] for own, each in zip(found, by, strict=True)]


def _tokens(data: Sequence[Datum]) -> int:
    """Return how many tokens are trained on."""
    return sum(sum(d.trained) for d in data)


def _learned(data: Sequence[Datum]) -> int:
    """Return how many completions have a token that is trained on."""
    return sum(any(d.trained) for d in data)


def _group(group: Group, baselines: Baselines, *, leave_one_out: bool) -> list[Turns]:
    """Return the advantages of each turn of a group's completions: one for all turns, where no turn has a reward."""
    rewards = [t.reward for t in group]
    across = is_across(group[0].group)
    if not any(t.turn_rewards for t in group):
        if across:
            return [(a,) for a in baselines.get(group[0].group, Baseline()).against(rewards)]
        return [(a,) for a in advantages(rewards, leave_one_out=leave_one_out)]
    leave_one_out = leave_one_out or across
    # A turn is worth what comes from it on, and is compared with the same turn of the others that came so far.
    worth = [_worth(t) for t in group]
    found: list[list[float]] = [[] for _ in group]
    for k in range(max(map(len, worth))):
        there = [i for i, own in enumerate(worth) if len(own) > k]
        for i, a in zip(there, advantages([worth[j][k] for j in there], leave_one_out=leave_one_out), strict=True):
            found[i].append(a)
    return [tuple(own) for own in found]


def _worth(t: Trajectory) -> list[float]:
    """Return for each turn the sum of its reward and the later ones; the whole reward where turns have none."""
    if not t.turn_rewards:
        return [t.reward] * len(t.turns)
    return [math.fsum(t.turn_rewards[k:]) for k in range(len(t.turn_rewards))]


def _data(group: Group, found: Sequence[Turns], mask_truncated: bool) -> list[Datum]:
    return [
        datum(t, turns, left_out=mask_truncated and t.finish_reason == "length")
        for t, turns in zip(group, found, strict=True)
    ]


def datum(t: Trajectory, found: Turns, *, left_out: bool = False) -> Datum:
    """Return a trajectory as data for a trainer, with one advantage for each turn or one for all.

    Nothing is learned from one that is `left_out`.
    """
    # A greedy choice was not drawn: it counts as if it had been, from the model's own distribution. What something else
    # has drawn counts as if the trainer had.
    logprobs = None if t.external else t.logprobs if t.temperature else t.model_logprobs
    n = len(t.tokens)
    # A completion that is just average has no weight, and yet it counts in means and keeps to the reference.
    mask = (0,) * n if left_out else t.mask or (() if all(found) else (1,) * n)
    weights = [0.0] * n
    places = t.turns
    for place, advantage in zip(places, found if len(found) == len(places) else found * len(places), strict=True):
        weights[place] = [advantage] * (place.stop - place.start)
    drawn = t.truncation if t.temperature and not t.external else WHOLE
    return Datum(
        t.prompt + t.tokens, len(t.prompt), tuple(weights), logprobs, t.temperature or 1.0, mask, truncation=drawn
    )


def _cut(data: Sequence[Datum], size: int) -> list[list[Datum]]:
    cuts: list[list[Datum]] = []
    tokens = 0
    for each in data:
        tokens += len(each.tokens)
        if not cuts or len(cuts[-1]) >= size or tokens > PASS_TOKENS:
            cuts.append([])
            tokens = len(each.tokens)
        cuts[-1].append(each)
    return cuts
