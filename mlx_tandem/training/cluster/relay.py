"""Collecting on a server that does not learn itself: scored completions wait in a queue for the machine that does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mlx_tandem.generation.front import Front
from mlx_tandem.generation.reward_models import RewardModels
from mlx_tandem.training.cluster.queue import Queue
from mlx_tandem.training.cluster.wire import Item
from mlx_tandem.training.live.tasks import Tasks
from mlx_tandem.training.online.arms import Pair
from mlx_tandem.training.online.prompts import Prompt
from mlx_tandem.training.rewards import RewardPool, Scoring
from mlx_tandem.training.trajectories import Trajectory
from mlx_tandem.types import AdapterRef, SamplingParams


class Collector:
    """The taker of scored completions, which puts them into the queue, each with the size of its group."""

    def __init__(self, front: Front, queue: Queue):
        """Prepare the workers that score."""
        self.rewards = RewardPool(front.config.rl_training, RewardModels(front))
        self.later = None  # rewards that come later are for the server that learns
        self._queue = queue

    def is_stale(self, versions: Sequence[int]) -> bool:
        """Return False: the machine that learns drops what is too old."""
        return False

    async def add(self, trajectories: Sequence[Trajectory], size: int = 0) -> frozenset[str]:
        """Take scored completions, which are on the drive when this returns. Raises StorageError."""
        await self._queue.put([Item(t, size) for t in trajectories if t.tokens])
        return frozenset()

    def choose(self, asked: AdapterRef) -> Pair | None:
        """Return None: only the machine that learns compares versions on prompts."""
        return None

    def wait(self, prompt: Prompt, rewards: Sequence[float], n: int, pair: Pair) -> None:
        """Do nothing: `choose` returns no pair."""

    def record_prompt(
        self, prompt: tuple[int, ...], scoring: Scoring, params: SamplingParams, text: str = "", *, alone: bool = False
    ) -> None:
        """Do nothing: no siblings are drawn here."""


class Relay(Tasks):
    """A server's interface for collecting, in place of the one of a server that learns."""

    def __init__(self, front: Front, queue: Queue, clock: Callable[[], float] = time.time):
        """Prepare to collect into `queue`. `clock` returns the time in Unix seconds."""
        super().__init__()
        self.clock = clock
        self.learner = Collector(front, queue)
        self._front = front
        self.config = front.config
        self.name = front.config.rl_training.adapter

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens without control tokens."""
        return self._front.tokenizer.decode(tokens)

    def version_of(self, ref: AdapterRef | None) -> int | None:
        """Return the number of the trained adapter's version; 0 for the base, None for others."""
        if ref is None:
            return 0
        return ref.version if ref.name == self.name else None

    async def close(self) -> None:
        """End the tasks in the background and the workers."""
        await self.cancel()
        await self.learner.rewards.close()
