"""Begins the group of ranks of an engine, for the first rank: on this machine, or with ranks that were launched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from mlx_tandem.config import EngineConfig, ParallelConfig
from mlx_tandem.errors import ModelError

if TYPE_CHECKING:
    from mlx_tandem.engine.ranks.leader import RankLeader

log = logging.getLogger("mlx_tandem.ranks")


@contextmanager
def group(config: EngineConfig, wake: Callable[[], None]) -> Iterator[tuple[EngineConfig, RankLeader | None]]:
    """Connect with the other ranks and yield the settings and the leader of the group; None as the leader of one rank.

    Where this MLX lacks the mode and the settings are not strict, the settings are those of one rank. Other ranks of
    this machine end with the block. `wake` is called when the group has ended.

    Raises:
        ModelError: MLX cannot carry sums in the way that is asked for.
        GroupFailed: The ranks cannot be connected.
    """
    if config.parallel.ranks == 1:
        yield config, None
        return
    from mlx_tandem.engine.ranks.launched import launched_rank
    from mlx_tandem.engine.ranks.leader import RankLeader
    from mlx_tandem.engine.ranks.local import LocalRanks
    from mlx_tandem.engine.ranks.remote import LaunchedRanks

    mode, number = config.parallel.mode, config.parallel.ranks
    with ExitStack() as stack:
        # MLX reads the variables of a rank when it is loaded.
        ranks = LocalRanks(mode, number) if launched_rank() is None else None
        if ranks is not None:
            stack.enter_context(closing(ranks))
        from mlx_tandem.model.leading import available, meet

        if not available(mode):
            if config.parallel.strict:
                raise ModelError(f"--distributed-mode {mode} is not in this MLX", param="distributed_mode")
            log.warning("this MLX has no --distributed-mode %s: one device serves", mode)
            yield msgspec.structs.replace(config, parallel=ParallelConfig()), None
            return
        others = LaunchedRanks(mode, number, partial(meet, mode)) if ranks is None else ranks
        leader = RankLeader(others.start(), silence_seconds=config.stall_seconds, wake=wake)
        stack.enter_context(closing(leader))
        leader.begin(config)
        yield config, leader
