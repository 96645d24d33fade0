"""Rewards: named functions that give completions their numbers, run in worker processes.

Names are those of `builtin.py`, of packages' own functions (entry points of the group `mlx_tandem.rewards`) and of
composites in the configuration. Nothing that comes over the network is ever run.
"""

from mlx_tandem.training.rewards.messages import KINDS, Kind, Sample, Scoring
from mlx_tandem.training.rewards.pool import RewardPool
from mlx_tandem.training.rewards.scoring import LATER

__all__ = ["KINDS", "LATER", "Kind", "RewardPool", "Sample", "Scoring"]
