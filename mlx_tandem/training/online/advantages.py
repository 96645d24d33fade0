"""From scored groups to data of the trainer: how much better each completion was than its siblings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.engine.learning import Batch, Datum, LossConfig, LossKind
from mlx_tandem.training.trajectories import Trajectory

EPS = 1e-6
"""Added to the standard deviation of rewards, so that equal rewards do not divide by zero."""

PASS_TOKENS = 1 << 20
"""About the most tokens that are sent to the engine at once."""

Group = Sequence[Trajectory]


class Recipe(NamedTuple):
    """The loss of an algorithm and the way in which it computes advantages."""

    kind: LossKind
    ratio: Literal["token", "sequence"]
    normalize: Literal["token_sum", "token_mean", "sequence_mean"]
    unit_variance: bool  # advantages are divided by the standard deviation of their group


RECIPES: dict[str, Recipe] = {
    "grpo": Recipe("ppo", "token", "sequence_mean", True),
    "dr_grpo": Recipe("ppo", "token", "token_sum", False),
    "gspo": Recipe("ppo", "sequence", "sequence_mean", True),
    "cispo": Recipe("cispo", "token", "token_mean", True),
    "ppo": Recipe("ppo", "token", "token_mean", True),
    "importance_sampling": Recipe("importance_sampling", "token", "token_mean", True),
    "dro": Recipe("dro", "token", "token_mean", True),
}
"""By `rl_training.algorithm`: Shao et al. 2024 (GRPO), Liu et al. 2025 (Dr. GRPO), Zheng et al. 2025 (GSPO)."""


def advantages(rewards: Sequence[float], *, unit_variance: bool) -> tuple[float, ...]:
    """Return each reward less their mean, over their standard deviation if asked; zeros when all are the same."""
    if min(rewards) == max(rewards):
        return (0.0,) * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if not unit_variance:
        return tuple(centred)
    deviation = math.sqrt(math.fsum(c * c for c in centred) / len(centred))
    return tuple(c / (deviation + EPS) for c in centred)


def by_group(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Return the trajectories by group, in the order of each group's first member."""
    groups: dict[str, list[Trajectory]] = {}
    for t in trajectories:
        groups.setdefault(t.group, []).append(t)
    return list(groups.values())


def varies(group: Group) -> bool:
    """Return whether the rewards of a group differ."""
    return any(t.reward != group[0].reward for t in group)


def batches(groups: Sequence[Group], config: RLTrainingConfig) -> tuple[Batch, ...]:
    """Return the batches of one update: whole groups, about `update_frequency` completions to a batch.

    The sum of the batches' losses is the mean over all of the update, however it was cut. Groups must vary.
    """
    recipe = RECIPES[config.algorithm]
    data = [
        _datum(t, advantage)
        for group in groups
        for t, advantage in zip(
            group, advantages([t.reward for t in group], unit_variance=recipe.unit_variance), strict=True
        )
    ]
    cuts = _cut(data, config.update_frequency)
    tokens = sum(len(d.weights) for d in data)
    longest = max(len(d.weights) for d in data)
    made = []
    for part in cuts:
        # The trainer counts only what has a weight; a completion that is just average has none and counts as well.
        counted = [len(d.weights) for d in part if d.weights[0] != 0]
        share = {
            "token_sum": 1.0 / (len(data) * longest),
            "token_mean": sum(counted) / tokens,
            "sequence_mean": len(counted) / len(data),
        }[recipe.normalize]
        loss = LossConfig(
            kind=recipe.kind,
            ratio=recipe.ratio,
            normalize=recipe.normalize,
            scale=share,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_coef=config.kl_coef,
            max_importance_ratio=config.max_importance_ratio,
        )
        made.append(Batch(config.adapter, tuple(part), loss))
    return tuple(made)


def _datum(t: Trajectory, advantage: float) -> Datum:
    # A greedy choice was not drawn: it counts as if it had been, from the model's own distribution. What something else
    # has drawn counts as if the trainer had.
    logprobs = None if t.external else t.logprobs if t.temperature else t.model_logprobs
    return Datum(t.prompt + t.tokens, len(t.prompt), (advantage,) * len(t.tokens), logprobs, t.temperature or 1.0)


def _cut(data: Sequence[Datum], size: int) -> list[list[Datum]]:
    cuts: list[list[Datum]] = []
    tokens = 0
    for datum in data:
        tokens += len(datum.tokens)
        if not cuts or len(cuts[-1]) >= size or tokens > PASS_TOKENS:
            cuts.append([])
            tokens = len(datum.tokens)
        cuts[-1].append(datum)
    return cuts
