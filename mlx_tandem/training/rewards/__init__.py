"""Rewards: named functions that give completions their numbers, run in worker processes.

Names are those of `builtin.py`, of packages' own functions (entry points of the group `mlx_tandem.rewards`), of
composites in the configuration, and `reward_model`, whose scores the engine computes. Nothing that comes over the
network is ever run.
"""

from mlx_tandem.training.rewards.messages import KINDS, Kind, Sample, Scoring
from mlx_tandem.training.rewards.models import RewardModels
from mlx_tandem.training.rewards.pool import RewardPool
from mlx_tandem.training.rewards.scoring import LATER

__all__ = ["KINDS", "LATER", "Kind", "RewardModels", "RewardPool", "Sample", "Scoring"]
