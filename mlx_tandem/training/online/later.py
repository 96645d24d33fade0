"""Rewards that come later: answers are kept with their logprobs, and continued, until somebody says their worth."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from mlx_tandem.errors import Conflict, EngineUnavailable, NotFound
from mlx_tandem.training.online.ledger import Ledger
from mlx_tandem.training.open_trajectories import Beginning, Exchange, OpenTrajectory
from mlx_tandem.training.store.records import Kept
from mlx_tandem.training.trajectories import Trajectory, check_rewards

Add = Callable[[Sequence[Trajectory], int], Awaitable[frozenset[str]]]


class Later:
    """The trajectories of a loop whose reward is still missing. `add` takes those that have one."""

    def __init__(self, ledger: Ledger, add: Add, clock: Callable[[], float]) -> None:
        self._ledger, self._add, self._clock = ledger, add, clock

    def __contains__(self, id: str) -> bool:
        """Return whether a trajectory waits here for its reward, or has had it."""
        return id in self._ledger.waiting or self._ledger.buffer.knows(id)

    def get(self, id: str) -> OpenTrajectory:
        """Return a trajectory without a reward. Raises NotFound, and Conflict for one that has its reward."""
        if not self._ledger.is_open:
            raise EngineUnavailable("learning has not started yet")
        self._ledger.forget(self._ledger.waiting.superfluous(self._clock()))
        found = self._ledger.waiting.get(id)
        if found is not None:
            return found
        if self._ledger.buffer.knows(id):
            raise Conflict(
                f"the trajectory {id[:64]!a} has its reward already", param="trajectory_id", code="trajectory_closed"
            )
        raise NotFound(
            f"there is no trajectory {id[:64]!a} that waits for a reward, or no longer: they are kept for "
            "rl_training.open_trajectory_s after their last answer",
            param="trajectory_id",
            code="trajectory_not_found",
        )

    async def keep(self, answers: Sequence[tuple[str, Beginning | None, Exchange]]) -> None:
        """Keep answers, each of a new trajectory or (without a beginning) of one that is kept already.

        They are on the drive when this returns. Raises StorageError, EngineUnavailable.
        """
        if not self._ledger.is_open:
            raise EngineUnavailable("learning has not started yet")
        now = self._clock()
        await self._ledger.keep([Kept(id, now, exchange, begun) for id, begun, exchange in answers])

    async def reward(self, id: str, reward: float | None, turn_rewards: Sequence[float] = ()) -> bool:
        """Take a trajectory with its reward, which is on the drive when this returns; False: it is too old already.

        `turn_rewards` has one number for each answer; `reward` counts for the last one then. Raises NotFound, Conflict,
        InvalidRequest, StorageError.
        """
        found = self.get(id)
        trajectory = found.rewarded(id, *check_rewards(reward, turn_rewards, len(found.pieces)), self._clock())
        return id not in await self._add([trajectory], found.begun.size)

    async def forget(self, id: str) -> None:
        """Keep a trajectory no longer; siblings that wait for it are learned from without it. Raises NotFound."""
        self.get(id)
        self._ledger.forget([id])
        await self._ledger.flush()
